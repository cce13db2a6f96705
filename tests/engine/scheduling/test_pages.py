from __future__ import annotations

import pytest

from engine.scheduling import RowKind
from tests.engine.scheduling.driver import Driver, Spec, ids, prompt_of, rows_of


def test_a_new_canvas_preempts_the_least_important_and_of_these_the_youngest():
    driver = Driver(num_pages=4)
    driver.add(Spec(id="important", priority=-1, max_tokens=8, tokens_per_step=4))
    driver.add(*(Spec(id=id, max_tokens=4) for id in ("old", "young")))
    driver.add(Spec(id="urgent", priority=-2, max_tokens=4))
    driver.step()
    plan = driver.step()
    assert [(p.sequence.id, p.lane) for p in plan.preempted] == [("young", 3)]
    assert plan.admitted == ()
    assert driver.scheduler.num_waiting == 1
    driver.finish()
    assert driver.sequences["young"].num_preemptions == 1
    assert driver.sequences["old"].num_preemptions == 0


def test_a_larger_priority_value_is_preempted_before_a_younger_arrival():
    driver = Driver(num_pages=3)
    driver.add(Spec(id="grows", max_tokens=8, tokens_per_step=4))
    driver.add(Spec(id="old and unimportant", priority=1), Spec(id="young"))
    driver.step()
    assert ids(driver.step().preempted) == ["old and unimportant"]


def test_the_sequence_that_asks_for_a_page_may_be_the_one_to_go():
    driver = Driver(num_pages=2)
    driver.add(Spec(id="old", max_tokens=4), Spec(id="young", max_tokens=8, tokens_per_step=4))
    driver.step()
    plan = driver.step()
    assert ids(plan.preempted) == ["young"]
    assert ids(plan.rows) == ["old"]
    driver.finish()


def test_a_preempted_sequence_goes_on_where_it_was_and_prefills_what_it_had_not_sealed():
    driver = Driver(num_pages=4)
    driver.add(Spec(id="old", prompt=prompt_of(0, 4), max_tokens=8))
    driver.add(Spec(id="young", prompt=prompt_of(1, 4), max_tokens=12, tokens_per_step=2))
    while not driver.sequences["young"].num_preemptions:
        driver.step()
    young = driver.sequences["young"]
    assert young.block == 2
    assert young.num_committed == 4
    while not young.is_running:
        plan = driver.step()
    kinds = [(row.kind, row.block) for row in plan.rows if row.sequence is young]
    # Block 0 was sealed and is still cached. Block 1 was finished, and would have been sealed in the pass
    # for which the page was missing.
    assert kinds == [(RowKind.DENOISE, 2), (RowKind.PREFILL, 1)]
    driver.finish()
    assert young.num_cached_tokens == 0


def test_sealed_blocks_of_a_preempted_sequence_are_found_again_beyond_its_prompt():
    driver = Driver(num_pages=6)
    driver.add(Spec(id="old", max_tokens=8, tokens_per_step=1))
    driver.add(Spec(id="young", prompt=prompt_of(1, 6), max_tokens=14, tokens_per_step=1))
    for _ in range(4):
        driver.step()
    young = driver.sequences["young"]
    assert (young.block, young.num_sealed) == (2, 2)
    driver.preempt("young")
    plan = driver.step()
    assert [(a.sequence.id, a.num_cached_tokens) for a in plan.admitted] == [("young", 8)]
    assert [row.kind for row in plan.rows if row.sequence is young] == [RowKind.DENOISE]
    assert young.num_cached_tokens == 0
    driver.finish()


def test_a_preempted_sequence_returns_ahead_of_younger_ones():
    driver = Driver(num_pages=3, max_lanes=2)
    driver.add(Spec(id="a", max_tokens=8, tokens_per_step=4), Spec(id="b", prompt=prompt_of(1, 4), max_tokens=4))
    driver.step()
    driver.add(Spec(id="c", max_tokens=1))
    assert ids(driver.step().preempted) == ["b"]
    assert ids(driver.step().admitted) == ["b", "c"]


def test_the_first_sequence_is_never_preempted():
    driver = Driver(num_pages=6)
    driver.add(*(Spec(id=str(i), prompt=prompt_of(i, 3), max_tokens=20) for i in range(6)))
    driver.finish()
    assert driver.counts["preempted"] > 0
    assert driver.sequences["0"].num_preemptions == 0


def test_a_running_sequence_can_be_preempted_by_name_and_nothing_else_can():
    driver = Driver(num_pages=8, max_lanes=1)
    driver.add(Spec(id="a", max_tokens=4), Spec(id="b", max_tokens=4))
    driver.step()
    assert not driver.scheduler.preempt("never seen")
    assert not driver.preempt("b")
    assert driver.preempt("a")
    assert not driver.preempt("a")
    assert (driver.scheduler.num_running, driver.scheduler.num_waiting) == (0, 2)
    assert ids(driver.step().admitted) == ["a"]
    driver.finish()
    assert not driver.preempt("a")


def test_a_sealed_prompt_is_not_computed_again():
    driver = Driver(num_pages=8)
    driver.add(Spec(id="first", prompt=prompt_of(0, 10)))
    driver.finish()
    driver.add(Spec(id="second", prompt=prompt_of(0, 9)))
    plan = driver.step()
    assert plan.admitted[0].num_cached_tokens == 8
    assert rows_of(plan) == [("DENOISE", "second", 2)]
    assert driver.sequences["second"].num_cached_tokens == 8
    driver.finish()


