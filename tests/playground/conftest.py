"""A browser and a server with the demo model for it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from engine import AsyncEngine, EngineConfig, Event, Finished, GenerateRequest
from serve_app.checkpoint import Checkpoint, describe
from serve_app.completions import Caller
from serve_app.config import Limits
from serve_app.local import LocalEngineClient, uvicorn_server
from serve_app.presets import PresetStore
from serve_app.service import Service
from tests.processes import eventually, free_port

MODEL = Path(__file__).parents[2] / "demo_model" / "steerling-demo"
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


class RecordingClient(LocalEngineClient):
    """Keeps what became of each request: `finished`, or `left` if it was closed before."""

    def __init__(self, engine: AsyncEngine) -> None:
        super().__init__(engine)
        self.ends: list[str] = []

    async def generate(
        self, request: GenerateRequest, caller: Caller | None = None
    ) -> AsyncGenerator[tuple[Event, ...], None]:
        end = "left"
        try:
            async with aclosing(super().generate(request, caller)) as batches:
                async for events in batches:
                    if any(isinstance(event, Finished) for event in events):
                        end = "finished"
                    yield events
        finally:
            self.ends.append(end)


@dataclass
class Site:
    """A running server."""

    url: str
    client: RecordingClient


class ServerFactory(Protocol):
    def __call__(self, **options: Any) -> AbstractContextManager[Site]: ...


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerFactory]:
    """Options of Service -> the whole API on the demo model, in a thread. All servers share one engine.

    `checkpoint`: what a server says of the model, if not the demo model as it is; the weights stay the engine's.
    """
    config = EngineConfig(device="cpu", dtype="float32", num_pages=128, max_rows=4)
    engine = AsyncEngine.from_checkpoint(MODEL, config)
    demo = describe(MODEL, "steerling-demo")

    @contextmanager
    def serve(checkpoint: Checkpoint = demo, **options: Any) -> Iterator[Site]:
        client = RecordingClient(engine)
        presets = PresetStore(tmp_path_factory.mktemp("presets"))
        service = Service(client=client, checkpoint=checkpoint, limits=Limits(), created=1, presets=presets, **options)
        server, port = uvicorn_server(service), free_port()
        server.config.port = port
        thread = threading.Thread(target=server.run)
        thread.start()
        assert eventually(lambda: server.started)
        try:
            yield Site(f"http://127.0.0.1:{port}", client)
        finally:
            server.should_exit = server.force_exit = True
            thread.join()

    yield serve
    engine.stop()


@pytest.fixture(scope="module")
def site(serve: ServerFactory) -> Iterator[Site]:
    """A server that asks for no key."""
    with serve() as site:
        yield site


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium. For one module at a time: while it runs, this thread has an event loop that others would meet."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Without a sandbox since tests may run as root, where Chromium has none.
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(site: Site, browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens the page in a fresh profile. In the end it must have met no error and no other host.

    `at`: another server than `site`. `may_fail`: errors of the console that contain this are the test's own doing.
    """
    contexts: list[Any] = []
    problems: list[str] = []

    def open_page(
        path: str = "/", *, at: Site | None = None, may_fail: str | None = None, width: int = 1280, **options: Any
    ) -> Any:
        url = (at or site).url
        context = browser.new_context(viewport={"width": width, "height": 800}, **options)
        context.set_default_timeout(PATIENCE_MS)
        contexts.append(context)
        page = context.new_page()

        def note(kind: str, text: str) -> None:
            if may_fail is None or may_fail not in text:
                problems.append(f"{kind}: {text}")

        page.on("pageerror", lambda error: note("exception", str(error)))
        page.on("console", lambda m: note("console", f"{m.text} {m.location}") if m.type == "error" else None)
        page.on("request", lambda r: None if r.url.startswith(url) else note("foreign request", r.url))
        page.goto(url + path)
        page.wait_for_selector(".state-ready")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []
