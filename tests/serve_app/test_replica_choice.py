"""Which replica a call goes to, without Ray's machinery around the choice."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.request_router import PendingRequest

from serve_app.replica_choice import ReplicaChoice, publish_clock, read_clock, route_of
from serve_app.routing.messages import RouteRequest
from serve_app.routing.ranking import ReplicaClock

pytestmark = pytest.mark.anyio
ROUTE = RouteRequest(request_id="r", num_prompt_tokens=10, max_tokens=20)


class Replica:
    def __init__(self, name: str, **stats: Any) -> None:
        self.replica_id = SimpleNamespace(to_full_id_str=lambda: name)
        clock = ReplicaClock(
            replica_id=name, **{"num_pages_free": 9, "num_lanes_waiting": 0, "num_lanes_free": 1, **stats}
        )
        self.routing_stats = publish_clock(clock, 1000.0)


def pending(session_id: str = "", *args: Any) -> Any:
    return SimpleNamespace(
        metadata=SimpleNamespace(session_id=session_id),
        args=args,
        routing_context=SimpleNamespace(should_backoff=False),
    )


@pytest.fixture
def choice() -> ReplicaChoice:
    choice = ReplicaChoice.__new__(ReplicaChoice)
    choice.initialize_state()
    return choice


async def chosen(choice: ReplicaChoice, replicas: list[Replica], request: Any) -> list[str]:
    ranks = await choice.choose_replicas(replicas, request)
    assert all(len(rank) == 1 for rank in ranks)
    return [rank[0].replica_id.to_full_id_str() for rank in ranks]


async def test_a_lease_goes_to_its_replica_however_full_it_is(choice):
    replicas = [Replica("a"), Replica("b", num_lanes_free=0, num_lanes_waiting=9)]
    request = pending("b", ROUTE)
    assert await chosen(choice, replicas, request) == ["b"]
    assert request.routing_context.should_backoff, "Serve would ask again without a pause"


async def test_a_lease_of_a_replica_that_left_goes_to_another_one_which_refuses_it(choice):
    assert await chosen(choice, [Replica("a")], pending("gone", ROUTE)) == ["a"]


async def test_without_a_lease_the_one_that_starts_soonest_is_first(choice):
    full = {"num_lanes_free": 0, "num_lanes_in_use": 1}
    replicas = [Replica("late", boundaries_s=(5e5,), **full), Replica("soon", boundaries_s=(4e5,), **full)]
    assert await chosen(choice, replicas, pending("", ROUTE)) == ["soon", "late"]


async def test_what_was_just_sent_counts_until_the_replica_has_said_something_new(choice):
    replicas = [Replica("a", num_lanes_free=2), Replica("b", num_lanes_free=2)]
    firsts = [(await chosen(choice, replicas, pending("", ROUTE)))[0] for _ in range(4)]
    assert sorted(firsts) == ["a", "a", "b", "b"]
    replicas[0].routing_stats = {**replicas[0].routing_stats, "read_at": 1001.0}
    assert (await chosen(choice, replicas, pending("", ROUTE)))[0] == "a"


async def test_a_guided_request_counts_as_the_lanes_that_it_takes(choice):
    guided = replace(ROUTE, num_lanes=2)
    replicas = [Replica("a", num_lanes_free=3), Replica("b", num_lanes_free=2, num_lanes_in_use=1)]
    assert (await chosen(choice, replicas, pending("", guided)))[0] == "a"
    # One lane is left there: two of them go to the other one, and one fits.
    assert (await chosen(choice, replicas, pending("", guided)))[0] == "b"
    assert (await chosen(choice, replicas, pending("", ROUTE)))[0] == "a"


async def test_a_call_that_is_no_request_finds_a_replica_and_counts_for_nothing(choice):
    replicas = [Replica("a"), Replica("b")]
    assert {(await chosen(choice, replicas, pending()))[0] for _ in range(5)} == {"a"}


async def test_a_replica_that_has_published_nothing_comes_last(choice):
    new = Replica("a")
    new.routing_stats = {}
    assert await chosen(choice, [new, Replica("b")], pending("", ROUTE)) == ["b", "a"]


def test_a_clock_survives_publication_and_ages():
    clock = ReplicaClock(
        replica_id="a",
        num_lanes_free=1,
        num_pages_free=2,
        num_lanes_waiting=3,
        num_lanes_in_use=4,
        boundaries_s=(1.0, 2.0),
    )
    read = read_clock("a", publish_clock(clock, 50.0), 50.4, num_lanes_sent=2)
    assert read.age_s == pytest.approx(0.4)
    assert (read.num_lanes_waiting, read.boundaries_s, read.num_lanes_in_use) == (5, (1.0, 2.0), 4)
    # A machine whose clock is ahead has not seen the future.
    assert read_clock("a", publish_clock(clock, 50.0), 49.0, num_lanes_sent=0).age_s == 0.0


def test_the_route_is_found_among_the_arguments():
    assert route_of(("x", ROUTE, None)) is ROUTE
    assert route_of((1, 2)) is None


async def test_calls_for_one_http_request_get_each_its_own_replica(choice):
    """Two calls at once under one request id: the second used to be forgotten, and waited for ever."""
    calls = []
    for name in ("a", "b"):
        metadata = SimpleNamespace(internal_request_id="same", multiplexed_model_id="")
        calls.append(PendingRequest(args=[name], kwargs={}, metadata=metadata))
    choice._routing_task_by_pending_request_future = {}
    choice.queue_wait_time_ms_histogram = SimpleNamespace(observe=lambda value: None)
    for call in calls:
        choice._add_pending_request_to_indices(call)
    for call in calls:
        choice._fulfill_next_pending_request(call.args[0], call.metadata)
    assert [await call.future for call in calls] == ["a", "b"]
    choice._fulfill_next_pending_request("c", calls[0].metadata)
    assert not choice._pending
