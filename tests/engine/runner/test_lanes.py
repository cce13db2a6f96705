"""Lanes: what a written lane holds, and what commits change."""

from __future__ import annotations

import pytest
import torch

from engine.config import ConceptConfig, ModelConfig
from engine.decoding.steering import SteeringPlan
from engine.request import SamplingParams
from engine.runner.lanes import Lanes
from engine.scheduling import Sequence

CANVAS, VOCAB, WIDTH = 4, 21, 8
MASK, EOS, PAD = 20, 19, 18
CONFIG = ModelConfig(
    vocab_size=VOCAB,
    n_layers=1,
    n_head=1,
    n_kv_heads=1,
    n_embd=WIDTH,
    block_size=16,
    diff_block_size=CANVAS,
    concept=ConceptConfig(concept_dim=WIDTH),
    mask_token_id=MASK,
    eos_token_id=EOS,
    pad_token_id=PAD,
)
NO_STEERING = SteeringPlan(
    resolved=(),
    vector_GD=torch.zeros(0, WIDTH),
    layer_G=torch.zeros(0).long(),
    cutoff_G=torch.zeros(0).long(),
    suppression_V=None,
)


def sequence_of(*prompt: int, max_tokens: int = 6, end_token_ids: frozenset[int] = frozenset()) -> Sequence:
    return Sequence(
        id="a",
        arrival=0,
        block_size=CANVAS,
        prompt_token_ids=prompt,
        max_tokens=max_tokens,
        mask_token_id=MASK,
        eos_token_id=EOS,
        pad_token_id=PAD,
        end_token_ids=end_token_ids,
    )


def lanes_with(sequence: Sequence, lane: int = 1) -> Lanes:
    lanes = Lanes(CONFIG, 3, torch.device("cpu"), torch.float32)
    lanes.write(lane, sequence, SamplingParams(), 0, NO_STEERING)
    return lanes


def present(lanes: Lanes, lane: int) -> set[int]:
    """Tokens that the penalty applies to, those that are banned anyway left out."""
    return set(lanes.present_NV[lane].nonzero().flatten().tolist()) - {MASK, EOS, PAD}


def commit(lanes: Lanes, lane: int, block: int, commits: dict[int, int], hidden: torch.Tensor | None = None) -> None:
    """Commit {position: token} in a row of the block, beside an idle row and an entry that is no commit."""
    offsets = torch.tensor([position % CANVAS for position in commits] + [0])
    position_RC = torch.tensor([[block * CANVAS], [0]]) + torch.arange(CANVAS)
    hidden_RCD = torch.zeros(2, CANVAS, WIDTH) if hidden is None else torch.stack((hidden, hidden))
    lanes.commit(
        torch.tensor([lane, lanes.idle_lane]),
        position_RC,
        hidden_RCD,
        offsets.expand(2, -1),
        torch.tensor([*commits.values(), 7]).expand(2, -1),
        torch.tensor([[True] * len(commits) + [False], [False] * (len(commits) + 1)]),
    )


def test_present_are_the_tokens_of_the_prompt_and_of_resumed_text_and_no_earlier_ones() -> None:
    lanes = lanes_with(sequence_of(3, 5, 3))
    assert present(lanes, 1) == {3, 5}
    resumed = sequence_of(9, 2)
    resumed.commit([(3, 4)])
    lanes.write(1, resumed, SamplingParams(), 0, NO_STEERING)
    assert present(lanes, 1) == {9, 2, 4}
    assert present(lanes, 0) == present(lanes, 2) == set()


def test_a_commit_makes_its_token_present_from_the_next_choice_on() -> None:
    lanes = lanes_with(sequence_of(3, 5))
    commit(lanes, 1, 0, {2: 11, 3: 5})
    assert present(lanes, 1) == {3, 5, 11}
    assert present(lanes, 0) == present(lanes, 2) == set()


def test_a_token_that_an_end_token_overwrites_is_present_only_if_it_stands_elsewhere() -> None:
    """The reference's penalty looks at the tokens that are there, not at what once was."""
    lanes = lanes_with(sequence_of(3, 5, 6, 7, end_token_ids=frozenset({1})))
    commit(lanes, 1, 1, {5: 12, 6: 3, 7: 13})
    commit(lanes, 1, 1, {4: 1})
    assert present(lanes, 1) == {3, 5, 6, 7, 1}


@pytest.mark.parametrize("end", [4, 6, None])
def test_commits_change_a_lane_as_they_change_its_sequence(end: int | None) -> None:
    sequence = sequence_of(3, 5, 6, 7, end_token_ids=frozenset({1}))
    lanes = lanes_with(sequence)
    commits = {5: 12} if end is None else {5: 12, end: 1}
    commit(lanes, 1, 1, commits)
    sequence.commit(commits.items())
    assert lanes.token_ids_NS[1, : len(sequence.token_ids)].tolist() == sequence.token_ids
    assert int(lanes.end_N[1]) == (sequence.limit if sequence.end is None else sequence.end)
    assert int(lanes.num_committed_N[1]) == sequence.num_committed


def test_only_committed_positions_keep_their_hidden_states() -> None:
    lanes = lanes_with(sequence_of(3, 5))
    hidden = torch.arange(CANVAS * WIDTH).view(CANVAS, WIDTH) + 1.0
    commit(lanes, 1, 0, {3: 9}, hidden)
    assert torch.equal(lanes.hidden_NCD[1, 3], hidden[3])
    assert not lanes.hidden_NCD[1, :3].any() and not lanes.hidden_NCD[[0, 2]].any()


def test_vectors_of_tokens_start_where_wide_loads_may() -> None:
    adjustment = lanes_with(sequence_of(3)).adjustment(torch.tensor([1]))
    assert adjustment.vocab_size == VOCAB and adjustment.lane_stride % 16 == 0
