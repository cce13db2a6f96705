"""What an engine says of its load, on the scheduler alone: no model, no clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.load import EngineLoad, PassAverages, measure
from engine.scheduling import PrefixChanges, PrefixIndex, prefix_keys
from tests.engine.scheduling.driver import Driver, Spec, make_sequence, prompt_of


def load_of(driver: Driver, *, with_all_prefixes: bool = False) -> EngineLoad:
    times = PassAverages()
    return measure(driver.scheduler, times, num_lanes=3, with_all_prefixes=with_all_prefixes)


def driver(**options) -> Driver:
    return Driver(**{"num_pages": 32, "max_rows": 8, "max_lanes": 3, **options})


def test_an_idle_engine_has_everything_free():
    load = load_of(driver())
    assert (load.num_lanes, load.num_lanes_free, load.num_pages, load.num_pages_free) == (3, 3, 32, 32)
    assert (load.num_waiting, load.num_lanes_waiting) == (0, 0)
    assert (load.running, load.pass_seconds, load.prefixes) == ((), (), PrefixChanges())


@pytest.mark.parametrize("is_late", [False, True])
def test_steps_left_are_the_passes_until_a_block_ends(is_late):
    run = driver(is_late=is_late)
    run.add(Spec(id="a", prompt=prompt_of(1, 5), max_tokens=9, tokens_per_step=2))
    run.step()
    told = []
    while run.scheduler.has_work:
        (block,) = load_of(run).running
        told.append((block.num_steps_left, block.num_blocks_left))
        run.step()
    # Positions 5 to 13 in blocks of four: three masks, then four, then two, two a pass. A pass in flight counts as
    # done, so that a late host sees the same steps, one step earlier, and waits for the last results at 0.
    steps = [(1, 2), (2, 1), (1, 1), (1, 0)]
    assert told == (steps + [(0, 0)] if is_late else steps)


def test_prefill_comes_on_top_of_the_steps_left():
    run = driver(max_prefill_rows=1)
    run.add(Spec(id="a", prompt=prompt_of(1, 12), max_tokens=4))
    run.step()
    (block,) = load_of(run).running
    assert block.num_steps_left == 2 + 4


def test_an_adaptive_request_is_expected_to_go_on_as_it_did():
    sequence = make_sequence(Spec(id="a", max_tokens=8, tokens_per_step=4, is_adaptive=True))
    run = driver()
    run.scheduler.add(sequence)
    run.scheduler.plan()
    sequence.commit([(0, 50), (1, 51)])
    sequence.num_forward_passes = 1
    (block,) = load_of(run).running
    # The pass in flight commits one for certain, so one of the two that are left.
    assert (block.num_steps_left, block.num_blocks_left) == (1, 1)


def test_only_pages_that_nobody_else_holds_come_free_with_a_request():
    run = driver()
    run.add(Spec(id="a", prompt=prompt_of(1, 8), max_tokens=12))
    run.step()
    run.step()
    assert [block.num_pages for block in load_of(run).running] == [3]
    run.add(Spec(id="b", prompt=prompt_of(1, 8), max_tokens=12))
    run.step()
    # The two blocks of the prompt belong to both.
    assert {block.request_id: block.num_pages for block in load_of(run).running} == {"a": 1, "b": 1}


def test_those_without_a_lane_wait():
    run = driver()
    run.add(*(Spec(id=f"r{i}", max_tokens=8) for i in range(5)))
    run.step()
    load = load_of(run)
    assert (load.num_lanes_free, load.num_waiting, load.num_lanes_waiting, len(load.running)) == (0, 2, 2, 3)
    run.finish()
    assert load_of(run).num_lanes_free == 3


def test_a_guided_request_runs_and_waits_on_two_lanes():
    run = driver(max_lanes=4)
    run.add(*(Spec(id=f"g{i}", prompt=prompt_of(i, 2), max_tokens=8, is_guided=True) for i in range(3)))
    run.add(Spec(id="single", max_tokens=8))
    run.step()
    load = load_of(run)
    assert [block.num_lanes for block in load.running] == [2, 2]
    assert (load.num_lanes_free, load.num_waiting, load.num_lanes_waiting) == (0, 2, 3)
    run.finish()
    assert load_of(run).num_lanes_waiting == 0


def test_sealed_prompts_are_told_once_under_the_keys_that_a_prompt_has():
    run = driver()
    prompt = prompt_of(1, 10)
    run.add(Spec(id="a", prompt=prompt, max_tokens=2))
    run.finish()
    keys = tuple(prefix_keys(prompt, 4))
    assert len(keys) == 2
    assert load_of(run).prefixes == PrefixChanges(added=keys)
    assert load_of(run).prefixes == PrefixChanges()
    assert load_of(run, with_all_prefixes=True).prefixes == PrefixChanges(added=keys, is_everything=True)


@given(st.lists(st.tuples(st.sampled_from("rft"), st.integers(0, 5)), max_size=60))
def test_changes_taken_in_any_rhythm_lead_to_what_is_offered(actions):
    index, known = PrefixIndex(), set()
    for action, number in actions:
        if action == "t":
            changes = index.take_changes()
            assert not set(changes.added) & known and set(changes.removed) <= known
            known = (known | set(changes.added)) - set(changes.removed)
        elif action == "f":
            index.forget(number)
        elif number not in index:
            index.register(bytes([number]), number)
    changes = index.take_changes()
    known = (known | set(changes.added)) - set(changes.removed)
    assert known == {bytes([page]) for page in index.page_ids} == set(index.take_changes(everything=True).added)


def test_what_nobody_asks_for_does_not_pile_up():
    index = PrefixIndex()
    for number in range(1000):
        index.register(b"%d" % number, 0)
        index.forget(0)
    assert index.take_changes() == PrefixChanges()


def test_pass_times_follow_what_is_measured_for_each_number_of_rows():
    times = PassAverages()
    for seconds in (1.0, 1.0, 2.0):
        times.observe(4, seconds)
    times.observe(2, 0.5)
    (two, four) = times.averages()
    assert two == (2, 0.5)
    assert four[0] == 4 and 1.0 < four[1] < 2.0
