"""The whole HTTP API over an engine in this very process: for the command line, and for tests that want no cluster."""

from __future__ import annotations

import logging
import socket
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import asdict
from typing import cast

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine import Analysis, AnalysisResult, AsyncEngine, EngineConfig, Event, GenerateRequest, Head

from .api import create_api
from .checkpoint import describe, locate
from .completions import Caller
from .config import AppConfig, preset_folder
from .lease_messages import ServiceLoad, replica_load
from .presets import PresetStore
from .service import Service
from .streaming import without_commits

_POLL_S = 0.02
_STOP_TIMEOUT_S = 10.0
_REQUEST_ID = b"x-request-id"


class LocalEngineClient:
    """An EngineClient that calls an engine in this process."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def generate(
        self, request: GenerateRequest, caller: Caller | None = None
    ) -> AsyncGenerator[tuple[Event, ...], None]:
        """The request's events; there is no queue in which `caller` would matter."""
        source = cast(AsyncGenerator[tuple[Event, ...], None], self._engine.generate(request))
        async with aclosing(source) as batches:
            async for events in batches:
                yield without_commits(events)

    async def concept_top_tokens(self, concept_id: int, k: int, head: Head) -> list[tuple[int, float]]:
        """(token id, alignment) of the tokens that a concept most promotes."""
        return await self._engine.concept_top_tokens(concept_id, k, head=head)

    async def concept_neighbors(self, concept_id: int, k: int, head: Head) -> list[tuple[int, float]]:
        """(concept id, cosine) of the concepts nearest to one."""
        return await self._engine.concept_neighbors(concept_id, k, head=head)

    async def analyze(self, analysis: Analysis) -> AnalysisResult:
        """An analysis of text."""
        return await self._engine.analyze(analysis)

    async def load(self) -> ServiceLoad:
        """What the engine uses now."""
        return ServiceLoad(replicas=(replica_load(asdict(await self._engine.stats()), "local"),))

    async def check_ready(self) -> None:
        """Raise EngineStopped if the engine has stopped or hangs."""
        self._engine.check_health()


@contextmanager
def local_server(
    model: str | None = None,
    *,
    engine: EngineConfig | None = None,
    port: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[str]:
    """Serve a checkpoint on this machine's loopback until the block ends; yields the base URL.

    `model` is a folder or hub id, None the demo model; `port` 0 takes a free one; `progress` is told bytes of weights
    read and in all. Raises CheckpointError or InvalidConfig before anything is served, and OSError for a port that is
    taken.
    """
    app = AppConfig(model=model, engine=engine or EngineConfig())
    folder = locate(app.checkpoint, app.revision, with_weights=True)
    checkpoint = describe(folder, app.served_model_id)
    running = AsyncEngine.from_checkpoint(folder, app.engine, progress=progress)
    try:
        service = Service(
            client=LocalEngineClient(running),
            checkpoint=checkpoint,
            limits=app.ingress.limits,
            created=int(time.time()),
            presets=PresetStore(preset_folder(app.ingress)),
        )
        with socket.create_server(("127.0.0.1", port)) as listener, _serving(uvicorn_server(service), listener):
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        running.stop()


class RequestIds:
    """Does what Ray Serve's proxy does elsewhere: takes a request's `x-request-id`, or makes one, and returns it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Add the header to a request that has none, and to the answer."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = dict(scope["headers"]).get(_REQUEST_ID) or str(uuid.uuid4()).encode()
        others = [(name, value) for name, value in scope["headers"] if name != _REQUEST_ID]

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (_REQUEST_ID, request_id)]}
            await send(message)

        await self.app({**scope, "headers": [*others, (_REQUEST_ID, request_id)]}, receive, send_named)


def uvicorn_server(service: Service) -> uvicorn.Server:
    """An HTTP server for `service` that says nothing of its own."""
    app = RequestIds(create_api(service))
    config = uvicorn.Config(app, log_level=logging.ERROR, access_log=False, lifespan="off")
    return uvicorn.Server(config)


@contextmanager
def _serving(server: uvicorn.Server, listener: socket.socket) -> Iterator[None]:
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="http", daemon=True)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(_POLL_S)
        yield
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join(_STOP_TIMEOUT_S)
