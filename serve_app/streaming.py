"""How events travel: gathered by time on the engine's side, turned into text and server-sent events on HTTP's."""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import suppress
from typing import Any

from engine import BlockFinished, Commit, Event, Finished

from .tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


def sse(payload: dict[str, Any]) -> bytes:
    """One server-sent event. Raises ValueError for NaN and infinities, which JSON cannot hold."""
    return (
        b"data: " + json.dumps(payload, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"
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


class TextAssembler:
    """Puts commits, which come in any order, into text that only grows.

    A token is taken once all its left neighbours are committed, and text is given out in whole characters. At the first
    of `end_ids` the text ends for good, even where tokens right of it were committed earlier.
    """

    def __init__(self, tokenizer: Tokenizer, *, start: int, end_ids: Iterable[int]) -> None:
        """`start` is the position of the first generated token."""
        self._tokenizer = tokenizer
        self._next = start
        self._end_ids = frozenset(end_ids)
        self._waiting: dict[int, int] = {}
        self.is_ended = False
        """An end token was reached: no more text comes."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.token_ids: list[int] = []
        """Tokens of the text so far."""

    def add(self, commits: Sequence[Commit]) -> str:
        """Take `commits`; return the text that became certain, often none."""
        self._waiting |= {commit.position: commit.token_id for commit in commits}
        new_bytes = bytearray()
        while not self.is_ended and self._next in self._waiting:
            token_id = self._waiting.pop(self._next)
            if token_id in self._end_ids:
                self.is_ended = True
                break
            self._next += 1
            self.token_ids.append(token_id)
            new_bytes += self._tokenizer.text_bytes(token_id)
        return self._decoder.decode(bytes(new_bytes))

    def finish(self) -> str:
        """What is left when nothing more comes: U+FFFD for a character that was never completed, else nothing."""
        return self._decoder.decode(b"", final=True)
