from __future__ import annotations

import pytest

from serve_app.routing.messages import (
    Assigned,
    AssignmentReason,
    LeaseRefused,
    PrefixesWanted,
    ReplicaGone,
    Withdrawn,
)
from serve_app.routing.policy import RoutingSettings
from tests.serve_app.routing.helpers import (
    PASS_SECONDS,
    Router,
    assigned,
    block,
    full,
    rejected,
    report_of,
    request_of,
)

KEYS = tuple(bytes([i]) * 8 for i in range(10))
PASS_4_S = dict(PASS_SECONDS)[4]


def lease_of(decisions) -> Assigned:
    (decision,) = [d for d in decisions if isinstance(d, Assigned)]
    return decision


# Binding.


def test_a_request_waits_while_there_is_no_replica_and_goes_to_the_first():
    router = Router()
    assert router.submit("r") == []
    assert assigned(router.report(report_of("a"))) == [("r", "a")]


def test_a_request_goes_to_the_replica_with_fewest_rows():
    router = Router()
    router.report(report_of("busy", running=[block("x"), block("y")]))
    router.report(report_of("idle"))
    decision = lease_of(router.submit("r"))
    assert decision.lease.replica_id == "idle"
    assert (decision.lease.expected_start_s, decision.waited_s) == (0, 0)
    assert decision.reason is AssignmentReason.SOONEST


def test_what_a_request_costs_those_that_run_counts_as_much_as_its_own_time():
    """It would be done sooner beside three others on a quick replica, and make each of them slower."""
    slow = tuple((rows, 1.8 * seconds) for rows, seconds in PASS_SECONDS)
    router = Router()
    router.report(report_of("slow", pass_seconds=slow))
    router.report(report_of("quick", running=[block(f"x{i}", 64, 3) for i in range(3)]))
    assert 1.8 * dict(PASS_SECONDS)[1] > PASS_4_S
    assert assigned(router.submit("r")) == [("r", "slow")]


def test_a_row_whose_end_has_passed_since_the_report_counts_no_more():
    router = Router()
    router.report(report_of("long", running=[block("x", 60, 3), block("y", 60, 3)]))
    router.report(report_of("short", running=[block("z", 60, 3), block("w", 3), block("v", 3)]))
    router.now_s += 3 * PASS_4_S
    assert assigned(router.submit("r")) == [("r", "short")]


def test_equal_replicas_take_turns():
    router = Router()
    for id in "abc":
        router.report(report_of(id))
    assert [assigned(router.submit(f"r{i}"))[0][1] for i in range(6)] == list("abcabc")


def test_a_quick_replica_is_worth_a_few_more_rows():
    router = Router()
    slow = tuple((rows, 10 * seconds) for rows, seconds in PASS_SECONDS)
    router.report(report_of("slow", pass_seconds=slow))
    router.report(report_of("quick", running=[block("x")]))
    assert assigned(router.submit("r")) == [("r", "quick")]


def test_a_second_row_is_nearly_free_and_a_third_is_not():
    """With equal rows in total, the pair is made where it costs nothing."""
    router = Router()
    flat = ((1, 0.005), (2, 0.005), (4, 0.005), (8, 0.005))
    steep = ((1, 0.0045), (2, 0.009), (4, 0.018), (8, 0.036))
    router.report(report_of("steep", running=[block("x")], pass_seconds=steep))
    router.report(report_of("flat", running=[block("y"), block("z")], pass_seconds=flat))
    assert assigned(router.submit("r")) == [("r", "flat")]


def test_leases_are_counted_until_the_replica_tells_of_them():
    router = Router()
    router.report(report_of("a", num_lanes=2))
    router.report(report_of("b", num_lanes=2))
    placed = [assigned(router.submit(f"r{i}")) for i in range(5)]
    assert sorted(replica for ((_, replica),) in placed[:4]) == ["a", "a", "b", "b"]
    assert placed[4] == []


def test_a_lease_that_the_replica_has_settled_is_counted_once():
    router = Router()
    router.report(report_of("a", num_lanes=3))
    lease = lease_of(router.submit("r")).lease
    # Taken, not begun: it is among those that wait there. Two lanes are left.
    router.report(report_of("a", 2, num_lanes=3, num_waiting=1, settled_leases=(lease.lease_id,)))
    assert len(assigned(router.submit("s"))) == 1
    assert len(assigned(router.submit("t"))) == 1
    assert router.submit("u") == []


