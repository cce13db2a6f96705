"""The deployment that hosts the engine: one engine a replica, token ids in, event batches out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Literal, cast

from ray import serve

from engine import AsyncEngine, EngineConfig, Event, Finished, GenerateRequest, Recorder

from .checkpoint import locate
from .streaming import coalesce
from .telemetry import ServeRecorder, show_engine_log

EngineFactory = Callable[..., AsyncEngine]
"""Makes an engine as `AsyncEngine.from_checkpoint` does."""


@serve.deployment(name="EngineServer")
class EngineServer:
    """Loads a checkpoint and serves it. Ready once constructed, since it has generated something by then."""

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        engine_config: EngineConfig | None = None,
        coalesce_interval_s: float = 0.05,
        warm_up_tokens: int = 8,
        engine_factory: EngineFactory = AsyncEngine.from_checkpoint,
        recorder_factory: Callable[[], Recorder] = ServeRecorder,
    ) -> None:
        """Raises CheckpointError or InvalidConfig, which ends the replica with the reason in its log."""
        started = time.monotonic()
        show_engine_log()
        folder = locate(model, revision, with_weights=True)
        self._coalesce_interval_s = coalesce_interval_s
        recorder = recorder_factory()
        self._engine = engine_factory(folder, engine_config or EngineConfig(), recorder=recorder)
        if warm_up_tokens > 0:
            # This may already run inside an event loop, which cannot run another one.
            with ThreadPoolExecutor(max_workers=1) as thread:
                thread.submit(asyncio.run, self._warm_up(warm_up_tokens)).result()
        recorder.gauge("engine_start_seconds", time.monotonic() - started)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[tuple[Event, ...], None]:
        """The request's events in batches; raises what the engine raises. Closing it aborts the request."""
        batches = cast(AsyncGenerator[tuple[Event, ...], None], self._engine.generate(request))
        async with aclosing(coalesce(batches, self._coalesce_interval_s)) as gathered:
            async for events in gathered:
                yield tuple(_without_commits(event) for event in events)

    async def concept_top_tokens(
        self, concept_id: int, k: int, head: Literal["known", "discovered"]
    ) -> list[tuple[int, float]]:
        """(token id, alignment) of the tokens that a concept most promotes."""
        return await self._engine.concept_top_tokens(concept_id, k, head=head)

    async def stats(self) -> dict[str, int]:
        """What the engine uses now."""
        return asdict(await self._engine.stats())

    async def check_health(self) -> None:
        """Called by Serve: a replica whose engine stopped or hangs is replaced."""
        self._engine.check_health()

    def __del__(self) -> None:
        # Serve calls this when the replica leaves; it also runs when the constructor failed.
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.stop()

    async def _warm_up(self, num_tokens: int) -> None:
        async for _ in self._engine.generate(GenerateRequest(prompt_token_ids=(), max_tokens=num_tokens)):
            pass


def _without_commits(event: Event) -> Event:
    """Every commit has crossed in a Committed event; once is enough."""
    return replace(event, output=replace(event.output, commits=())) if isinstance(event, Finished) else event
