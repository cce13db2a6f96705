"""The deployment that speaks HTTP: text, tokens and names here, ids and events beyond the handle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any, cast

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from engine import Event, GenerateRequest

from .api import Service, create_api
from .checkpoint import describe, locate
from .config import IngressSettings
from .errors import KNOWN_ERRORS, SERVER_ERROR, ApiError, to_api_error
from .schemas import Head
from .telemetry import ServeRecorder

_NOT_READY: tuple[type[Exception], ...] = (TimeoutError, *KNOWN_ERRORS)


class HandleEngineClient:
    """An EngineClient that reaches EngineServer replicas through Ray Serve."""

    def __init__(self, handle: DeploymentHandle[Any], *, ready_timeout_s: float) -> None:
        # Results travel by gRPC instead of through Ray's object store: a third of the time for each batch.
        self._calls = handle.options(_by_reference=False)
        self._streams = handle.options(stream=True, _by_reference=False)
        self._ready_timeout_s = ready_timeout_s
        self._is_ready = False

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[tuple[Event, ...], None]:
        """The request's events from one of the replicas."""
        if not self._is_ready:
            # Without any replica a call would wait for one instead of failing.
            await self.check_ready()
        response = cast(DeploymentResponseGenerator[tuple[Event, ...]], self._streams.generate.remote(request))
        try:
            async for events in response:
                yield events
        except KNOWN_ERRORS as error:
            raise to_api_error(error) from error
        finally:
            response.cancel()  # type: ignore[no-untyped-call]

    async def concept_top_tokens(self, concept_id: int, k: int, head: Head) -> list[tuple[int, float]]:
        """(token id, alignment) of the tokens that a concept most promotes."""
        if not self._is_ready:
            await self.check_ready()
        top: list[tuple[int, float]] = await self._calls.concept_top_tokens.remote(concept_id, k, head)
        return top

    async def check_ready(self) -> None:
        """Raise ApiError 503 unless a replica answers within the timeout."""
        try:
            await asyncio.wait_for(self._answer(), self._ready_timeout_s)
        except _NOT_READY as error:
            self._is_ready = False
            message = "no engine is ready yet; try again shortly"
            raise ApiError(503, message, code="not_ready", type=SERVER_ERROR, retry_after_s=2) from error
        self._is_ready = True

    async def _answer(self) -> None:
        await self._calls.stats.remote()


@serve.deployment(name="Ingress")
@serve.ingress()
class Ingress:
    """Reads the checkpoint's description, not its weights, and answers HTTP."""

    def __init__(
        self,
        engine: DeploymentHandle[Any],
        *,
        model: str,
        revision: str | None,
        model_id: str,
        settings: IngressSettings,
    ) -> None:
        folder = locate(model, revision, with_weights=False)
        self._service = Service(
            client=HandleEngineClient(engine, ready_timeout_s=settings.ready_timeout_s),
            checkpoint=describe(folder, model_id),
            limits=settings.limits,
            created=int(time.time()),
            recorder=ServeRecorder(),
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve after the constructor."""
        return create_api(self._service)