def test_a_lease_whose_request_runs_is_settled_even_if_the_report_that_said_so_was_lost():
    router = Router()
    router.report(report_of("a", num_lanes=2))
    router.submit("r")
    router.report(report_of("a", 3, [block("r")], num_lanes=2))
    assert assigned(router.submit("s")) == [("s", "a")]


def test_a_lease_of_which_nothing_is_heard_times_out():
    router = Router(lease_timeout_s=2.0)
    router.report(report_of("a", num_lanes=1))
    assert len(router.submit("lost")) == 1
    assert router.submit("r") == []
    assert router.policy.next_wake_s() == pytest.approx(router.now_s + 2)
    assert assigned(router.wait(1.9)) == []
    assert assigned(router.wait(0.2)) == [("r", "a")]


def test_a_prompt_that_finds_no_pages_waits_and_a_smaller_one_passes_it():
    router = Router()
    router.report(report_of("a", running=[block("x", pages=95)]))
    assert router.submit("large", num_prompt_tokens=5 * 64) == []
    assert assigned(router.submit("small", num_prompt_tokens=4 * 64)) == [("small", "a")]
    assert assigned(router.report(report_of("a", 2))) == [("large", "a")]


def test_pages_are_reserved_for_the_prompts_complete_blocks_and_the_first_canvas():
    router = Router()
    router.report(report_of("a", num_pages=10, num_lanes=9))
    assert assigned(router.submit("r", num_prompt_tokens=4 * 64 + 63)) == [("r", "a")]  # 5 pages
    assert router.submit("large", num_prompt_tokens=5 * 64) == []  # 6 pages
    assert assigned(router.submit("fits", num_prompt_tokens=4 * 64)) == [("fits", "a")]


def test_a_request_larger_than_any_replica_goes_to_an_idle_one_which_refuses_it_properly():
    router = Router()
    router.report(report_of("a", num_pages=10))
    assert assigned(router.submit("huge", num_prompt_tokens=100 * 64)) == [("huge", "a")]


# Boundaries.


def test_a_request_for_a_full_replica_is_released_shortly_before_its_boundary():
    router = Router(release_ahead_s=0.02)
    router.report(full("a", steps=[10, 40, 50, 60]))
    router.report(full("b", steps=[20, 40, 50, 60]))
    assert router.submit("r") == []
    boundary_s = 10 * PASS_4_S
    assert router.policy.next_wake_s() == pytest.approx(router.now_s + boundary_s - 0.02)
    assert router.wait(boundary_s - 0.021) == []
    decision = lease_of(router.wait(0.002))
    assert decision.lease.replica_id == "a"
    assert decision.lease.expected_start_s == pytest.approx(0.019, abs=0.002)


def test_a_group_is_released_to_a_replica_where_several_end_together():
    router = Router()
    router.report(full("a", steps=[10, 10, 10, 60]))
    for i in range(4):
        assert router.submit(f"r{i}") == []
    assert assigned(router.wait(10 * PASS_4_S)) == [("r0", "a"), ("r1", "a"), ("r2", "a")]


def test_one_lease_is_given_for_each_boundary_and_no_more():
    """No report comes: a boundary that was predicted must not be used twice."""
    router = Router(lease_timeout_s=60.0, replica_timeout_s=60.0)
    router.report(full("a", steps=[10, 60, 60, 60]))
    router.submit("r"), router.submit("s")
    assert assigned(router.wait(0.2)) == [("r", "a")]


def test_a_block_that_another_follows_is_no_boundary():
    router = Router()
    router.report(report_of("a", running=[block(f"x{i}", steps=1, blocks=1) for i in range(4)]))
    router.submit("r")
    assert router.wait(2.0) == []


def test_pages_that_come_free_at_the_boundary_count():
    router = Router()
    router.report(report_of("a", running=[block("x", 10, pages=50), *(block(f"y{i}", pages=16) for i in range(3))]))
    assert router.submit("r", num_prompt_tokens=40 * 64) == []
    assert assigned(router.wait(10 * PASS_4_S)) == [("r", "a")]


# Prefixes.


