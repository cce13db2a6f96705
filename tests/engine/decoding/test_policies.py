"""Which positions a denoising step commits."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.decoding.policies import most_confident, share_hidden


def picks(confidence, masked, quota, num_picks):
    offsets, is_pick = most_confident(
        torch.tensor([confidence]), torch.tensor([masked]), torch.tensor([quota]), num_picks
    )
    return offsets[0][is_pick[0]].tolist()


def test_the_most_confident_come_first_and_ties_go_to_the_lowest_position():
    assert picks([0.2, 0.9, 0.4, 0.9, 0.4], [True] * 5, 4, 4) == [1, 3, 2, 4]


def test_a_position_that_is_not_masked_is_never_picked():
    assert picks([0.9, 0.0, 0.8, 0.0], [False, True, False, True], 4, 4) == [1, 3]


def test_a_quota_of_zero_picks_nothing():
    assert picks([0.9, 0.1], [True, True], 0, 2) == []


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), st.booleans()), min_size=1, max_size=20),
    st.integers(0, 20),
)
@settings(max_examples=200, deadline=None)
def test_picks_equal_sorting_by_confidence_then_position(cells, quota):
    confidence, masked = [c for c, _ in cells], [m for _, m in cells]
    expected = sorted((p for p, m in enumerate(masked) if m), key=lambda p: (-confidence[p], p))[:quota]
    assert picks(confidence, masked, quota, max(quota, 1)) == expected


def test_rows_have_their_own_quotas():
    confidence = torch.tensor([[0.1, 0.2, 0.3], [0.3, 0.2, 0.1]])
    offsets, is_pick = most_confident(confidence, torch.ones(2, 3, dtype=torch.bool), torch.tensor([1, 2]), 2)
    assert [offsets[r][is_pick[r]].tolist() for r in range(2)] == [[2], [0, 1]]


def test_alike_positions_share_the_first_one_s_hidden_state_and_others_keep_theirs():
    hidden = torch.arange(12.0).view(2, 3, 2)
    masked = torch.tensor([[False, True, True], [True, True, True]])
    shared = share_hidden(hidden, masked, torch.tensor([True, False]))
    assert shared[0].tolist() == [[0, 1], [2, 3], [2, 3]]
    assert torch.equal(shared[1], hidden[1])
