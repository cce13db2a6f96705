"""The deployment that speaks HTTP: text, tokens and names here, ids and events beyond the handle."""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from .api import create_api
from .api_keys import ApiKeys, open_paths
from .checkpoint import describe, locate
from .config import IngressSettings, TelemetrySettings, preset_folder
from .presets import PresetStore
from .prometheus_text import PrometheusRecorder, TeeRecorder
from .router_client import RoutedEngineClient
from .service import Service
from .telemetry import ServeRecorder
from .tracing import make_tracer


@serve.deployment(name="Ingress")
@serve.ingress()
class Ingress:
    """Reads the checkpoint's description, not its weights, and answers HTTP."""

    def __init__(
        self,
        engine: DeploymentHandle[Any],
        *,
        router: DeploymentHandle[Any] | None = None,
        model: str,
        revision: str | None,
        model_id: str,
        settings: IngressSettings,
        telemetry: TelemetrySettings | None = None,
    ) -> None:
        """Without a `router` each request's replica is chosen here, by what replicas publish."""
        folder = locate(model, revision, with_weights=False)
        checkpoint = describe(folder, model_id)
        recorder, metrics = ServeRecorder(), PrometheusRecorder()
        tracer = make_tracer(telemetry or TelemetrySettings(), "ingress")
        client = RoutedEngineClient(
            engine,
            router,
            block_size=checkpoint.config.diff_block_size,
            settings=settings,
            recorder=TeeRecorder(recorder, metrics),
            tracer=tracer,
        )
        self._service = Service(
            client=client,
            checkpoint=checkpoint,
            limits=settings.limits,
            created=int(time.time()),
            recorder=recorder,
            tracer=tracer,
            presets=PresetStore(preset_folder(settings)),
            metrics=metrics,
            cors=settings.cors,
            api_keys=None if settings.api_keys is None else ApiKeys(settings.api_keys),
            open_paths=open_paths(settings.api_keys),
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve after the constructor."""
        return create_api(self._service)
