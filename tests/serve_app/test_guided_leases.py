"""A guided request at an EngineServer: it takes two lanes, and pages for each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine import SamplingParams, Unsupported
from serve_app.lease_messages import Refusal, RefusalReason, Welcome
from tests.serve_app.plain_servers import LEASE, ROUTE, request, told

pytestmark = pytest.mark.anyio
GUIDED = {"sampling": SamplingParams(cfg_scale=1.5)}


async def test_a_guided_request_needs_two_free_lanes(replica):
    server, _ = replica(coalesce_interval_s=0, num_lanes=3)
    await told(server)
    route = replace(ROUTE, num_lanes=2)
    running = server.take(request(**GUIDED), route, LEASE)
    assert await anext(running) == Welcome("local")
    assert server.record_autoscaling_stats()["lanes_in_use"] == 2.0
    refused = [item async for item in server.take(request(**GUIDED), route, LEASE)]
    assert refused == [Refusal("local", RefusalReason.NO_ROOM)]
    await anext(running)
    await told(server)
    assert (server._desk.load.num_lanes_free, server._desk.num_lanes_waiting) == (1, 0)
    assert [item async for item in server.take(request(**GUIDED), route, LEASE)] == refused
    assert await anext(server.take(replace(request(), request_id="s"), ROUTE, LEASE)) == Welcome("local")
    await running.aclose()


async def test_pages_are_counted_for_each_lane(replica):
    server, engine = replica(coalesce_interval_s=0)
    await told(server)
    prompt = tuple(range(64, 64 + 40))
    for num_free, is_taken in ((5, False), (6, True)):
        server._desk.update(replace(engine.load(), num_pages_free=num_free))
        stream = server.take(replace(request(**GUIDED), prompt_token_ids=prompt), replace(ROUTE, num_lanes=2), LEASE)
        assert isinstance(await anext(stream), Welcome if is_taken else Refusal)
        await stream.aclose()


async def test_a_guided_request_is_refused_by_an_engine_of_one_lane_and_waits_for_nothing(replica):
    server, _ = replica(num_lanes=1)
    await told(server)
    stream = server.take(request(**GUIDED), replace(ROUTE, num_lanes=2), LEASE)
    assert await anext(stream) == Welcome("local")
    with pytest.raises(Unsupported, match="takes two lanes, and the engine has 1"):
        await anext(stream)
