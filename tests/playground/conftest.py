"""A browser and a server with the demo model for it."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from engine import AsyncEngine, EngineConfig, EngineStats, Event, Finished, GenerateRequest
from serve_app.api import Service, create_api
from serve_app.checkpoint import describe
from serve_app.completions import Caller
from serve_app.config import Limits
from serve_app.streaming import coalesce
from tests.processes import eventually, free_port

MODEL = Path(__file__).parents[2] / "demo_model" / "steerling-demo"
INTERVAL_S = 0.02
PATIENCE_MS = 120_000
"""What the browser waits for anything. Only a failure takes it."""


def chromium() -> str | None:
    """The browser's program, or None."""
    named = os.environ.get("CHROMIUM", "")
    return named or shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def why_not() -> str | None:
    """Why no browser can be driven here, or None."""
    if importlib.util.find_spec("playwright") is None:
        return "the playwright package is not installed"
    return None if chromium() else "no chromium on this machine (CHROMIUM may name one)"


@dataclass
class RecordingClient:
    """An EngineClient in this process, which keeps what became of each request."""

    engine: AsyncEngine
    ends: list[str] = field(default_factory=list)
    """For each request that ended: `finished`, or `left` if it was closed before."""

    async def generate(
        self, request: GenerateRequest, caller: Caller | None = None
    ) -> AsyncGenerator[tuple[Event, ...], None]:
        end = "left"
        try:
            async with aclosing(coalesce(self.engine.generate(request), INTERVAL_S)) as batches:
                async for events in batches:
                    if any(isinstance(event, Finished) for event in events):
                        end = "finished"
                    yield events
        finally:
            self.ends.append(end)

    async def concept_top_tokens(self, concept_id: int, k: int, head: Any) -> list[tuple[int, float]]:
        return await self.engine.concept_top_tokens(concept_id, k, head=head)

    async def check_ready(self) -> None:
        self.engine.check_health()

    def stats(self) -> EngineStats:
        """The engine's state, from any thread."""
        return asyncio.run(self.engine.stats())


@dataclass
class Site:
    """A running server."""

    url: str
    client: RecordingClient


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """The whole API on the demo model, in a thread."""
    config = EngineConfig(device="cpu", dtype="float32", num_pages=128, max_rows=4)
    engine = AsyncEngine.from_checkpoint(MODEL, config)
    client = RecordingClient(engine)
    app = create_api(Service(client=client, checkpoint=describe(MODEL, "steerling-demo"), limits=Limits(), created=1))
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    assert eventually(lambda: server.started)
    try:
        yield Site(f"http://127.0.0.1:{port}", client)
    finally:
        server.should_exit = True
        thread.join()
        engine.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium. For one module at a time: while it runs, this thread has an event loop that others would meet."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Without a sandbox since tests may run as root, where Chromium has none.
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield browser
        browser.close()
