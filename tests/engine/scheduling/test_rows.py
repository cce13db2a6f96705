from __future__ import annotations

import pytest

from engine.output import FinishReason
from engine.scheduling import CanvasFinished, CanvasStarted, SequenceFinished
from tests.engine.scheduling.driver import Driver, Spec, ids, prompt_of, rows_of


def test_a_short_prompt_is_prefilled_and_denoised_in_one_pass():
    driver = Driver(num_pages=8)
    driver.add(Spec(id="a", prompt=prompt_of(0, 9), max_tokens=5))
    plan = driver.step()
    assert rows_of(plan) == [("DENOISE", "a", 2), ("PREFILL", "a", 0), ("PREFILL", "a", 1)]
    assert [len(row.page_ids) for row in plan.rows] == [3, 1, 2]
    assert [row.key_length for row in plan.rows] == [12, 4, 8]
    assert [row.num_commits for row in plan.rows] == [1, 0, 0]


@pytest.mark.parametrize(("max_rows", "has_denoise"), [(3, True), (2, False)])
def test_the_first_denoise_row_rides_with_the_last_prefill_row_if_there_is_room(max_rows, has_denoise):
    driver = Driver(num_pages=8, max_rows=max_rows)
    driver.add(Spec(id="a", prompt=prompt_of(0, 9), max_tokens=5))
    plan = driver.step()
    assert len(plan.prefill_rows) == 2
    assert bool(plan.denoise_rows) == has_denoise
    assert rows_of(driver.step()) == [("DENOISE", "a", 2)]


def test_prefill_is_cut_at_its_own_limit_and_goes_on_oldest_first():
    driver = Driver(num_pages=16, max_prefill_rows=2)
    driver.add(Spec(id="a", prompt=prompt_of(0, 12), max_tokens=5), Spec(id="b", prompt=prompt_of(1, 4), max_tokens=5))
    assert rows_of(driver.step()) == [("PREFILL", "a", 0), ("PREFILL", "a", 1)]
    assert rows_of(driver.step()) == [
        ("DENOISE", "a", 3),
        ("DENOISE", "b", 1),
        ("PREFILL", "a", 2),
        ("PREFILL", "b", 0),
    ]


@pytest.mark.parametrize(("prompt_length", "first_block", "start"), [(7, 1, 7), (8, 2, 8), (9, 2, 9), (0, 0, 0)])
def test_the_first_canvas_begins_where_the_prompt_ends(prompt_length, first_block, start):
    driver = Driver(num_pages=8)
    driver.add(Spec(id="a", prompt=prompt_of(0, prompt_length), max_tokens=9))
    plan = driver.step()
    assert [row.block for row in plan.denoise_rows] == [first_block]
    assert len(plan.prefill_rows) == prompt_length // 4
    sequence = driver.sequences["a"]
    assert driver.changes["a"][0] == CanvasStarted(sequence, first_block, start, (first_block + 1) * 4)


def test_a_finished_block_seals_in_the_first_denoising_step_of_the_next_one():
    driver = Driver(num_pages=8)
    driver.add(Spec(id="a", max_tokens=8, tokens_per_step=2))
    assert rows_of(driver.step()) == [("DENOISE", "a", 0)]
    assert rows_of(driver.step()) == [("DENOISE", "a", 0)]
    assert rows_of(driver.step()) == [("DENOISE", "a", 1), ("SEAL", "a", 0)]
    assert rows_of(driver.step()) == [("DENOISE", "a", 1)]
    assert not driver.scheduler.has_work


def test_the_last_block_is_never_sealed():
    driver = Driver(num_pages=8)
    driver.add(Spec(id="a", prompt=prompt_of(0, 4), max_tokens=8))
    driver.finish()
    assert [block for _, block in driver.computed["a"]] == [0, 1]
    assert driver.scheduler.num_cached_pages == 2


def test_a_denoise_row_commits_no_more_than_is_masked():
    driver = Driver(num_pages=8)
    driver.add(Spec(id="a", prompt=(11,), max_tokens=3, tokens_per_step=2))
    assert [row.num_commits for row in driver.step().rows] == [2]
    assert [row.num_commits for row in driver.step().rows] == [1]


def test_only_positions_below_the_limit_are_attended_and_committed():
    driver = Driver(num_pages=8)
    driver.add(Spec(id="a", max_tokens=5, tokens_per_step=4))
    driver.step()
    plan = driver.step()
    assert [(row.key_length, row.num_commits) for row in plan.denoise_rows] == [(5, 1)]
    assert driver.sequences["a"].num_committed == 5


def test_changes_tell_each_canvas_once_and_in_order():
    driver = Driver(num_pages=8)
    driver.add(Spec(id="a", prompt=(11,), max_tokens=5, tokens_per_step=3))
    sequence = driver.sequences["a"]
    driver.step()
    assert driver.changes["a"] == [
        CanvasStarted(sequence, 0, 1, 4),
        CanvasFinished(sequence, 0, 1, 4),
    ]
    driver.step()
    assert driver.changes["a"][2:] == [
        CanvasStarted(sequence, 1, 4, 6),
        CanvasFinished(sequence, 1, 4, 6),
        SequenceFinished(sequence, FinishReason.LENGTH),
    ]


