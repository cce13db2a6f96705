"""What the router believes of one replica: lanes and pages, now and at its boundaries."""

from __future__ import annotations

import pytest

from serve_app.routing.messages import Lease, ReplicaReport
from serve_app.routing.pass_times import PassTimes
from serve_app.routing.replica import NEVER, Replica
from serve_app.routing.settings import RoutingSettings
from tests.serve_app.routing.helpers import PASS_SECONDS, block, report_of

SECONDS = PassTimes(PASS_SECONDS)
PASS_4_S = SECONDS(4)
AHEAD_S = RoutingSettings().release_ahead_s


def replica_of(report: ReplicaReport) -> Replica:
    return Replica(report, 0.0, RoutingSettings())


def lease(number: int = 1, request_id: str = "r") -> Lease:
    return Lease(lease_id=f"l{number}", request_id=request_id, replica_id="a", expected_start_s=0.0, group="g")


def test_two_lanes_are_free_when_both_are():
    replica = replica_of(report_of("a", running=[block("x", 10), block("y", 20), block("z", 64, 1)]))
    assert [replica.starts_in_s(0.0, lanes) for lanes in (1, 2, 3)] == [0.0, 10 * SECONDS(3), 20 * SECONDS(3)]
    assert [replica.opens_for(lanes) for lanes in (1, 2)] == [-NEVER, 10 * SECONDS(3) - AHEAD_S]
    # Of the fourth lane nobody knows when it comes free.
    assert (replica.starts_in_s(0.0, 4), replica.opens_for(4)) == (NEVER, NEVER)


def test_one_that_ends_frees_each_of_its_lanes_and_its_pages_once():
    running = [block("guided", 10, pages=6, lanes=2), block("x", 20, pages=3), block("y", 30, pages=1)]
    replica = replica_of(report_of("a", running=running, num_pages=10))
    assert [replica.starts_in_s(0.0, lanes) for lanes in (1, 2, 3, 4)] == [s * PASS_4_S for s in (10, 10, 20, 30)]
    assert [replica.num_pages_short(lanes, 10) for lanes in (1, 2, 3, 4)] == [4, 4, 1, 0]


def test_a_lease_of_two_lanes_takes_two():
    replica = replica_of(report_of("a", running=[block("x", 10)]))
    assert replica.has_room(2, 8, 0.0)
    replica.promise(lease(), 1, 2, 8, 0.0)
    assert replica.num_rows == 3
    assert replica.has_room(1, 1, 0.0) and not replica.has_room(2, 2, 0.0)
    assert replica.starts_in_s(0.0, 2) == 10 * SECONDS(1)
    assert replica.num_pages_short(1, 99) == 8
    replica.unused("l1")
    assert replica.has_room(2, 8, 0.0)


def test_a_lane_that_is_free_is_not_two():
    """Two lanes counted as one: the lease went to a replica that could not begin."""
    replica = replica_of(report_of("a", running=[block(f"x{i}", 64, 1) for i in range(3)]))
    assert replica.has_room(1, 1, 0.0) and not replica.has_room(2, 2, 0.0)


def test_those_that_wait_there_count_with_their_lanes():
    replica = replica_of(report_of("a", running=[block("x", 10)], num_waiting=1, num_lanes_waiting=2))
    assert replica.num_rows == 3
    assert replica.has_room(1, 1, 0.0) and not replica.has_room(2, 2, 0.0)


def test_both_lanes_of_a_request_are_free_for_it_or_the_replica_is_closed():
    going_on = [block(f"on{i}", 64, 1) for i in range(2)]
    replica = replica_of(report_of("a", running=[block("x", 10), block("y", 20), *going_on]))
    opens_s = 20 * PASS_4_S - AHEAD_S
    assert not replica.has_room(2, 2, 10 * PASS_4_S)
    assert not replica.has_room(2, 2, opens_s - 1e-6) and replica.has_room(2, 2, opens_s)


@pytest.mark.parametrize(("num_lanes", "beside"), [(1, 3), (2, 2), (9, 0)])
def test_rows_beside_a_request_are_the_lanes_that_it_leaves_to_others(num_lanes, beside):
    replica = replica_of(report_of("a", running=[block(f"x{i}", 64, 1) for i in range(4)]))
    assert replica.rows_at(0.0, num_lanes) == beside


def test_rows_end_with_both_lanes_of_a_sequence():
    replica = replica_of(report_of("a", running=[block("guided", 10, lanes=2), block("x", 64, 1)]))
    assert replica.rows_at(0.0, 1) == 3
    assert replica.rows_at(10 * PASS_4_S, 1) == 1


def test_its_passes_have_a_row_for_each_lane():
    replica = replica_of(report_of("a", running=[block("guided", 10, lanes=2)], num_lanes=2))
    assert replica.starts_in_s(0.0, 1) == 10 * SECONDS(2)


def test_what_wants_more_than_there_is_finds_room_where_all_is_free():
    """It can run nowhere: the replica refuses it and says why, and until then it reserves what there is."""
    replica = replica_of(report_of("a", num_lanes=1, num_pages=5))
    assert replica.has_room(2, 8, 0.0)
    replica.promise(lease(), 1, 2, 8, 0.0)
    assert replica.num_rows == 1 and not replica.has_room(1, 1, 0.0)
    replica.unused("l1")
    assert replica.has_room(1, 5, 0.0)
