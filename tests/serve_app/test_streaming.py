from __future__ import annotations

import asyncio
import json

import pytest

from engine import BlockFinished, Commit, Committed, Finished
from serve_app.streaming import coalesce, sse

pytestmark = pytest.mark.anyio


def commit(position: int, token_id: int) -> Commit:
    return Commit(position, token_id, 0, 1.0, 0.0, 0.0)


def test_an_event_is_one_line_of_json_and_never_holds_nan():
    assert sse({"a": "é\r\n"}) == 'data: {"a":"é\\r\\n"}\n\n'.encode()
    assert json.loads(sse({"a": 1.5}).removeprefix(b"data: ")) == {"a": 1.5}
    with pytest.raises(ValueError, match="JSON"):
        sse({"a": float("nan")})


def token(number: int) -> Committed:
    return Committed("r", 0, (commit(number, number),))


class Source:
    """Gives batches, perhaps raises after them, and knows whether it was closed."""

    def __init__(self, *batches, error: Exception | None = None, hangs: bool = False) -> None:
        self.batches, self.error, self.hangs, self.is_closed = batches, error, hangs, False

    async def __call__(self):
        try:
            for batch in self.batches:
                await asyncio.sleep(0)
                yield batch
            if self.hangs:
                await asyncio.Event().wait()
            if self.error is not None:
                raise self.error
        finally:
            self.is_closed = True


async def test_the_first_batch_leaves_at_once_and_the_next_ones_gather_until_a_block_ends():
    block_end = BlockFinished("r", 0, 0, 4)
    source = Source((token(0),), (token(1),), (token(2),), (token(3), block_end), (token(4),))
    batches = [batch async for batch in coalesce(source(), 3600)]
    assert batches == [(token(0),), (token(1), token(2), token(3), block_end), (token(4),)]


async def test_a_batch_leaves_when_its_time_has_come_though_nothing_follows():
    source = Source((token(0),), (token(1),), hangs=True)
    gathered = coalesce(source(), 0.01)
    assert [await anext(gathered), await anext(gathered)] == [(token(0),), (token(1),)]
    await gathered.aclose()


async def test_without_an_interval_every_batch_passes_as_it_is():
    batches = [(token(i),) for i in range(5)]
    assert [batch async for batch in coalesce(Source(*batches)(), 0)] == batches


async def test_events_before_an_error_are_passed_on_first():
    source = Source((token(0),), (token(1),), error=RuntimeError("broken"))
    gathered = coalesce(source(), 3600)
    assert [await anext(gathered), await anext(gathered)] == [(token(0),), (token(1),)]
    with pytest.raises(RuntimeError, match="broken"):
        await anext(gathered)
    assert source.is_closed


async def test_closing_closes_the_source_also_while_it_waits():
    source = Source((token(0),), hangs=True)
    gathered = coalesce(source(), 3600)
    await anext(gathered)
    waiting = asyncio.ensure_future(anext(gathered))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    assert source.is_closed


async def test_the_last_event_leaves_with_what_was_gathered():
    end = Finished("r", None)
    source = Source((token(0),), (token(1),), (end,))
    assert [batch async for batch in coalesce(source(), 3600)] == [(token(0),), (token(1), end)]
