"""How events travel: gathered by time on the engine's side, server-sent on HTTP's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from engine import BlockFinished, Event, Finished

DONE = b"data: [DONE]\n\n"


def sse(payload: dict[str, Any]) -> bytes:
    """One server-sent event. Raises ValueError for NaN and infinities, which JSON cannot hold."""
    return (
        b"data: " + json.dumps(payload, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"
    )


def without_commits(events: Sequence[Event]) -> tuple[Event, ...]:
    """The same with nothing in Finished that Committed events have brought: every commit crosses once."""
    return tuple(
        replace(event, output=replace(event.output, commits=())) if isinstance(event, Finished) else event
        for event in events
    )


async def coalesce(
    batches: AsyncGenerator[tuple[Event, ...], None], interval_s: float
) -> AsyncGenerator[tuple[Event, ...], None]:
    """The same events in fewer batches: the first at once, then every `interval_s` or where a block or all of it ends.

    Closing it closes `batches`. Events that came before an error are passed on before it is raised.
    """
    # Time, and not the reader, decides when to send: nothing downstream holds a sender back, so waiting for the
    # reader would gather nothing.
    loop = asyncio.get_running_loop()
    gathered: list[Event] = []
    send_at = loop.time()
    following: asyncio.Task[tuple[Event, ...]] | None = None
    try:
        while True:
            following = following or asyncio.ensure_future(anext(batches))
            wait_s = max(send_at - loop.time(), 0) if gathered else None
            await asyncio.wait({following}, timeout=wait_s)
            if following.done():
                if following.exception() is not None:
                    break
                gathered.extend(following.result())
                following = None
            is_boundary = any(isinstance(event, BlockFinished | Finished) for event in gathered)
            if gathered and (is_boundary or loop.time() >= send_at):
                yield tuple(gathered)
                gathered = []
                send_at = loop.time() + interval_s
        if gathered:
            yield tuple(gathered)
        with suppress(StopAsyncIteration):
            following.result()
    finally:
        if following is not None and not following.done():
            following.cancel()
            await asyncio.wait({following})
        await batches.aclose()
