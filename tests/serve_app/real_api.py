"""The API over a real engine of a tiny checkpoint, in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx

from engine import AsyncEngine, Engine, EngineConfig
from serve_app.api import create_api
from serve_app.config import Limits
from serve_app.service import Service
from serve_app.translation import Checkpoint
from tests.serve_app.conftest import DirectClient


class RealApi:
    """A client, and the engine that answers it."""

    def __init__(self, engine: AsyncEngine, client: httpx.AsyncClient) -> None:
        self.engine, self._client = engine, client

    async def post(self, path: str, body: Any) -> httpx.Response:
        return await self._client.post(path, json=body)

    async def refusal(self, path: str, body: Any) -> dict[str, Any]:
        """The error of a 400."""
        response = await self.post(path, body)
        assert response.status_code == 400, response.text
        error: dict[str, Any] = response.json()["error"]
        return error


Kind = TypeVar("Kind", bound=RealApi)


@asynccontextmanager
async def real_api(folder: Path, served: Checkpoint, *, kind: type[Kind], num_pages: int = 64) -> AsyncIterator[Kind]:
    """Until the block ends; `kind` is what is yielded."""
    config = EngineConfig(device="cpu", dtype="float32", num_pages=num_pages)
    engine = AsyncEngine(Engine.from_checkpoint(folder, config))
    configured = Limits(max_body_bytes=100_000, max_prompts=4)
    app = create_api(Service(client=DirectClient(engine), checkpoint=served, limits=configured, created=1))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield kind(engine, client)
    engine.stop()