def test_nothing_is_shared_when_sharing_is_off():
    driver = Driver(num_pages=8, share_prefixes=False)
    driver.add(Spec(id="first", prompt=prompt_of(0, 8)))
    driver.finish()
    assert driver.scheduler.num_cached_pages == 0
    driver.add(Spec(id="second", prompt=prompt_of(0, 8)), Spec(id="third", prompt=prompt_of(0, 8)))
    plan = driver.step()
    assert [a.num_cached_tokens for a in plan.admitted] == [0, 0]
    assert len(plan.prefill_rows) == 4


@pytest.mark.parametrize(("prompt_length", "cached"), [(7, 4), (8, 8), (9, 8), (3, 0), (4, 4)])
def test_a_look_up_covers_the_complete_blocks_of_the_prompt(prompt_length, cached):
    driver = Driver(num_pages=12)
    driver.add(Spec(id="first", prompt=prompt_of(0, 12)))
    driver.finish()
    driver.add(Spec(id="second", prompt=prompt_of(0, prompt_length)))
    assert driver.step().admitted[0].num_cached_tokens == cached


def test_a_generated_block_is_found_by_a_prompt_that_repeats_it():
    driver = Driver(num_pages=8)
    driver.add(Spec(id="first", prompt=prompt_of(0, 2), max_tokens=8))
    driver.finish()
    first_block = driver.sequences["first"].token_ids[:4]
    driver.add(Spec(id="second", prompt=(*first_block, 99), max_tokens=2))
    assert driver.step().admitted[0].num_cached_tokens == 4


def test_a_canvas_is_never_offered():
    driver = Driver(num_pages=8)
    driver.add(Spec(id="first", prompt=prompt_of(0, 5), max_tokens=3, tokens_per_step=1))
    while driver.scheduler.has_work:
        driver.step()
        assert len(driver.scheduler._prefix_index) == 1


def test_equal_prompts_in_flight_are_computed_once():
    driver = Driver(num_pages=16)
    driver.add(*(Spec(id=id, prompt=prompt_of(0, 9), max_tokens=4) for id in "abc"))
    assert rows_of(driver.step()) == [("DENOISE", "a", 2), ("PREFILL", "a", 0), ("PREFILL", "a", 1)]
    assert [row[:2] for row in rows_of(driver.step())] == [("DENOISE", "b"), ("DENOISE", "c"), ("DENOISE", "a")]
    assert driver.scheduler.num_held_pages == 2 + 3
    driver.finish()


@pytest.mark.parametrize(("share_prefixes", "num_computed"), [(True, 0), (False, 1)])
def test_a_prompt_waits_for_an_equal_block_that_is_sealed_in_this_pass(share_prefixes, num_computed):
    driver = Driver(num_pages=16, share_prefixes=share_prefixes)
    driver.add(Spec(id="a", max_tokens=12, tokens_per_step=4))
    driver.step()
    driver.add(Spec(id="b", prompt=(*driver.sequences["a"].token_ids[:4], 99), max_tokens=3))
    plan = driver.step()
    assert ids(plan.seal_rows) == ["a"]
    assert len(plan.prefill_rows) == num_computed
    driver.step()
    assert driver.sequences["b"].num_sealed == 1
    driver.finish()
    assert len(driver.computed["b"]) == num_computed


def test_a_sequence_whose_prompt_another_one_is_computing_goes_on_if_that_one_is_aborted():
    driver = Driver(num_pages=16, max_prefill_rows=1)
    driver.add(*(Spec(id=id, prompt=prompt_of(0, 9), max_tokens=4) for id in "ab"))
    driver.step()
    driver.abort("a")
    assert rows_of(driver.step()) == [("DENOISE", "b", 2), ("PREFILL", "b", 1)]
    driver.finish()


def test_two_sequences_that_seal_the_same_tokens_at_once_end_on_one_page():
    driver = Driver(num_pages=16)
    driver.add(*(Spec(id=id, max_tokens=8, tokens_per_step=4, stream="same") for id in "ab"))
    driver.step()
    plan = driver.step()
    assert len(plan.seal_rows) == 2
    assert not driver.scheduler.has_work
    driver.add(*(Spec(id=id, max_tokens=12, tokens_per_step=2, stream="same") for id in "cd"))
    for _ in range(3):
        driver.step()
    c, d = driver.sequences["c"], driver.sequences["d"]
    assert c.page_ids[0] == d.page_ids[0]
    assert c.page_ids[1] != d.page_ids[1]
    assert driver.scheduler.num_held_pages == 3
    driver.finish()


def test_cached_pages_are_evicted_when_no_page_is_free():
    driver = Driver(num_pages=4)
    driver.add(Spec(id="first", prompt=prompt_of(0, 12)))
    driver.finish()
    assert (driver.scheduler.num_free_pages, driver.scheduler.num_cached_pages) == (1, 3)
    driver.add(Spec(id="second", prompt=prompt_of(1, 5), max_tokens=3))
    driver.finish()
    # One page was free, so one had to go: the last block of the first prompt.
    driver.add(Spec(id="third", prompt=prompt_of(0, 12)))
    assert driver.step().admitted[0].num_cached_tokens == 8


def test_cached_pages_that_are_about_to_be_held_do_not_count_as_room():
    driver = Driver(num_pages=4)
    driver.add(Spec(id="first", prompt=prompt_of(0, 8)))
    driver.finish()
    driver.add(Spec(id="small", max_tokens=4))
    driver.add(Spec(id="large", prompt=prompt_of(0, 12), max_tokens=4))
    # Four pages: one for the small one, two cached ones that the large one takes up, one left of the two it lacks.
    assert ids(driver.step().admitted) == ["small"]
    driver.finish()
    assert driver.sequences["large"].num_cached_tokens == 8
