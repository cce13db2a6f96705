from __future__ import annotations

import pytest

from engine.scheduling import ROOT_KEY, Sequence, Status, prefix_key
from engine.scheduling.sequence import LEGAL_MOVES
from tests.engine.scheduling.driver import END, EOS, MASK, PAD, Spec, make_sequence


def sequence_of(prompt_length: int, max_tokens: int, **spec: int) -> Sequence:
    return make_sequence(Spec(id="s", prompt=tuple(range(10, 10 + prompt_length)), max_tokens=max_tokens, **spec))


def test_tokens_are_prompt_then_masks_then_padding_to_the_grid():
    sequence = sequence_of(3, 3)
    assert sequence.token_ids == [10, 11, 12, MASK, MASK, MASK, PAD, PAD]
    assert sequence.limit == 6


def test_a_limit_on_the_grid_needs_no_padding():
    assert sequence_of(3, 5).token_ids == [10, 11, 12] + [MASK] * 5


@pytest.mark.parametrize(
    ("prompt_length", "first_block", "canvas"),
    [(0, 0, range(0, 4)), (3, 0, range(3, 4)), (4, 1, range(4, 8)), (5, 1, range(5, 8))],
)
def test_the_first_canvas_holds_the_tail_of_the_prompt(prompt_length, first_block, canvas):
    sequence = sequence_of(prompt_length, 20)
    assert sequence.block == sequence.first_block == first_block
    assert sequence.canvas_range(first_block) == canvas
    assert sequence.masked_positions(first_block) == list(canvas)
    assert sequence.num_masked(first_block) == len(canvas)


@pytest.mark.parametrize(("limit", "key_length", "is_whole"), [(7, 7, False), (8, 8, True), (9, 8, True)])
def test_positions_past_the_limit_do_not_exist(limit, key_length, is_whole):
    sequence = sequence_of(4, limit - 4)
    assert sequence.key_length(1) == key_length
    assert sequence.block_range(1) == range(4, key_length)
    assert sequence.is_whole(1) == is_whole
    assert sequence.is_last(1) == (limit <= 8)
    assert len(sequence.block_token_ids(1)) == 4


def test_mask_tokens_of_a_prompt_are_not_to_be_filled():
    sequence = make_sequence(Spec(id="s", prompt=(MASK, MASK), max_tokens=3))
    assert sequence.masked_positions(0) == [2, 3]
    assert sequence.num_masked(0) == 2


def test_an_end_token_fills_the_rest_of_the_canvas_and_leaves_the_left_to_be_filled():
    sequence = sequence_of(1, 9)
    sequence.commit([(2, END)])
    assert sequence.end == 2
    assert sequence.token_ids == [10, MASK, END, EOS] + [MASK] * 6 + [PAD] * 2
    assert sequence.masked_positions(0) == [1]


def test_an_end_token_overwrites_what_was_committed_to_its_right():
    sequence = sequence_of(0, 8)
    sequence.commit([(3, 50)])
    sequence.commit([(1, END)])
    assert sequence.block_token_ids(0) == [MASK, END, EOS, EOS]
    assert sequence.num_committed == 2


def test_an_end_token_further_left_moves_the_end_to_the_left():
    sequence = sequence_of(0, 8)
    sequence.commit([(2, END)])
    sequence.commit([(1, END)])
    assert sequence.end == 1
    assert sequence.block_token_ids(0) == [MASK, END, EOS, EOS]


@pytest.mark.parametrize("commits", [[(1, END), (2, END)], [(2, END), (1, END)]])
def test_of_two_end_tokens_in_one_step_the_left_one_ends(commits):
    sequence = sequence_of(0, 8)
    sequence.commit(commits)
    assert sequence.end == 1
    assert sequence.num_committed == 2


def test_an_end_token_at_the_last_position_of_the_canvas_fills_nothing():
    sequence = sequence_of(0, 8)
    sequence.commit([(3, END)])
    assert sequence.block_token_ids(0) == [MASK, MASK, MASK, END]


def test_end_filling_stops_at_the_limit():
    sequence = sequence_of(0, 3)
    sequence.commit([(0, END)])
    assert sequence.token_ids == [END, EOS, EOS, PAD]


