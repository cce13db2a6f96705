from __future__ import annotations

import pytest

from engine import EngineLoad, PrefixChanges, RunningLoad
from serve_app.lease_desk import LeaseDesk
from serve_app.lease_messages import RefusalReason
from serve_app.routing.messages import Lease


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def load(*running: RunningLoad, lanes: int = 2, pages_free: int = 10, waiting: int = 0, **fields) -> EngineLoad:
    return EngineLoad(
        num_lanes=lanes,
        num_lanes_free=lanes - sum(block.num_lanes for block in running),
        num_pages=20,
        num_pages_free=pages_free,
        num_waiting=waiting,
        num_lanes_waiting=fields.get("lanes_waiting", waiting),
        running=running,
        pass_seconds=fields.get("pass_seconds", ((1, 0.01), (4, 0.02))),
        prefixes=fields.get("prefixes", PrefixChanges()),
    )


def block(request_id: str, steps_left: int = 50, blocks_left: int = 0, pages: int = 3, lanes: int = 1) -> RunningLoad:
    return RunningLoad(
        request_id=request_id,
        num_steps_left=steps_left,
        num_blocks_left=blocks_left,
        num_pages=pages,
        num_lanes=lanes,
    )


def lease(number: int = 1, replica_id: str = "here") -> Lease:
    return Lease(lease_id=f"l{number}", request_id="r", replica_id=replica_id, expected_start_s=0.0, group="g")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def desk(clock) -> LeaseDesk:
    desk = LeaseDesk("here", grace_s=0.1, clock=clock)
    desk.update(load())
    return desk


def test_it_takes_as_many_as_there_are_lanes_before_the_engine_has_said_anything_new(desk):
    for i in range(2):
        assert desk.refusal(lease(i), 1, 1, ()) is None
        desk.take(f"r{i}", 1, 1)
    assert desk.refusal(lease(2), 1, 1, ()) is RefusalReason.NO_ROOM
    assert desk.num_waiting == 2


def test_who_runs_counts_once(desk):
    desk.take("a", 1, 1)
    desk.update(load(block("a")))
    assert desk.num_waiting == 0
    assert desk.refusal(lease(), 1, 1, ()) is None
    desk.take("b", 1, 1)
    assert desk.refusal(lease(), 1, 1, ()) is RefusalReason.NO_ROOM
    desk.leave("b")
    assert desk.refusal(lease(), 1, 1, ()) is None


def test_preempted_requests_wait_before_new_ones(desk):
    desk.take("a", 1, 1)
    desk.update(load(block("b", blocks_left=1), waiting=1))
    assert desk.num_waiting == 1
    assert desk.refusal(lease(), 1, 1, ()) is RefusalReason.NO_ROOM


def test_pages_that_were_promised_are_not_promised_again(desk):
    desk.update(load(pages_free=5))
    assert desk.refusal(lease(), 1, 6, ()) is RefusalReason.NO_ROOM
    assert desk.refusal(lease(), 1, 5, ()) is None
    desk.take("a", 1, 4)
    assert desk.refusal(lease(), 1, 2, ()) is RefusalReason.NO_ROOM
    assert desk.refusal(lease(), 1, 1, ()) is None


def test_a_shared_prefix_needs_no_pages_until_it_is_gone(desk):
    keys = [b"one", b"two", b"three"]
    desk.update(load(pages_free=2, prefixes=PrefixChanges(added=(b"one", b"two", b"x"))))
    assert desk.refusal(lease(), 1, 4, keys) is None
    desk.update(load(pages_free=2, prefixes=PrefixChanges(removed=(b"one",))))
    # What follows a block that is gone cannot be shared either.
    assert desk.refusal(lease(), 1, 4, keys) is RefusalReason.NO_ROOM
    desk.update(load(pages_free=2, prefixes=PrefixChanges(added=(b"one",), is_everything=True)))
    assert desk.refusal(lease(), 1, 4, keys) is RefusalReason.NO_ROOM
    assert desk.refusal(lease(), 1, 3, keys) is None


@pytest.mark.parametrize(
    ("running", "refused"),
    [
        ((block("a", 5), block("b", 50)), False),
        ((block("a", 8), block("b", 50)), True),
        ((block("a", 5, blocks_left=1), block("b", 50)), True),
        ((block("a", 5, pages=0), block("b", 5, pages=9)), False),
        ((block("a", 5, pages=0), block("b", 50, pages=9)), True),
    ],
)
def test_a_lane_that_comes_free_within_the_grace_is_as_good_as_free(desk, running, refused):
    # A pass of two rows lies between those that were measured: 0.0133 s.
    desk.update(load(*running, pages_free=0))
    assert desk.refusal(lease(), 1, 1, ()) is (RefusalReason.NO_ROOM if refused else None)


