"""An EngineServer as a plain class on a FakeEngine, and what it is asked."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from engine import EngineConfig, GenerateRequest, ModelConfig, NullRecorder
from serve_app.config import EngineServerSettings
from serve_app.engine_server import EngineServer
from serve_app.routing.messages import Lease, RouteRequest
from tests.fakes import FakeEngine

Plain = EngineServer.func_or_class
LEASE = Lease(lease_id="l1", request_id="r", replica_id="local", expected_start_s=0.0, group="g")
ROUTE = RouteRequest(request_id="r", num_prompt_tokens=2, max_tokens=40)


async def told(server: Any) -> None:
    """Let what the engine says of its load arrive."""
    await server.check_health()
    await asyncio.sleep(0.01)


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(prompt_token_ids=(64, 65), max_tokens=40, request_id="r", **fields)


def plain_server(
    folder: Path,
    *,
    warm_up_tokens: int = 0,
    coalesce_interval_s: float = 3600,
    max_waiting: int | None = None,
    router: Any = None,
    **options: Any,
) -> tuple[Any, FakeEngine]:
    """(server, its engine). `options` are FakeEngine's; commits come block by block, however long a block takes."""
    engines = []

    def factory(path: Path, config: EngineConfig, *, recorder: object) -> FakeEngine:
        assert isinstance(config, EngineConfig)
        engines.append(FakeEngine(ModelConfig.from_json(path), **options))
        return engines[0]

    server = Plain(
        str(folder),
        settings=EngineServerSettings(
            coalesce_interval_s=coalesce_interval_s, max_waiting=max_waiting, warm_up_tokens=warm_up_tokens
        ),
        router=router,
        engine_factory=factory,
        recorder_factory=NullRecorder,
    )
    return server, engines[0]