def test_a_shared_prefix_decides_between_equal_replicas():
    router = Router()
    for id in "abc":
        router.report(report_of(id, prefixes_added=KEYS if id == "b" else KEYS[:2] if id == "c" else ()))
    decision = lease_of(router.submit("r", num_prompt_tokens=640, prefix_keys=KEYS))
    assert decision.lease.replica_id == "b" and decision.reason is AssignmentReason.PREFIX


def test_a_prefix_that_was_evicted_decides_nothing():
    router = Router()
    router.report(report_of("a", running=[block("x")], prefixes_added=KEYS))
    router.report(report_of("b"))
    router.report(report_of("a", 2, [block("x")], prefixes_removed=KEYS))
    decision = lease_of(router.submit("r", num_prompt_tokens=640, prefix_keys=KEYS))
    assert decision.lease.replica_id == "b" and decision.reason is AssignmentReason.SOONEST


def test_a_prefix_does_not_outweigh_a_much_busier_replica():
    router = Router()
    router.report(report_of("a", num_lanes=16, running=[block(f"x{i}", 64, 3) for i in range(12)], prefixes_added=KEYS))
    router.report(report_of("b", num_lanes=16))
    assert assigned(router.submit("r", num_prompt_tokens=640, prefix_keys=KEYS)) == [("r", "b")]


def long_prefixes() -> tuple[Router, dict[str, object]]:
    """A full replica with the prompt cached, whose boundary is 16 ms off, and one with room that would prefill it."""
    keys = tuple(bytes([i]) * 8 for i in range(60))
    router = Router(release_ahead_s=0.0)
    router.report(full("holds", steps=[2, 10, 20, 30], prefixes_added=keys))
    router.report(report_of("free", running=[block(f"z{i}", 64, 3) for i in range(3)]))
    return router, {"num_prompt_tokens": 60 * 64, "prefix_keys": keys}


def test_a_request_waits_for_a_full_replica_with_its_prefix_if_that_is_sooner():
    router, prompt = long_prefixes()
    assert router.submit("r", **prompt) == []
    decision = lease_of(router.wait(0.02))
    assert decision.lease.replica_id == "holds" and decision.reason is AssignmentReason.PREFIX


def test_others_pass_a_request_that_waits_for_its_prefix():
    router, prompt = long_prefixes()
    assert router.submit("r", **prompt) == []
    assert assigned(router.submit("other")) == [("other", "free")]


def test_a_request_does_not_wait_for_a_prefix_that_saves_less_than_the_wait():
    router, prompt = long_prefixes()
    keys = prompt["prefix_keys"]
    assert assigned(router.submit("r", num_prompt_tokens=64, prefix_keys=keys[:1])) == [("r", "free")]


def test_the_wait_for_a_prefix_is_bounded():
    router, prompt = long_prefixes()
    assert router.submit("r", **prompt) == []
    # The boundary is put off again and again.
    for number in range(2, 6):
        keep = router.report(full("holds", number, steps=[2, 10, 20, 30]))
        if keep:
            break
        router.now_s += 0.015
    else:
        keep = router.wait(0.01)
    assert assigned(keep) == [("r", "free")]
    assert router.now_s <= 100.06


# Refusals, withdrawals, deadlines, limits.


def test_a_refused_request_comes_back_to_the_head_and_the_replica_is_not_asked_again_before_it_reports():
    router = Router()
    router.report(report_of("a", num_lanes=1))
    lease = lease_of(router.submit("r")).lease
    assert router.submit("s") == []
    assert router.policy.handle(LeaseRefused(lease.lease_id), router.now_s) == []
    assert router.submit("r", is_returned=True) == []
    assert assigned(router.report(report_of("a", 2, num_lanes=1))) == [("r", "a")]


def test_a_withdrawn_request_is_assigned_to_nobody():
    router = Router()
    router.submit("r")
    assert router.policy.handle(Withdrawn("r"), router.now_s) == []
    assert router.policy.handle(Withdrawn("never heard of"), router.now_s) == []
    assert router.report(report_of("a")) == []
    assert router.policy.num_waiting == 0


def test_a_withdrawn_requests_lease_frees_its_lane():
    router = Router()
    router.report(report_of("a", num_lanes=1))
    router.submit("r"), router.submit("s")
    assert assigned(router.policy.handle(Withdrawn("r"), router.now_s)) == [("s", "a")]


