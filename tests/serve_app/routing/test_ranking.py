from __future__ import annotations

import pytest

from serve_app.routing.pass_times import PassTimes, num_rows_to_come
from serve_app.routing.ranking import ReplicaClock, clock_of, rank_replicas, starts_in_s
from tests.serve_app.routing.helpers import block, report_of, request_of


def clock(id: str, **changes: object) -> ReplicaClock:
    fields: dict[str, object] = {
        "replica_id": id,
        "num_lanes_free": 1,
        "num_pages_free": 50,
        "num_lanes_waiting": 0,
        **changes,
    }
    return ReplicaClock(**fields)  # type: ignore[arg-type]


def test_a_replica_with_a_free_lane_comes_before_one_that_will_have_one():
    clocks = [clock("later", num_lanes_free=0, boundaries_s=(0.1,)), clock("now")]
    assert rank_replicas(clocks, request_of("r")) == ["now", "later"]


def test_age_is_taken_from_the_time_to_the_boundary():
    """Two samples of equal boundaries: the older one's comes first, and one that has passed is as good as now."""
    fresh = clock("fresh", num_lanes_free=0, boundaries_s=(0.3,), age_s=0.0)
    old = clock("old", num_lanes_free=0, boundaries_s=(0.3,), age_s=0.2)
    assert rank_replicas([fresh, old], request_of("r")) == ["old", "fresh"]
    assert starts_in_s(old, 1) == pytest.approx(0.1)
    assert starts_in_s(clock("x", num_lanes_free=0, boundaries_s=(0.3,), age_s=0.5), 1) == 0


def test_those_who_wait_there_take_the_first_lanes():
    def start_s(num_lanes_free: int, num_lanes_waiting: int) -> float:
        fields = {"num_lanes_free": num_lanes_free, "num_lanes_waiting": num_lanes_waiting}
        return starts_in_s(clock("x", boundaries_s=(0.1, 0.2), **fields), 1)

    assert [start_s(1, 1), start_s(0, 1)] == pytest.approx([0.1, 0.2])
    assert start_s(0, 2) == float("inf")


def test_a_request_of_two_lanes_starts_when_both_are_free():
    def start_s(num_lanes_free: int) -> float:
        return starts_in_s(clock("x", num_lanes_free=num_lanes_free, boundaries_s=(0.1, 0.2)), 2)

    assert [start_s(2), start_s(1), start_s(0)] == pytest.approx([0.0, 0.1, 0.2])
    assert starts_in_s(clock("x", num_lanes_free=0, boundaries_s=(0.1,)), 2) == float("inf")


def test_a_guided_request_prefers_two_free_lanes_and_twice_the_pages():
    clocks = [
        clock("one-lane", boundaries_s=(0.1,)),
        clock("few-pages", num_lanes_free=2, num_pages_free=7),
        clock("room", num_lanes_free=2, num_pages_free=8, num_lanes_in_use=9),
    ]
    prompt = {"num_prompt_tokens": 64 * 3}
    assert rank_replicas(clocks, request_of("r", num_lanes=2, **prompt)) == ["room", "one-lane", "few-pages"]
    assert rank_replicas(clocks, request_of("r", **prompt)) == ["one-lane", "few-pages", "room"]


def test_a_replica_without_pages_for_the_prompt_comes_later_and_a_silent_one_last():
    clocks = [
        clock("silent", is_silent=True),
        clock("no-pages", num_pages_free=3),
        clock("busy", num_lanes_free=0),
    ]
    assert rank_replicas(clocks, request_of("r", num_prompt_tokens=64 * 3)) == ["busy", "no-pages", "silent"]
    assert rank_replicas(clocks, request_of("r", num_prompt_tokens=64 * 2)) == ["no-pages", "busy", "silent"]


def test_among_replicas_with_room_the_one_with_fewest_lanes_taken_is_first():
    clocks = [clock(id, num_lanes_in_use=number) for id, number in (("three", 3), ("one", 1), ("two", 2))]
    assert rank_replicas(clocks, request_of("r")) == ["one", "two", "three"]


def test_sequences_whose_end_has_passed_count_no_more():
    clocks = [
        clock("two-gone", num_lanes_in_use=3, boundaries_s=(0.1, 0.1), age_s=0.2),
        clock("two", num_lanes_in_use=2),
    ]
    assert rank_replicas(clocks, request_of("r")) == ["two-gone", "two"]


def test_a_report_becomes_a_clock():
    report = report_of("a", 1, [block("x", steps=10), block("y", steps=4), block("z", steps=1, blocks=2)])
    made = clock_of(report, age_s=0.25)
    seconds = PassTimes(report.pass_seconds)(3)
    assert made.boundaries_s == pytest.approx((4 * seconds, 10 * seconds))
    assert (made.num_lanes_in_use, made.num_lanes_free, made.age_s) == (3, 1, 0.25)


def test_a_clock_counts_in_lanes():
    running = [block("guided", steps=10, lanes=2), block("y", steps=4)]
    report = report_of("a", 1, running, num_lanes=8, num_waiting=2, num_lanes_waiting=3)
    made = clock_of(report)
    seconds = PassTimes(report.pass_seconds)(6)
    assert made.boundaries_s == pytest.approx((4 * seconds, 10 * seconds, 10 * seconds))
    assert (made.num_lanes_in_use, made.num_lanes_free, made.num_lanes_waiting) == (3, 5, 3)


def test_pass_times_are_interpolated_and_never_fall():
    seconds = PassTimes(((1, 0.004), (2, 0.006), (4, 0.005), (8, 0.014)))
    assert [seconds(rows) for rows in (0, 1, 2, 3, 4, 6, 8)] == pytest.approx(
        [0.004, 0.004, 0.006, 0.006, 0.006, 0.010, 0.014]
    )
    assert seconds(1.5) == pytest.approx(0.005)
    assert seconds(10) == pytest.approx(0.014 + 2 * 0.002)


def test_more_rows_than_were_measured_are_not_taken_for_free():
    """The second row costs next to nothing; believing the same of the third would send everything to one replica."""
    assert PassTimes(((1, 0.005),))(3) == pytest.approx(0.010)
    assert PassTimes(((1, 0.005), (2, 0.0054)))(4) == pytest.approx(0.0054 + 2 * 0.00135)


def test_passes_to_come_have_a_row_for_each_lane_of_all_that_runs_and_waits_as_far_as_there_are_lanes():
    assert num_rows_to_come(report_of("a")) == 1
    running = [block("x"), block("y")]
    assert num_rows_to_come(report_of("a", running=running, num_waiting=1)) == 3
    assert num_rows_to_come(report_of("a", running=running, num_waiting=100)) == report_of("a").num_lanes
    guided = [block("x", lanes=2)]
    assert num_rows_to_come(report_of("a", running=guided)) == 2
    assert num_rows_to_come(report_of("a", running=guided, num_lanes=8, num_waiting=1, num_lanes_waiting=2)) == 4


def test_passes_without_a_measured_time_are_no_error():
    nothing = report_of("a", running=[block("x", 3)], pass_seconds=((1, 0.0),))
    assert clock_of(nothing).boundaries_s == (0.0,)
    assert starts_in_s(clock_of(nothing), 1) == 0.0