def test_only_masked_positions_of_the_canvas_can_be_committed():
    sequence = sequence_of(1, 6)
    sequence.commit([(1, 50)])
    for position, token_id in [(0, 50), (1, 50), (4, 50), (2, MASK)]:
        with pytest.raises(AssertionError):
            sequence.commit([(position, token_id)])
    sequence.commit([(2, 50)])


def test_the_text_is_what_is_final_up_to_the_first_gap_or_the_end():
    sequence = sequence_of(1, 7)
    assert sequence.text_token_ids == []
    sequence.commit([(1, 50), (3, 52)])
    assert sequence.text_token_ids == [50]
    sequence.commit([(2, END)])
    assert sequence.text_token_ids == [50]


def test_a_full_text_has_every_position():
    sequence = sequence_of(1, 2)
    sequence.commit([(1, 50), (2, 51)])
    assert sequence.text_token_ids == [50, 51]


@pytest.mark.parametrize("start", Status)
@pytest.mark.parametrize("goal", Status)
def test_the_table_decides_every_move(start, goal):
    sequence = sequence_of(0, 4)
    sequence.status = start
    if goal in LEGAL_MOVES[start]:
        sequence.move_to(goal)
        assert sequence.status is goal
    else:
        with pytest.raises(AssertionError, match=f"{start.name} -> {goal.name}"):
            sequence.move_to(goal)
        assert sequence.status is start


def test_nothing_follows_the_end_of_a_life():
    assert not LEGAL_MOVES[Status.FINISHED]
    assert not LEGAL_MOVES[Status.ABORTED]
    assert Status.FINISHED not in LEGAL_MOVES[Status.WAITING]


def test_a_preempted_sequence_keeps_its_tokens_and_counts_and_gives_up_the_rest():
    sequence = sequence_of(5, 8)
    sequence.take_lane(3, [7, 8], 1)
    assert (sequence.lane, sequence.num_sealed, sequence.num_prefill_blocks) == (3, 1, 1)
    sequence.commit([(6, 50)])
    sequence.leave_lane(Status.WAITING)
    assert (sequence.lane, sequence.page_ids, sequence.num_sealed) == (None, [], 0)
    assert sequence.token_ids[6] == 50
    assert sequence.num_committed == 1


def test_a_lane_comes_with_pages_up_to_the_canvas():
    sequence = sequence_of(5, 8)
    with pytest.raises(AssertionError, match="1 pages"):
        sequence.take_lane(0, [7], 0)
    sequence.take_lane(0, [7, 8], 0)


def test_the_canvas_moves_on_only_when_its_block_is_finished_and_another_follows():
    sequence = sequence_of(0, 8)
    sequence.commit([(0, 50), (1, 50), (2, 50)])
    with pytest.raises(AssertionError, match="not finished"):
        sequence.start_next_block()
    sequence.commit([(3, 50)])
    sequence.start_next_block()
    sequence.commit([(p, 50) for p in range(4, 8)])
    with pytest.raises(AssertionError, match="has ended"):
        sequence.start_next_block()


def test_only_finished_blocks_have_a_prefix_key():
    sequence = sequence_of(9, 4)
    first = prefix_key(ROOT_KEY, [10, 11, 12, 13])
    assert sequence.prefix_key(1) == prefix_key(first, [14, 15, 16, 17])
    assert sequence.prefix_key(0) == first
    with pytest.raises(AssertionError, match="not finished"):
        sequence.prefix_key(2)


@pytest.mark.parametrize(
    ("max_tokens", "tokens_per_step", "is_valid"), [(1, 1, True), (0, 1, False), (1, 0, False), (3, 9, True)]
)
def test_a_sequence_needs_something_to_fill_and_to_fill_it_with(max_tokens, tokens_per_step, is_valid):
    if is_valid:
        sequence_of(1, max_tokens, tokens_per_step=tokens_per_step)
    else:
        with pytest.raises(AssertionError):
            sequence_of(1, max_tokens, tokens_per_step=tokens_per_step)
