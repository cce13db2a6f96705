from __future__ import annotations

import pytest

from engine.config import EngineConfig
from engine.output import FinishReason
from engine.scheduling import CanvasFinished, RowResult, Scheduler, SequenceFinished, Status
from tests.engine.scheduling.driver import END, FIRST_WORD, Driver, Spec, ids, make_sequence, prompt_of


def commit_by_hand(scheduler: Scheduler, *commits: tuple[int, int]) -> list:
    return scheduler.apply(scheduler.plan(), [RowResult("a", commits)])


def test_an_end_token_costs_no_pass_for_what_lies_right_of_it():
    scheduler = Scheduler(EngineConfig(), 4, 8)
    sequence = make_sequence(Spec(id="a", max_tokens=8))
    scheduler.add(sequence)
    commit_by_hand(scheduler, (1, END))
    plan = scheduler.plan()
    assert [row.num_commits for row in plan.rows] == [1]
    changes = scheduler.apply(plan, [RowResult("a", ((0, 50),))])
    assert changes == [CanvasFinished(sequence, 0, 0, 1), SequenceFinished(sequence, FinishReason.STOP)]
    assert sequence.text_token_ids == [50]
    assert not scheduler.has_work


def test_an_end_token_at_the_last_position_of_all_is_a_stop():
    scheduler = Scheduler(EngineConfig(), 4, 8)
    sequence = make_sequence(Spec(id="a", max_tokens=2, tokens_per_step=2))
    scheduler.add(sequence)
    changes = commit_by_hand(scheduler, (0, 50), (1, END))
    assert changes[-1] == SequenceFinished(sequence, FinishReason.STOP)
    assert sequence.text_token_ids == [50]


def test_an_end_token_at_the_first_position_gives_an_empty_text():
    scheduler = Scheduler(EngineConfig(), 4, 8)
    sequence = make_sequence(Spec(id="a", max_tokens=8))
    scheduler.add(sequence)
    changes = commit_by_hand(scheduler, (0, END))
    assert changes[1:] == [CanvasFinished(sequence, 0, 0, 0), SequenceFinished(sequence, FinishReason.STOP)]
    assert sequence.text_token_ids == []


def test_a_finished_sequence_leaves_its_lane_and_pages_before_it_is_reported():
    driver = Driver(num_pages=4)
    driver.add(Spec(id="a", max_tokens=1))
    driver.step()
    assert driver.sequences["a"].status is Status.FINISHED
    assert driver.sequences["a"].lane is None
    assert (driver.scheduler.num_held_pages, driver.scheduler.num_running) == (0, 0)


def test_non_finite_logits_end_their_own_sequence_and_no_other():
    driver = Driver(num_pages=8)
    driver.add(Spec(id="bad", max_tokens=8), Spec(id="good", max_tokens=8))
    driver.step()
    driver.device.fail_next.add("bad")
    driver.step()
    assert driver.reasons == {"bad": FinishReason.ERROR}
    assert driver.sequences["bad"].status is Status.FINISHED
    driver.finish()
    assert driver.reasons["good"] is FinishReason.LENGTH


def test_a_prefix_that_led_to_non_finite_logits_is_computed_again():
    driver = Driver(num_pages=8)
    for id in ("bad", "next"):
        driver.add(Spec(id=id, prompt=prompt_of(0, 8)))
    driver.device.fail_next.add("bad")
    driver.step()
    assert driver.scheduler.num_cached_pages == 0
    driver.finish()
    driver.add(Spec(id="last", prompt=prompt_of(0, 8)))
    assert driver.step().admitted[0].num_cached_tokens == 8
    assert driver.computed["next"] == [(0, 0), (0, 1)]


def test_aborting_frees_lane_and_pages_at_once_and_keeps_sealed_pages():
    driver = Driver(num_pages=8)
    driver.add(Spec(id="a", prompt=prompt_of(0, 9), max_tokens=8))
    driver.step()
    assert driver.abort("a")
    assert driver.scheduler.num_held_pages == 0
    assert driver.scheduler.num_cached_pages == 2
    assert not driver.scheduler.has_work
    assert driver.sequences["a"].status is Status.ABORTED


def test_aborting_a_waiting_sequence_takes_it_out_of_the_queue():
    driver = Driver(num_pages=8, max_lanes=1)
    driver.add(*(Spec(id=id) for id in "abc"))
    driver.step()
    assert driver.abort("b")
    assert driver.scheduler.num_waiting == 1
    driver.finish()
    assert set(driver.reasons) == {"a", "c"}


def test_aborting_twice_or_an_unknown_id_does_nothing():
    driver = Driver(num_pages=8)
    driver.add(Spec(id="a"))
    assert driver.abort("a")
    assert not driver.abort("a")
    assert not driver.abort("never seen")


def test_a_preempted_sequence_can_be_aborted():
    driver = Driver(num_pages=2)
    driver.add(Spec(id="a", max_tokens=8, tokens_per_step=4), Spec(id="b", max_tokens=4))
    driver.step()
    assert ids(driver.step().preempted) == ["b"]
    assert driver.abort("b")
    driver.finish()


def test_rows_of_a_sequence_aborted_between_plan_and_apply_are_ignored():
    scheduler = Scheduler(EngineConfig(), 4, 8)
    scheduler.add(make_sequence(Spec(id="a", prompt=prompt_of(0, 5), max_tokens=3), arrival=0))
    scheduler.add(make_sequence(Spec(id="b", max_tokens=4), arrival=1))
    plan = scheduler.plan()
    scheduler.abort("a")
    again = make_sequence(Spec(id="a", max_tokens=4), arrival=2)
    scheduler.add(again)
    changes = scheduler.apply(plan, [RowResult("a", ((5, 50),)), RowResult("b", ((0, 50),))])
    assert ids(changes) == ["b"]
    assert again.num_committed == 0
    assert scheduler.num_cached_pages == 0
    scheduler.check_integrity()


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([], "has no result"),
        ([RowResult("a", ((0, 50),)), RowResult("a", ((1, 50),))], "two results"),
        ([RowResult("a", ())], "at least one token"),
    ],
)
def test_every_denoise_row_has_one_result_with_a_commit(results, message):
    scheduler = Scheduler(EngineConfig(), 4, 8)
    scheduler.add(make_sequence(Spec(id="a", max_tokens=4)))
    plan = scheduler.plan()
    with pytest.raises(AssertionError, match=message):
        scheduler.apply(plan, results)


def test_a_plan_that_was_applied_changes_nothing_any_more():
    driver = Driver(num_pages=8)
    driver.add(Spec(id="a", prompt=prompt_of(0, 8), max_tokens=4))
    plan = driver.step()
    assert driver.scheduler.apply(plan, [RowResult("a", ((9, FIRST_WORD),))]) == []
    assert driver.sequences["a"].num_committed == 1
    driver.check()


def test_the_integrity_check_sees_a_lost_page_and_a_lost_lane():
    driver = Driver(num_pages=8)
    driver.add(Spec(id="a", max_tokens=4))
    driver.step()
    driver.sequences["a"].lane = 5
    with pytest.raises(AssertionError):
        driver.scheduler.check_integrity()
    driver.sequences["a"].lane = 0
    driver.scheduler.check_integrity()
    driver.scheduler._pool.allocate()
    with pytest.raises(AssertionError, match="has 0 holders"):
        driver.scheduler.check_integrity()
