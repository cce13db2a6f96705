"""EngineServer as a plain class, on a FakeEngine and without Ray."""

from __future__ import annotations

import asyncio

import pytest

from engine import (
    CheckpointError,
    Committed,
    EngineConfig,
    EngineStopped,
    Finished,
    GenerateRequest,
    InvalidValue,
    ModelConfig,
    NullRecorder,
    Started,
)
from serve_app.config import EngineServerSettings
from serve_app.engine_server import EngineServer
from tests.fakes import FakeEngine

pytestmark = pytest.mark.anyio
Plain = EngineServer.func_or_class


@pytest.fixture
def replica(folder):
    """Options of FakeEngine -> (server, its engine)."""

    def make(*, warm_up_tokens: int = 0, coalesce_interval_s: float = 3600, **options):
        engines = []

        def factory(path, config, *, recorder):
            assert isinstance(config, EngineConfig)
            engines.append(FakeEngine(ModelConfig.from_json(path), **options))
            return engines[0]

        server = Plain(
            str(folder),
            settings=EngineServerSettings(coalesce_interval_s=coalesce_interval_s, warm_up_tokens=warm_up_tokens),
            engine_factory=factory,
            recorder_factory=NullRecorder,
        )
        return server, engines[0]

    return make


def request(**fields) -> GenerateRequest:
    return GenerateRequest(prompt_token_ids=(64, 65), max_tokens=40, request_id="r", **fields)


async def test_events_come_first_at_once_and_then_block_by_block(replica):
    server, _ = replica()
    batches = [batch async for batch in server.generate(request())]
    assert [type(event) for event in batches[0]] == [Started]
    # Positions 2 to 41 lie in three blocks of sixteen; the last one ends with the request.
    commits = [sum(len(e.commits) for e in batch if isinstance(e, Committed)) for batch in batches[1:]]
    assert commits == [14, 16, 10, 0]


async def test_commits_cross_once(replica):
    server, _ = replica()
    events = [event async for batch in server.generate(request()) for event in batch]
    assert isinstance(events[-1], Finished)
    assert events[-1].output.commits == ()
    commits = [commit for event in events if isinstance(event, Committed) for commit in event.commits]
    token_of = {commit.position: commit.token_id for commit in commits}
    assert events[-1].output.token_ids == tuple(token_of[position] for position in range(2, 42))


async def test_closing_a_stream_aborts_its_request(replica):
    server, engine = replica(coalesce_interval_s=0)
    stream = server.generate(request())
    await anext(stream)
    assert engine.running == {"r"}
    await stream.aclose()
    assert (engine.running, engine.aborted) == (set(), ["r"])


async def test_cancelling_a_stream_aborts_its_request(replica):
    server, engine = replica()
    stream = server.generate(request())
    await anext(stream)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert engine.aborted == ["r"]


async def test_a_refusal_is_raised_as_it_is(replica):
    server, engine = replica()
    with pytest.raises(InvalidValue, match="mask token"):
        await anext(server.generate(GenerateRequest(prompt_token_ids=(279,))))
    assert not engine.requests


async def test_it_is_warm_once_it_is_constructed(replica):
    _, engine = replica(warm_up_tokens=8)
    assert [(r.prompt_token_ids, r.max_tokens) for r in engine.requests] == [((), 8)]
    assert not engine.running


async def test_health_is_the_engines(replica):
    server, engine = replica()
    await server.check_health()
    engine.failure = EngineStopped("a pass hangs")
    with pytest.raises(EngineStopped):
        await server.check_health()


async def test_it_tells_what_is_in_use_and_what_a_concept_promotes(replica):
    server, _ = replica()
    assert (await server.stats())["num_running"] == 0
    assert await server.concept_top_tokens(5, 2, "known") == [(5, 3.0), (6, 2.875)]


def test_a_model_that_is_nowhere_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="'no/such-model' is no folder here"):
        Plain("no/such-model", recorder_factory=NullRecorder)