def test_a_request_is_given_up_at_its_deadline():
    router = Router()
    router.submit("r", deadline_s=1.0)
    assert router.policy.next_wake_s() == pytest.approx(101.0)
    assert router.wait(0.9) == []
    assert rejected(router.wait(0.2)) == [("r", "deadline")]
    assert router.report(report_of("a")) == []


def test_a_request_with_no_time_to_wait_is_assigned_if_somebody_has_room():
    router = Router()
    assert rejected(router.submit("r", deadline_s=0.0)) == [("r", "deadline")]
    router.report(report_of("a"))
    assert assigned(router.submit("s", deadline_s=0.0)) == [("s", "a")]


def test_one_request_more_than_may_wait_is_refused_and_a_returned_one_is_not():
    router = Router(max_queue=2)
    router.submit("a"), router.submit("b")
    assert rejected(router.submit("c")) == [("c", "queue_full")]
    assert router.submit("back", is_returned=True) == []
    assert [r for r, _ in assigned(router.report(report_of("x")))] == ["back", "a", "b"]


def test_a_full_queue_refuses_nobody_whom_a_replica_can_take_at_once():
    router = Router(max_queue=1)
    router.report(report_of("x", num_lanes=1))
    assert assigned(router.submit("a")) == [("a", "x")]
    assert router.submit("b") == []
    assert rejected(router.submit("c")) == [("c", "queue_full")]


def test_a_tenant_has_a_limit_of_its_own():
    router = Router(max_queue_per_tenant=1)
    router.submit("a", tenant="t")
    assert rejected(router.submit("b", tenant="t")) == [("b", "tenant_limit")]
    assert router.submit("c", tenant="u") == []


def test_a_rejected_request_is_told_when_those_before_it_should_be_gone():
    router = Router(max_queue=30)
    router.report(report_of("x", num_lanes=1))
    for i in range(20):  # one a second
        lease = lease_of(router.submit(f"r{i}")).lease
        router.now_s += 1.0
        router.report(report_of("x", 2 + i, num_lanes=1, settled_leases=(lease.lease_id,)))
    router.submit("blocks the lane")
    for i in range(30):
        router.submit(f"w{i}")
    (decision,) = router.submit("too many")
    assert decision.retry_after_s == pytest.approx(31, rel=0.1)


def test_an_id_submitted_twice_gets_one_decision():
    router = Router()
    assert router.submit("r") == [] and router.submit("r") == []
    assert assigned(router.report(report_of("a"))) == [("r", "a")]
    assert router.policy.num_waiting == 0


# Reports.


def test_a_late_report_is_void():
    router = Router()
    router.report(full("a", 5))
    router.report(report_of("a", 4))
    assert router.submit("r") == []


def test_a_gap_asks_for_all_prefixes_and_a_full_list_ends_that():
    router = Router()
    assert router.report(report_of("a", 1)) == []
    assert router.report(report_of("a", 2)) == []
    assert router.report(report_of("a", 4)) == [PrefixesWanted("a")]
    assert router.report(report_of("a", 5)) == []  # on its way when it was asked
    router.now_s += 2.0
    assert router.report(report_of("a", 6)) == [PrefixesWanted("a")]  # the question was lost
    assert router.report(report_of("a", 7, has_all_prefixes=True)) == []
    router.now_s += 2.0
    assert router.report(report_of("a", 8)) == []


def test_a_router_that_starts_late_learns_everything_from_reports():
    router = Router()
    running = [block("never leased", 64, 1), block("nor this")]
    assert router.report(report_of("a", 71, running, num_lanes=3)) == [PrefixesWanted("a")]
    assert assigned(router.submit("r")) == [("r", "a")]
    assert router.submit("s") == []


def test_a_replica_that_counts_from_the_start_again_is_believed():
    router = Router()
    router.report(full("a", 1000))
    assert router.submit("r") == []
    assert assigned(router.report(report_of("a", 1))) == []
    assert assigned(router.report(report_of("a", 2))) == []
    assert assigned(router.report(report_of("a", 3))) == [("r", "a")]


