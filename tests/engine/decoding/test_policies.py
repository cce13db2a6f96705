"""Which positions a denoising step commits."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.decoding.policies import choose_positions, policy_id, share_hidden
from engine.request import DEFAULT_PARAMETERS, Policy

ADAPTIVE = ("threshold", "factor", "entropy_bound")
NONE_FITS = {"threshold": 1.0, "factor": 1e-9, "entropy_bound": 0.0}
"""Where each adaptive policy commits one position, whatever there is."""


def picks(confidence, *, policy="confidence", parameter=0.0, masked=None, entropy=None, cap=None):
    """Positions of one row in commit order."""
    size = len(confidence)
    offsets, is_pick = choose_positions(
        torch.tensor([confidence]),
        torch.tensor([[0.0] * size if entropy is None else entropy]),
        torch.tensor([[True] * size if masked is None else masked]),
        torch.tensor([size if cap is None else cap]),
        torch.tensor([policy_id(policy)]),
        torch.tensor([parameter]),
        size,
    )
    assert offsets.shape == is_pick.shape == (1, size)
    return offsets[0][is_pick[0]].tolist()


def test_every_policy_has_a_rule_of_its_own():
    assert sorted(map(policy_id, get_args(Policy))) == list(range(len(get_args(Policy))))


def test_the_most_confident_come_first_and_ties_go_to_the_lowest_position():
    assert picks([0.2, 0.9, 0.4, 0.9, 0.4], cap=4) == [1, 3, 2, 4]


@pytest.mark.parametrize("policy", get_args(Policy))
def test_a_position_that_is_not_masked_is_never_picked(policy):
    masked, entropy = [False, True, False, True], [0.0, 0.0, 0.0, 0.0]
    assert picks([0.9, 0.0, 0.8, 0.0], policy=policy, parameter=100.0, masked=masked, entropy=entropy)[:1] == [1]
    assert picks([0.9, 0.5, 0.8, 0.5], policy=policy, parameter=0.4, masked=masked)[:1] == [1]
    assert picks([0.9] * 4, policy=policy, parameter=0.5, masked=[False] * 4) == []


@pytest.mark.parametrize("policy", get_args(Policy))
def test_a_cap_of_zero_picks_nothing(policy):
    assert picks([0.9, 0.1], policy=policy, parameter=0.5, cap=0) == []


@pytest.mark.parametrize(
    ("confidence", "threshold", "expected"),
    [
        ([0.3, 0.95, 0.6, 0.92], 0.9, [1, 3]),
        ([0.3, 0.95, 0.6, 0.92], 0.5, [1, 3, 2]),
        ([0.3, 0.7, 0.6, 0.7], 0.9, [1]),  # none is above: the most confident, the lowest of equals
        ([0.5, 0.75, 0.75, 0.25], 0.75, [1]),  # a confidence equal to the threshold is not above it
        ([0.75, 0.75, 0.75], 0.5, [0, 1, 2]),
        ([1.0, 1.0, 1.0], 1.0, [0]),
        ([0.1], 0.9, [0]),
    ],
)
def test_threshold_takes_all_that_are_above_it(confidence, threshold, expected):
    assert picks(confidence, policy="threshold", parameter=threshold) == expected


@pytest.mark.parametrize(
    ("confidence", "factor", "expected"),
    [
        # 2 * 0.05, 3 * 0.1, 4 * 0.2 and 5 * 0.4 against the factor.
        ([0.6, 0.95, 0.8, 0.9], 1.0, [1, 3, 2]),
        ([0.6, 0.95, 0.8, 0.9], 2.25, [1, 3, 2, 0]),
        ([0.6, 0.95, 0.8, 0.9], 0.25, [1]),
        ([0.6, 0.95, 0.8, 0.9], 0.01, [1]),
        ([0.75, 0.75, 0.75], 0.75, [0]),  # 3 * 0.25: equal to the factor is not below it
        ([0.75, 0.75, 0.75], 1.0, [0, 1]),  # 4 * 0.25
        ([0.75, 0.75, 0.75], 1.25, [0, 1, 2]),
        ([0.1], 1.0, [0]),
        ([1.0, 1.0], 0.0, [0]),
    ],
)
def test_factor_takes_n_while_the_least_of_them_is_sure_enough_for_n(confidence, factor, expected):
    assert picks(confidence, policy="factor", parameter=factor) == expected


@pytest.mark.parametrize(
    ("confidence", "entropy", "bound", "expected"),
    [
        # In order of confidence: 0.5, 0.125, 0.25, 1.0. Sums less the largest: 0, 0.125, 0.375, 0.875.
        ([0.5, 0.9, 0.7, 0.8], [1.0, 0.5, 0.25, 0.125], 0.1, [1]),
        ([0.5, 0.9, 0.7, 0.8], [1.0, 0.5, 0.25, 0.125], 0.125, [1, 3]),
        ([0.5, 0.9, 0.7, 0.8], [1.0, 0.5, 0.25, 0.125], 0.5, [1, 3, 2]),
        ([0.5, 0.9, 0.7, 0.8], [1.0, 0.5, 0.25, 0.125], 0.875, [1, 3, 2, 0]),
        ([0.5, 0.5, 0.5], [1.0, 1.0, 1.0], 0.9, [0]),
        ([0.5, 0.5, 0.5], [1.0, 1.0, 1.0], 1.0, [0, 1]),
        ([0.5, 1.0, 1.0], [1.0, 0.0, 0.0], 0.0, [1, 2, 0]),  # what is certain tells nothing about the rest
        ([0.1], [3.0], 0.0, [0]),
    ],
)
def test_entropy_bound_takes_what_knows_little_of_each_other(confidence, entropy, bound, expected):
    assert picks(confidence, policy="entropy_bound", parameter=bound, entropy=entropy) == expected


@pytest.mark.parametrize(("policy", "parameter"), [("threshold", 0.5), ("factor", 4.0), ("entropy_bound", 1.0)])
@pytest.mark.parametrize("cap", [1, 2, 3])
def test_no_policy_takes_more_than_its_cap(policy, parameter, cap):
    confidence, entropy = [0.8, 0.9, 0.7, 0.9], [0.2] * 4
    free = picks(confidence, policy=policy, parameter=parameter, entropy=entropy)
    assert free == [1, 3, 0, 2]
    assert picks(confidence, policy=policy, parameter=parameter, entropy=entropy, cap=cap) == free[:cap]


CELLS = st.lists(
    st.tuples(st.one_of(st.sampled_from([0.25, 0.5, 0.75]), st.floats(1 / 128, 1023 / 1024, width=32)), st.booleans()),
    min_size=1,
    max_size=20,
)
PARAMETERS = {
    "threshold": st.floats(1 / 128, 1.0, width=32),
    "factor": st.floats(0.0, 30.0, width=32),
    "entropy_bound": st.floats(0.0, 10.0, width=32),
}
POLICIES_AND_TWO = st.sampled_from(ADAPTIVE).flatmap(
    lambda policy: st.tuples(st.just(policy), PARAMETERS[policy], PARAMETERS[policy])
)


def columns(cells):
    """Confidences, entropies such as they might come with, and masks."""
    confidence, masked = [c for c, _ in cells], [m for _, m in cells]
    entropy = [-c * math.log(c) - (1 - c) * math.log((1 - c) / (1 + p % 3)) for p, c in enumerate(confidence)]
    return {"confidence": confidence, "entropy": entropy, "masked": masked}


def by_confidence(confidence, masked, **_):
    return sorted((p for p, m in enumerate(masked) if m), key=lambda p: (-confidence[p], p))


@given(CELLS, st.integers(0, 20))
@settings(max_examples=200, deadline=None)
def test_picks_of_confidence_equal_sorting_by_confidence_then_position(cells, cap):
    values = columns(cells)
    assert picks(**values, cap=cap) == by_confidence(**values)[:cap]


@given(CELLS, POLICIES_AND_TWO, st.integers(1, 20))
@settings(max_examples=400, deadline=None)
def test_an_adaptive_policy_picks_the_first_few_in_the_order_of_confidence_and_at_least_one(cells, asked, cap):
    values, (policy, parameter, _) = columns(cells), asked
    chosen = picks(**values, policy=policy, parameter=parameter, cap=cap)
    ranked = by_confidence(**values)
    assert chosen == ranked[: len(chosen)]
    assert min(1, len(ranked)) <= len(chosen) <= cap


@given(CELLS, POLICIES_AND_TWO)
@settings(max_examples=400, deadline=None)
def test_a_more_generous_parameter_never_picks_fewer(cells, asked):
    values, (policy, *parameters) = columns(cells), asked
    careful, generous = sorted(parameters, reverse=policy == "threshold")
    few = picks(**values, policy=policy, parameter=careful)
    many = picks(**values, policy=policy, parameter=generous)
    assert few == many[: len(few)]


@given(CELLS, st.sampled_from(ADAPTIVE))
@settings(max_examples=200, deadline=None)
def test_at_the_careful_end_a_policy_is_confidence_with_one_commit(cells, policy):
    values = columns(cells)
    assert picks(**values, policy=policy, parameter=NONE_FITS[policy]) == picks(**values, cap=1)


def test_rows_have_their_own_policies_parameters_and_caps():
    """All rules run for all rows; a row must take its own."""
    confidence = torch.tensor([[0.95, 0.2, 0.85, 0.92]]).expand(8, -1)
    entropy = torch.tensor([[0.2, 2.0, 0.6, 0.3]]).expand(8, -1)
    rows = [
        ("confidence", 0.0, 2, [0, 3]),
        ("threshold", 0.9, 4, [0, 3]),
        ("threshold", 0.5, 4, [0, 3, 2]),
        ("factor", 1.0, 4, [0, 3, 2]),
        ("factor", 0.2, 4, [0]),
        ("entropy_bound", 0.25, 4, [0, 3]),
        ("entropy_bound", 5.0, 4, [0, 3, 2, 1]),
        ("entropy_bound", 5.0, 1, [0]),
    ]
    offsets, is_pick = choose_positions(
        confidence,
        entropy,
        torch.ones(8, 4, dtype=torch.bool),
        torch.tensor([cap for _, _, cap, _ in rows]),
        torch.tensor([policy_id(policy) for policy, _, _, _ in rows]),
        torch.tensor([parameter for _, parameter, _, _ in rows]),
        4,
    )
    assert [offsets[r][is_pick[r]].tolist() for r in range(8)] == [expected for *_, expected in rows]


def test_fewer_picks_than_positions_are_the_first_ones():
    offsets, is_pick = choose_positions(
        torch.tensor([[0.1, 0.3, 0.2]]),
        torch.zeros(1, 3),
        torch.ones(1, 3, dtype=torch.bool),
        torch.tensor([2]),
        torch.tensor([policy_id("confidence")]),
        torch.zeros(1),
        2,
    )
    assert (offsets.tolist(), is_pick.tolist()) == ([[1, 2]], [[True, True]])


def test_the_defaults_are_parameters_of_the_adaptive_policies():
    assert tuple(DEFAULT_PARAMETERS) == ADAPTIVE
    assert set(get_args(Policy)) - set(ADAPTIVE) == {"confidence", "lossless"}


def test_alike_positions_share_the_first_one_s_hidden_state_and_others_keep_theirs():
    hidden = torch.arange(12.0).view(2, 3, 2)
    masked = torch.tensor([[False, True, True], [True, True, True]])
    shared = share_hidden(hidden, masked, torch.tensor([True, False]))
    assert shared[0].tolist() == [[0, 1], [2, 3], [2, 3]]
    assert torch.equal(shared[1], hidden[1])