def test_a_boundary_comes_nearer_while_nothing_is_heard(desk, clock):
    desk.update(load(block("a", 8), block("b", 50)))
    assert desk.refusal(lease(), 1, 1, ()) is RefusalReason.NO_ROOM
    clock.now += 0.03
    assert desk.refusal(lease(), 1, 1, ()) is None


def test_before_any_pass_was_measured_nobody_knows_when_a_lane_comes_free(desk):
    desk.update(load(block("a", 0), block("b", 0), pass_seconds=()))
    assert desk.refusal(lease(), 1, 1, ()) is RefusalReason.NO_ROOM


# A guided request has two lanes.


def test_two_lanes_are_not_promised_where_one_is_free(desk):
    """Such a request counted as one lane: the last free one was promised to it, and then to the next one too."""
    desk.update(load(block("a", blocks_left=1)))
    assert desk.refusal(lease(), 2, 2, ()) is RefusalReason.NO_ROOM
    assert desk.refusal(lease(), 1, 1, ()) is None


def test_both_lanes_of_one_that_was_taken_count_until_it_runs(desk):
    desk.update(load(lanes=3))
    desk.take("a", 2, 2)
    assert (desk.num_waiting, desk.num_lanes_waiting) == (1, 2)
    assert desk.refusal(lease(), 2, 2, ()) is RefusalReason.NO_ROOM
    assert desk.refusal(lease(), 1, 1, ()) is None
    desk.update(load(block("a", lanes=2), lanes=3))
    assert (desk.num_waiting, desk.num_lanes_waiting) == (0, 0)


def test_both_lanes_of_a_preempted_one_are_kept_for_it(desk):
    desk.update(load(block("a", blocks_left=1), lanes=4, waiting=1, lanes_waiting=2))
    assert desk.num_lanes_waiting == 2
    assert desk.refusal(lease(), 2, 2, ()) is RefusalReason.NO_ROOM
    assert desk.refusal(lease(), 1, 1, ()) is None


@pytest.mark.parametrize(
    ("running", "refused"),
    [
        ((block("a", 5, lanes=2),), False),
        ((block("a", 5), block("b", 5)), False),
        ((block("a", 5), block("b", 50)), True),
    ],
)
def test_one_that_ends_within_the_grace_frees_all_its_lanes(desk, running, refused):
    desk.update(load(*running))
    assert desk.refusal(lease(), 2, 2, ()) is (RefusalReason.NO_ROOM if refused else None)


def test_what_wants_more_than_there_is_is_taken_where_all_is_free(desk):
    """Waiting would not help it: the engine refuses it, and says why."""
    desk.update(load(lanes=1, pages_free=20))
    assert desk.refusal(lease(), 2, 50, ()) is None
    desk.update(load(block("a"), lanes=1, pages_free=20))
    assert desk.refusal(lease(), 2, 50, ()) is RefusalReason.NO_ROOM
    desk.update(load(lanes=1, pages_free=19))
    assert desk.refusal(lease(), 2, 50, ()) is RefusalReason.NO_ROOM


def test_another_replicas_lease_is_refused_and_not_settled(desk):
    assert desk.refusal(lease(1, "there"), 1, 1, ()) is RefusalReason.WRONG_REPLICA
    assert desk.take_settled() == ()


def test_every_lease_that_was_answered_is_told_once(desk):
    desk.refusal(lease(1), 1, 1, ())
    desk.refusal(lease(2), 1, 99, ())
    assert desk.take_settled() == ("l1", "l2")
    assert desk.take_settled() == ()


def test_nothing_is_taken_before_the_engine_has_said_how_it_is(clock):
    desk = LeaseDesk("here", grace_s=0.1, clock=clock)
    assert desk.refusal(lease(), 1, 1, ()) is RefusalReason.NO_ROOM


def test_a_request_that_ran_is_gone_when_it_runs_no_more_though_nobody_said_so(desk):
    """An ingress that dies may leave its calls behind; their lanes used to count as promised for ever."""
    desk.take("a", 1, 1)
    desk.update(load(block("a")))
    desk.update(load())
    assert desk.num_waiting == 0
    for i in range(2):
        assert desk.refusal(lease(i), 1, 1, ()) is None
        desk.take(f"r{i}", 1, 1)