def test_a_replica_that_comes_back_after_its_time_is_believed_at_once():
    router = Router(replica_timeout_s=3.0)
    router.report(full("a", 1000))
    router.wait(4.0)
    assert router.submit("r") == []
    assert assigned(router.report(report_of("a", 1))) == [("r", "a")]


def test_a_silent_replica_gets_nothing():
    router = Router(replica_timeout_s=3.0)
    router.report(report_of("a"))
    router.wait(3.1)
    assert router.submit("r") == []
    assert assigned(router.report(report_of("a", 2))) == [("r", "a")]


def test_a_dead_replica_gets_nothing():
    router = Router()
    router.report(report_of("a"))
    router.policy.handle(ReplicaGone("a"), router.now_s)
    router.policy.handle(ReplicaGone("never heard of"), router.now_s)
    assert router.submit("r") == []


# Starvation.


def test_a_large_request_that_is_overdue_gets_a_replica_to_itself_until_it_fits():
    """Small requests would take each page as it comes free."""
    router = Router(max_wait_s=1.0)
    router.report(report_of("a", 1, [block("x0", pages=60)]))
    router.submit("large", num_prompt_tokens=70 * 64)
    router.submit("s0")
    router.now_s += 1.0
    assert router.policy.handle(None, router.now_s) == []
    assert router.submit("s1") == []  # there is room for it
    done = router.report(report_of("a", 2))
    assert assigned(done) == [("large", "a"), ("s1", "a")]


def test_the_claim_moves_when_the_replica_is_lost():
    router = Router(max_wait_s=1.0)
    router.report(report_of("a", 1, [block("x", pages=60)]))
    router.submit("large", num_prompt_tokens=70 * 64)
    router.now_s += 1.0
    router.policy.handle(None, router.now_s)
    router.policy.handle(ReplicaGone("a"), router.now_s)
    router.report(report_of("b", 1, [block("y", pages=50)]))
    assert router.submit("small") == []
    assert assigned(router.report(report_of("b", 2)))[0] == ("large", "b")


# Guided requests, of two lanes.


def test_a_guided_request_waits_for_two_lanes_and_others_pass_it():
    """It counted as one lane, so it got a lease for the last one and was refused, or waited at the replica."""
    router = Router()
    router.report(report_of("a", running=[block(f"x{i}", 64, 3) for i in range(3)]))
    assert router.submit("guided", num_lanes=2) == []
    assert assigned(router.submit("single")) == [("single", "a")]
    assert assigned(router.report(report_of("a", 2, [block("single", 64, 3)]))) == [("guided", "a")]


def test_a_guided_request_is_released_shortly_before_the_boundary_at_which_both_lanes_are_free():
    router = Router(release_ahead_s=0.02)
    router.report(full("a", steps=[10, 40, 50, 60]))
    assert router.submit("guided", num_lanes=2) == []
    boundary_s = 40 * PASS_4_S
    assert router.policy.next_wake_s() == pytest.approx(router.now_s + boundary_s - 0.02)
    assert router.wait(boundary_s - 0.021) == []
    decision = lease_of(router.wait(0.002))
    assert decision.lease.expected_start_s == pytest.approx(0.019, abs=0.002)


def test_each_boundary_is_waited_for_by_whom_it_serves():
    router = Router(release_ahead_s=0.0)
    router.report(full("a", steps=[10, 20, 30, 60]))
    router.submit("guided", num_lanes=2), router.submit("single")
    assert router.policy.next_wake_s() == pytest.approx(router.now_s + 10 * PASS_4_S)
    assert assigned(router.wait(10 * PASS_4_S)) == [("single", "a")]
    assert assigned(router.wait(20 * PASS_4_S)) == [("guided", "a")]


def test_a_guided_lease_leaves_two_lanes_less_until_the_replica_tells_of_it():
    router = Router()
    router.report(report_of("a", num_lanes=3))
    lease = lease_of(router.submit("guided", num_lanes=2)).lease
    assert len(assigned(router.submit("r"))) == 1
    assert router.submit("s") == []
    waiting = {"num_waiting": 1, "num_lanes_waiting": 2, "settled_leases": (lease.lease_id,)}
    assert router.report(report_of("a", 2, [block("r", 64, 3)], num_lanes=3, **waiting)) == []
    assert assigned(router.report(report_of("a", 3, [block("guided", 64, 3, lanes=2)], num_lanes=3))) == [("s", "a")]


