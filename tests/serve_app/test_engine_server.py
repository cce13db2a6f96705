"""EngineServer as a plain class, on a FakeEngine and without Ray."""

from __future__ import annotations

import asyncio
import time

import pytest

from engine import (
    CheckpointError,
    Committed,
    EngineStopped,
    Finished,
    GenerateRequest,
    InvalidValue,
    NullRecorder,
    QueueFull,
    Started,
)
from serve_app.engine_server import SILENT_S
from serve_app.lease_messages import Refusal, RefusalReason, ReportAnswer, Welcome
from serve_app.replica_choice import read_clock
from serve_app.routing.messages import Lease
from serve_app.routing.ranking import rank_replicas
from tests.serve_app.plain_servers import LEASE, ROUTE, Plain, request, told

pytestmark = pytest.mark.anyio


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


async def test_a_leased_request_is_welcomed_before_its_first_event(replica):
    server, engine = replica()
    await told(server)
    items = [item async for item in server.take(request(), ROUTE, LEASE)]
    assert items[0] == Welcome("local")
    assert isinstance(items[-1][-1], Finished)
    assert len(engine.requests) == 1


async def test_what_has_no_lane_is_refused_and_nothing_of_it_is_begun(replica):
    server, _ = replica(coalesce_interval_s=0, num_lanes=1)
    await told(server)
    running = server.take(request(), ROUTE, LEASE)
    assert await anext(running) == Welcome("local")
    refused = [item async for item in server.take(request(), ROUTE, LEASE)]
    assert refused == [Refusal("local", RefusalReason.NO_ROOM)]
    await running.aclose()
    await told(server)
    assert (await anext(server.take(request(), ROUTE, LEASE))) == Welcome("local")


async def test_another_replicas_lease_is_refused_and_a_request_without_one_is_not(replica):
    server, _ = replica()
    await told(server)
    other = Lease(lease_id="l2", request_id="r", replica_id="other", expected_start_s=0.0, group="g")
    assert (await anext(server.take(request(), ROUTE, other))).reason is RefusalReason.WRONG_REPLICA
    assert await anext(server.take(request(), ROUTE, None)) == Welcome("local")


async def test_without_a_lease_a_request_waits_up_to_the_limit(replica):
    server, _ = replica(coalesce_interval_s=0, num_lanes=1)
    await server.reconfigure({"max_waiting": 1})
    await told(server)
    first = server.take(request(), ROUTE, None)
    await anext(first)
    with pytest.raises(QueueFull, match="max_waiting is 1"):
        await anext(server.take(request(), ROUTE, None))
    await server.reconfigure({"max_waiting": None})
    assert await anext(server.take(request(), ROUTE, None)) == Welcome("local")
    await first.aclose()


async def test_what_user_config_leaves_out_is_what_the_settings_say(replica):
    """It went back to the default, so that a change of one setting silently changed the other."""
    server, _ = replica(coalesce_interval_s=0.7, max_waiting=5)
    await server.reconfigure({"coalesce_interval_s": 0.1})
    assert (server._coalesce_interval_s, server._max_waiting) == (0.1, 5)
    await server.reconfigure({"max_waiting": None})
    assert (server._coalesce_interval_s, server._max_waiting) == (0.7, None)
    await server.reconfigure({})
    assert (server._coalesce_interval_s, server._max_waiting) == (0.7, 5)


@pytest.mark.parametrize("config", [{"max_waitin": 1}, {"max_waiting": -1}, {"coalesce_interval_s": "soon"}], ids=str)
async def test_live_settings_that_are_none_are_refused_by_name(replica, config):
    server, _ = replica()
    with pytest.raises(ValueError, match=next(iter(config))):
        await server.reconfigure(config)


class Router:
    """A handle that takes reports."""

    def __init__(self) -> None:
        self.reports = []
        self.report = self

    def options(self, **options):
        return self

    async def remote(self, report, block_size: int) -> ReportAnswer:
        self.reports.append((report, block_size))
        return ReportAnswer(False, 3, 1.5)


async def test_the_router_hears_when_a_lane_is_taken_and_when_it_comes_free(replica):
    router = Router()
    server, _ = replica(coalesce_interval_s=0, router=router, num_lanes=2)
    await told(server)
    assert server.record_autoscaling_stats() == {
        "lanes": 2.0, "lanes_in_use": 0.0, "lanes_queued": 3.0, "oldest_wait_s": 1.5,
    }  # fmt: skip
    stream = server.take(request(), ROUTE, LEASE)
    await anext(stream)
    await anext(stream)
    await asyncio.sleep(0.01)
    assert server.record_autoscaling_stats()["lanes_in_use"] == 1.0
    await stream.aclose()
    await asyncio.sleep(0.01)
    free = [report.num_lanes_free for report, _ in router.reports]
    assert (free[0], min(free), free[-1]) == (2, 1, 2)
    assert {block_size for _, block_size in router.reports} == {16}
    assert "l1" in [lease for report, _ in router.reports for lease in report.settled_leases]
    assert [report.number for report, _ in router.reports] == list(range(1, len(free) + 1))


async def test_a_replica_whose_engine_hangs_is_the_last_to_be_chosen_without_the_router(replica):
    """It looked idle, since all boundaries that it had published had passed: it got every request, and `/ready` asked
    it and nobody else, after which the ingress refused everything."""
    server, engine = replica(coalesce_interval_s=0)
    await told(server)
    assert not server.record_routing_stats()["is_silent"]
    engine.ask_load = lambda **options: None
    server._desk._clock = lambda: time.monotonic() + SILENT_S
    hanging = server.record_routing_stats()
    clocks = [read_clock("a", hanging, time.time(), 0), read_clock("b", {}, time.time(), 9)]
    assert rank_replicas(clocks, ROUTE) == ["b", "a"]
    server._reporter.take(engine.load())
    assert not server.record_routing_stats()["is_silent"]


@pytest.mark.parametrize("config", [{"coalesce_interval_s": -1}, {"max_waitin": 1}], ids=str)
async def test_bad_settings_end_a_replica_that_starts_and_none_that_runs(replica, config):
    """Serve ends a replica whose `reconfigure` raises, with all its streams."""
    server, _ = replica()
    with pytest.raises(ValueError, match=next(iter(config))):
        await server.reconfigure(config)
    await server.reconfigure({"max_waiting": 3})
    await server.reconfigure(config)
    assert server._max_waiting == 3


async def test_reports_that_ended_begin_again_with_the_next_look_at_its_health(replica):
    server, _ = replica()
    await told(server)
    server._reporting.cancel()
    await asyncio.gather(server._reporting, return_exceptions=True)
    before = server._reporter._number
    await told(server)
    assert server._reporter._number > before
    server._reporting.cancel()


async def test_an_idle_replica_publishes_the_same_clock_again_and_a_busy_one_does_not(replica):
    server, _ = replica(coalesce_interval_s=0)
    assert server.record_routing_stats() == {}
    await told(server)
    first = server.record_routing_stats()
    assert first["num_lanes_free"] == 64 and server.record_routing_stats() is first
    stream = server.take(request(), ROUTE, None)
    await anext(stream)
    await anext(stream)
    await asyncio.sleep(0.01)
    busy = server.record_routing_stats()
    assert busy["num_lanes_free"] == 63 and server.record_routing_stats() is not busy
    await stream.aclose()