def test_sequences_take_turns_when_rows_are_short():
    driver = Driver(num_pages=9, max_rows=2, max_lanes=3)
    driver.add(*(Spec(id=id, max_tokens=4) for id in "abc"))
    served = [ids(driver.step().rows) for _ in range(6)]
    assert served == [["a", "b"], ["c", "a"], ["b", "c"], ["a", "b"], ["c", "a"], ["b", "c"]]


def test_more_important_sequences_take_the_rows():
    driver = Driver(num_pages=9, max_rows=2, max_lanes=3)
    driver.add(Spec(id="a", priority=1), Spec(id="b"), Spec(id="c"))
    assert [ids(driver.step().rows) for _ in range(5)] == [["b", "c"]] * 4 + [["a"]]


def test_a_seal_row_and_its_denoise_row_ride_together_or_not_at_all():
    driver = Driver(num_pages=9, max_rows=3, max_lanes=3)
    driver.add(*(Spec(id=id, max_tokens=6, tokens_per_step=4) for id in "abc"))
    driver.step()
    # Each has a block to seal now: of three rows, one sequence uses two and the others do not fit.
    assert rows_of(driver.step()) == [("DENOISE", "a", 1), ("SEAL", "a", 0)]
    assert rows_of(driver.step()) == [("DENOISE", "b", 1), ("SEAL", "b", 0)]
    driver.finish()


def test_prefill_gets_a_row_although_decoding_sequences_fill_every_pass():
    driver = Driver(num_pages=64, max_rows=2, max_lanes=8)
    driver.add(*(Spec(id=f"decoding {i}", max_tokens=12) for i in range(4)))
    driver.step()
    driver.add(Spec(id="new", prompt=prompt_of(0, 12), max_tokens=1))
    for _ in range(6):
        driver.step()
    assert not driver.sequences["new"].is_prefilling
    driver.finish()


def test_decoding_sequences_move_although_prompts_keep_coming():
    driver = Driver(num_pages=64, max_rows=2, max_lanes=8)
    driver.add(Spec(id="decoding", max_tokens=12))
    for i in range(40):
        driver.add(Spec(id=f"prompt {i}", prompt=prompt_of(i, 8), max_tokens=1))
        driver.step()
    assert driver.reasons.get("decoding") is FinishReason.LENGTH


def test_a_stream_of_short_requests_does_not_keep_older_ones_from_their_rows():
    driver = Driver(num_pages=64, max_rows=2, max_lanes=4)
    driver.add(Spec(id="long", max_tokens=16))
    for i in range(60):
        driver.add(Spec(id=f"short {i}", max_tokens=1), Spec(id=f"another {i}", max_tokens=1))
        driver.step()
    assert driver.reasons.get("long") is FinishReason.LENGTH


def test_a_draft_rides_beside_a_denoise_row_once_there_is_a_prediction_and_something_to_add():
    driver = Driver(num_pages=8)
    driver.add(Spec(id="a", max_tokens=4, has_drafts=True))
    kinds = []
    while driver.scheduler.has_work:
        masked = driver.sequences["a"].num_masked(0)
        kinds.append((masked, [row.kind.name for row in driver.step().rows]))
    assert kinds[0] == (4, ["DENOISE"])
    assert all(rows == (["DENOISE", "DRAFT"] if masked > 1 else ["DENOISE"]) for masked, rows in kinds[1:])


def test_drafts_take_only_what_is_left_of_a_small_pass():
    driver = Driver(num_pages=32, draft_row_limit=3)
    driver.add(*(Spec(id=id, max_tokens=4, has_drafts=id in "bc") for id in "abc"))
    driver.step()
    assert not driver.step().draft_rows
    driver.abort("a")
    assert ids(driver.step().draft_rows) == ["b"]


def test_without_a_limit_for_them_there_are_no_drafts():
    driver = Driver(num_pages=8, draft_row_limit=0)
    driver.add(Spec(id="a", max_tokens=4, has_drafts=True))
    driver.finish()
    assert driver.counts["drafts"] == 0


@pytest.mark.parametrize(("stream", "sealed"), [("a", []), ("b", [(0, 0)])])
def test_an_adaptive_row_that_finds_its_block_finished_was_the_seal_row(stream, sealed):
    """Its results were unknown when it was planned. Where one mask was left, the end was certain: a seal row then."""
    driver = Driver(num_pages=8, is_late=True)
    driver.add(Spec(id="a", max_tokens=8, tokens_per_step=4, is_adaptive=True, stream=stream))
    driver.finish()
    assert driver.computed["a"] == sealed
    assert driver.reasons["a"] is FinishReason.LENGTH
    assert driver.scheduler.num_cached_pages == 1


def test_in_lockstep_nobody_begins_a_block_before_the_slowest_has_finished_its_own():
    driver = Driver(num_pages=32, batching="lockstep")
    driver.add(Spec(id="fast", max_tokens=8, tokens_per_step=4), Spec(id="slow", max_tokens=8, tokens_per_step=1))
    passes = []
    while driver.scheduler.has_work:
        passes.append([(row.sequence.id, row.block) for row in driver.step().denoise_rows])
    both, slow = [("fast", 0), ("slow", 0)], [("slow", 0)]
    assert passes[:5] == [both, slow, slow, slow, [("fast", 1), ("slow", 1)]]
    assert len(passes) == 8