def test_a_guided_request_for_replicas_of_one_lane_goes_to_one_which_refuses_it_properly():
    router = Router()
    router.report(report_of("a", 1, [block("x", 64, 3)], num_lanes=1))
    assert router.submit("guided", num_lanes=2) == []
    assert assigned(router.report(report_of("a", 2, num_lanes=1))) == [("guided", "a")]


def test_an_overdue_guided_request_claims_a_replica_until_both_lanes_are_free():
    router = Router(max_wait_s=1.0)
    router.report(report_of("a", 1, [block(f"x{i}", 64, 3) for i in range(3)]))
    assert router.submit("guided", num_lanes=2) == []
    router.now_s += 1.0
    assert router.policy.handle(None, router.now_s) == []
    assert router.submit("single") == []  # there is a lane for it
    assert router.report(report_of("a", 2, [block(f"x{i}", 64, 3) for i in range(3)])) == []
    done = router.report(report_of("a", 3, [block("x0", 64, 3)]))
    assert assigned(done) == [("guided", "a"), ("single", "a")]


@pytest.mark.parametrize(
    ("near", "far"),
    [
        ([("x", 64, 3), ("y", 20, 0)], [("z", 64, 3), ("w", 30, 0)]),
        ([("x", 64, 3), ("y", 20, 0)], [("z", 64, 3), ("w", 1, 1)]),
        ([("x", 64, 3), ("y", 20, 0)], [("z", 64, 3, 98), ("w", 10, 0)]),
    ],
)
def test_it_claims_the_replica_that_is_nearest_to_having_its_pages_and_lanes(near, far):
    router = Router(max_wait_s=1.0, replica_timeout_s=60.0, release_ahead_s=0.0)
    router.report(report_of("b", 1, [block(*item) for item in near], num_lanes=3))
    router.report(report_of("a", 1, [block(*item) for item in far], num_lanes=3))
    assert router.submit("guided", num_lanes=2, age_s=1.0, num_prompt_tokens=64) == []
    assert assigned(router.submit("single")) == [("single", "a")]


def test_the_queue_counts_the_lanes_that_are_wanted():
    router = Router()
    router.submit("guided", num_lanes=2), router.submit("single")
    assert (router.policy.num_waiting, router.policy.num_lanes_waiting) == (2, 3)
    router.report(report_of("a", num_lanes=2))
    assert (router.policy.num_waiting, router.policy.num_lanes_waiting) == (1, 1)
    router.policy.handle(Withdrawn("single"), router.now_s)
    assert router.policy.num_lanes_waiting == 0


def test_settings_name_what_is_wrong_with_them():
    with pytest.raises(ValueError, match="max_queue is 0; it must be at least 1"):
        RoutingSettings(max_queue=0)
    with pytest.raises(ValueError, match="release_ahead_s is -1"):
        RoutingSettings(release_ahead_s=-1)
    with pytest.raises(ValueError, match="max_queue_per_tenant is 0"):
        RoutingSettings(max_queue_per_tenant=0)
    assert RoutingSettings(prefix_wait_s=0.0).prefix_wait_s == 0


@pytest.mark.parametrize("field", ["age_s", "deadline_s"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_request_whose_times_are_none_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} of request r is {value}"):
        request_of("r", **{field: value})
    assert getattr(request_of("r", **{field: 0.0}), field) == 0


def test_a_request_is_plain_and_can_be_compared():
    assert request_of("r") == request_of("r")


def test_requests_let_go_together_are_of_one_group():
    router = Router()
    router.submit("r1")
    router.submit("r2")
    together = [d.lease.group for d in router.report(report_of("a")) if isinstance(d, Assigned)]
    later = lease_of(router.submit("r3")).lease.group
    assert len(together) == 2 and len(set(together)) == 1
    assert later not in together


def test_a_replica_whose_passes_take_no_time_is_a_replica():
    """As that of an engine which computes nothing."""
    router = Router()
    router.report(report_of("a", pass_seconds=((1, 0.0), (2, 0.0)), running=[block("x", 3)]))
    assert assigned(router.submit("r")) == [("r", "a")]
    router.now_s += 1
    router.report(full("a", 2, pass_seconds=((1, 0.0),)))
    router.submit("r2")
