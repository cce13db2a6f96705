from __future__ import annotations

import pytest

from engine.errors import QueueFull
from tests.engine.scheduling.driver import Driver, Spec, ids, prompt_of, rows_of


def test_a_sequence_with_a_lane_and_pages_is_admitted_by_the_next_plan_and_has_a_row_in_it():
    driver = Driver(num_pages=4)
    driver.add(Spec(id="a", prompt=prompt_of(0, 3), max_tokens=4))
    plan = driver.step()
    assert ids(plan.admitted) == ["a"]
    assert rows_of(plan) == [("DENOISE", "a", 0)]
    assert plan.admitted[0].lane == plan.rows[0].lane == 0


def test_lanes_bound_who_runs_and_a_freed_lane_is_given_again():
    driver = Driver(num_pages=9, max_lanes=2)
    driver.add(Spec(id="a", max_tokens=2), Spec(id="b", max_tokens=3), Spec(id="c", max_tokens=1))
    assert ids(driver.step().admitted) == ["a", "b"]
    assert driver.scheduler.num_waiting == 1
    assert driver.step().admitted == ()
    third = driver.step()
    assert ids(third.admitted) == ["c"]
    assert third.admitted[0].lane == 0


def test_admission_goes_by_priority_and_then_by_arrival():
    driver = Driver(num_pages=9, max_lanes=3)
    driver.add(Spec(id="a", priority=1), Spec(id="b"), Spec(id="c", priority=-1), Spec(id="d"))
    assert ids(driver.step().admitted) == ["c", "b", "d"]


@pytest.mark.parametrize(("num_pages", "is_admitted"), [(3, True), (2, False)])
def test_admission_reserves_the_prompt_and_one_block(num_pages, is_admitted):
    driver = Driver(num_pages=num_pages + 1)
    driver.add(Spec(id="a", prompt=(11,), max_tokens=3))
    driver.step()
    driver.add(Spec(id="b", prompt=prompt_of(1, 8), max_tokens=4 if is_admitted else 1))
    assert (ids(driver.step().admitted) == ["b"]) == is_admitted


def test_nobody_overtakes_a_head_of_the_queue_that_lacks_pages():
    driver = Driver(num_pages=4)
    driver.add(Spec(id="running", prompt=prompt_of(0, 4), max_tokens=4))
    driver.step()
    driver.add(Spec(id="large", prompt=prompt_of(1, 8), max_tokens=4), Spec(id="small", max_tokens=1))
    for _ in range(3):
        assert driver.step().admitted == ()
    # Of three pages the large one needs, the finished one left one free, one cached, and two never used.
    assert ids(driver.step().admitted) == ["large", "small"]


def test_a_more_important_request_goes_ahead_of_the_head_of_the_queue():
    driver = Driver(num_pages=4)
    driver.add(Spec(id="running", prompt=prompt_of(0, 4), max_tokens=4))
    driver.step()
    driver.add(Spec(id="large", prompt=prompt_of(1, 8), max_tokens=4), Spec(id="urgent", priority=-1, max_tokens=1))
    assert ids(driver.step().admitted) == ["urgent"]


def test_the_queue_has_a_limit_and_says_so():
    driver = Driver(num_pages=4, max_waiting=2)
    driver.add(Spec(id="a"), Spec(id="b"))
    with pytest.raises(QueueFull, match=r"2 requests wait and max_waiting is 2; try again"):
        driver.add(Spec(id="c"))
    driver.step()
    driver.add(Spec(id="c"))


def test_an_id_in_use_is_a_mistake_and_an_ended_one_is_not():
    driver = Driver(num_pages=4)
    driver.add(Spec(id="a", max_tokens=1))
    with pytest.raises(AssertionError, match="a has not ended"):
        driver.add(Spec(id="a"))
    driver.finish()
    driver.add(Spec(id="a"))


def test_a_sequence_that_fills_the_pool_runs_and_a_larger_one_is_a_mistake():
    driver = Driver(num_pages=3)
    driver.add(Spec(id="a", prompt=prompt_of(0, 5), max_tokens=7))
    driver.finish()
    with pytest.raises(AssertionError, match="can never run"):
        driver.add(Spec(id="b", prompt=prompt_of(0, 5), max_tokens=8))
