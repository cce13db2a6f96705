"""Token choice: against the plain reference, and in distribution against the package's own sampler."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from steerling.configs import GenerationConfig
from steerling.inference.causal_diffusion import _sample_token

from engine.decoding.random import uniform
from engine.decoding.sampler import (
    Adjustment,
    Choice,
    adjusted_logits,
    choose_tokens,
    confidence,
    entropy,
    entropy_temperature,
    kept_probabilities,
    presence,
    top_logprobs,
)
from engine.request import SamplingParams
from tests import reference

VOCAB = 40


def logits_of(seed, count=1, scale=2.0):
    return scale * torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed))


def choice_of(*params):
    """One row of sampling parameters each."""
    return Choice(
        temperature_M=torch.tensor([p.effective_temperature for p in params], dtype=torch.float32),
        top_p_M=torch.tensor([p.effective_top_p for p in params], dtype=torch.float32),
        top_k_M=torch.tensor([p.top_k or VOCAB for p in params]),
        min_p_M=torch.tensor([p.min_p or 0.0 for p in params], dtype=torch.float32),
        is_entropy_M=torch.tensor([p.uses_entropy for p in params]),
        is_greedy_M=torch.tensor([p.is_greedy for p in params]),
    )


MODES = {
    "entropy_default": SamplingParams(),
    "entropy_wide": SamplingParams(entropy_sampling=True, top_p=0.95),
    "temperature": SamplingParams(temperature=0.7),
    "hot": SamplingParams(temperature=1.8),
    "top_p": SamplingParams(top_p=0.6),
    "top_k": SamplingParams(temperature=1.3, top_k=5),
    "min_p": SamplingParams(temperature=1.3, min_p=0.2),
    "all_three": SamplingParams(temperature=1.5, min_p=0.05, top_k=9, top_p=0.8),
    "top_k_one": SamplingParams(temperature=1.0, top_k=1),
    "entropy_top_p_zero": SamplingParams(entropy_sampling=True, top_p=0.0),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale", [0.3, 2.0, 8.0])
def test_kept_probabilities_equal_the_plain_reference(mode, scale):
    logits = logits_of(1, 6, scale)
    logits[:, 3] = -math.inf
    kept = kept_probabilities(logits, choice_of(*[MODES[mode]] * 6)).double()
    kept = kept / kept.sum(dim=-1, keepdim=True)
    for row in range(6):
        expected = reference.distribution(logits[row], MODES[mode])
        torch.testing.assert_close(kept[row], expected, atol=1e-5, rtol=0)
        assert ((kept[row] > 0) == (expected > 0)).all()


def test_rows_with_different_parameters_do_not_mix():
    """One row's temperature was once used for a whole batch."""
    logits = logits_of(2, len(MODES))
    together = kept_probabilities(logits, choice_of(*MODES.values()))
    for row, params in enumerate(MODES.values()):
        alone = kept_probabilities(logits[row : row + 1], choice_of(params))
        torch.testing.assert_close(together[row], alone[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("number", [0.0, 1e-9, 0.25, 0.5, 0.999999, 1 - 2**-53])
def test_the_choice_is_the_inverse_distribution_function_in_id_order(number):
    params = SamplingParams(temperature=1.0, top_k=6)
    logits = logits_of(3, 8)
    tokens = choose_tokens(logits, choice_of(*[params] * 8), torch.full((8,), number, dtype=torch.float64))
    assert tokens.tolist() == [reference.choose(row, params, lambda: number) for row in logits]


def test_greedy_ties_go_to_the_lowest_id():
    logits = torch.zeros(1, VOCAB)
    logits[0, [17, 5, 30]] = 2.0
    greedy = choice_of(SamplingParams(temperature=0))
    assert choose_tokens(logits, greedy, torch.tensor([0.9], dtype=torch.float64)).tolist() == [5]


def test_top_k_ties_go_to_the_lowest_ids():
    logits = torch.zeros(1, VOCAB)
    kept = kept_probabilities(logits, choice_of(SamplingParams(temperature=1.0, top_k=4)))
    assert kept[0].nonzero().flatten().tolist() == [0, 1, 2, 3]


@given(st.integers(0, 10**6), st.floats(0.05, 8.0), st.floats(0, 1 - 2**-53), st.sampled_from(sorted(MODES)))
@settings(max_examples=150, deadline=None)
def test_a_token_without_probability_is_never_chosen(seed, scale, number, mode):
    logits = logits_of(seed, 1, scale)
    logits[0, ::3] = -math.inf
    token = choose_tokens(logits, choice_of(MODES[mode]), torch.tensor([number], dtype=torch.float64))
    assert logits[0, int(token)] > -math.inf


@pytest.mark.parametrize("top_p", [0.1, 0.8, 1.0])
def test_the_adaptive_temperature_rises_with_entropy_from_three_to_seven_tenths(top_p):
    flat, sharp = torch.zeros(1, VOCAB), torch.zeros(1, VOCAB)
    sharp[0, 0] = 60.0  # the largest first, as the function wants them
    bound = torch.tensor([top_p])
    assert float(entropy_temperature(sharp, bound)) == pytest.approx(0.3, abs=1e-4)
    assert float(entropy_temperature(flat, bound)) == pytest.approx(0.7, abs=0.01)


def test_adjusting_applies_offset_penalty_and_bans_in_this_order():
    raw = torch.tensor([[[1.0, -1.0, 3.0, 0.5, 2.0]]])
    offset = torch.tensor([[-2.0, 3.0, 0.0, 0.0, 0.0]])
    present = torch.tensor([[True, True, True, False, False]])
    banned = torch.tensor([False, False, False, True, False])
    ends = torch.tensor([[[False, False, False, False, True]]])
    adjusted = adjusted_logits(raw, offset, present, torch.tensor([2.0]), banned, ends)
    # The bias moved the first below and the second above zero before the penalty looked at the sign.
    assert adjusted[0, 0].tolist() == [-2.0, 1.0, 1.5, -math.inf, -math.inf]
    assert raw[0, 0].tolist() == [1.0, -1.0, 3.0, 0.5, 2.0]


def test_top_logprobs_are_the_raw_distribution_s_and_ties_go_to_the_lowest_id():
    """They come from the pick's own numbers, not from another sum over the vocabulary."""
    generator = torch.Generator().manual_seed(6)
    logits_RCW = (2 * torch.randn(2, 4, VOCAB + 8, generator=generator)).round().bfloat16()
    # What lies past the vocabulary does not count.
    logits_RCW[..., VOCAB:] = 100.0
    pick_RK = torch.tensor([[3, 0], [2, 1]])
    raw_RKV = logits_RCW[torch.arange(2)[:, None], pick_RK, :VOCAB].float()
    expected_RKV = raw_RKV.log_softmax(dim=-1)
    token_RK1 = torch.tensor([[[5], [11]], [[0], [39]]])
    target_RK, logprob_RK = (values.gather(2, token_RK1)[..., 0] for values in (raw_RKV, expected_RKV))
    ids, values = top_logprobs(logits_RCW, pick_RK, VOCAB, 20, target_RK.double(), logprob_RK.double())
    assert values.dtype == torch.float32
    for ids_T, values_T, expected_V in zip(
        ids.flatten(0, 1), values.flatten(0, 1), expected_RKV.flatten(0, 1), strict=True
    ):
        ranked = sorted(range(VOCAB), key=lambda token, row=expected_V: (-round(float(row[token]), 3), token))
        assert ids_T.tolist() == ranked[:20]
        torch.testing.assert_close(values_T, expected_V[ids_T], atol=1e-5, rtol=0)


def test_a_pick_s_own_token_has_its_logprob_among_the_top_ones():
    logits_RCW = logits_of(7, 3)[None]
    pick_RK = torch.tensor([[1]])
    raw_V = logits_RCW[0, 1]
    token = int(raw_V.argmax())
    logprob = raw_V.log_softmax(dim=-1)[token]
    ids, values = top_logprobs(logits_RCW, pick_RK, VOCAB, 1, raw_V[token].view(1, 1), logprob.view(1, 1))
    assert (int(ids), float(values)) == (token, float(logprob))


def test_presence_marks_what_occurs_in_each_sequence():
    present = presence(torch.tensor([[1, 1, 4], [0, 2, 2]]), 6)
    assert [row.nonzero().flatten().tolist() for row in present] == [[1, 4], [0, 2]]


def confidence_of(raw, masked, *, first_end=0, is_end=None, banned=()):
    """Confidences, entropies and finiteness of one row's positions."""
    vocab_size = raw.shape[-1]
    banned_V = torch.zeros(vocab_size, dtype=torch.bool)
    banned_V[list(banned)] = True
    nothing = torch.zeros(1, vocab_size)
    adjustment = Adjustment(
        lane_R=torch.tensor([0]),
        offset_NV=nothing,
        present_NV=nothing.bool(),
        penalty_N=torch.ones(1),
        is_end_NV=nothing.bool() if is_end is None else torch.tensor([is_end]),
        first_end_N=torch.tensor([first_end]),
        banned_V=banned_V,
    )
    positions = torch.arange(len(masked))[None]
    values, entropies, is_finite = confidence(raw[None], torch.tensor([masked]), positions, adjustment)
    return values[0].tolist(), entropies[0].tolist(), is_finite[0].tolist()


def test_confidence_is_the_probability_of_the_likeliest_token_at_masked_positions():
    raw = torch.tensor([[0.0, math.log(3.0), 0.0], [5.0, 0.0, 0.0]])
    values, _, is_finite = confidence_of(raw, [True, False], banned=[2])
    assert values == [pytest.approx(0.75), 0.0]
    assert is_finite == [True, True]


def test_the_entropy_is_of_what_may_be_chosen_in_nats_and_zero_where_nothing_is_masked():
    raw = torch.tensor([[0.0, math.log(3.0), 0.0], [1.0, 1.0, 1.0], [0.0, 200.0, 0.0]])
    _, entropies, _ = confidence_of(raw, [True, False, True], banned=[2])
    assert entropies == [pytest.approx(0.75 * math.log(4 / 3) + 0.25 * math.log(4)), 0.0, 0.0]
    _, entropies, _ = confidence_of(raw, [True, True, True])
    assert entropies[1] == pytest.approx(math.log(3))


@given(st.lists(st.floats(-30, 30), min_size=2, max_size=40), st.integers(0, 39))
@settings(max_examples=200, deadline=None)
def test_the_entropy_equals_its_form_for_one_reading_of_the_logits(logits, banned):
    """What a kernel sums slice by slice: the weights, and the weights times the distance from the top."""
    logits = torch.tensor(logits)
    logits[banned % len(logits)] = -math.inf
    shift = (logits - logits.max()).double()
    weight = shift.exp()
    products = torch.where(weight > 0, weight * shift, 0.0)
    expected = weight.sum().log() - products.sum() / weight.sum()
    assert float(entropy(logits.softmax(dim=-1))) == pytest.approx(float(expected), abs=1e-5)


def test_an_end_token_counts_only_from_the_first_position_where_it_may_stand():
    raw = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    values, _, _ = confidence_of(raw, [True, True], first_end=1, is_end=[True, False])
    assert values == [pytest.approx(1.0), pytest.approx(0.5)]


def test_a_position_is_not_finite_if_a_logit_is_not_or_everything_is_banned():
    raw = torch.tensor([[0.0, math.nan], [0.0, math.inf], [0.0, 0.0]])
    assert confidence_of(raw, [True, True, True])[2] == [False, False, True]
    assert confidence_of(raw, [False, True, True])[2] == [True, False, True]
    assert confidence_of(raw, [True, True, True])[1] == [0.0, 0.0, pytest.approx(math.log(2))]
    assert confidence_of(raw[2:], [True], banned=[0, 1]) == ([0.0], [0.0], [False])


def chi_square(counts, expected):
    return float(((counts - expected) ** 2 / expected).sum())


def bound(degrees):
    """About the 1 - 1e-6 quantile of the chi-square distribution (Wilson and Hilferty)."""
    return degrees * (1 - 2 / (9 * degrees) + 4.75 * math.sqrt(2 / (9 * degrees))) ** 3


PACKAGE_MODES = {
    "entropy": (SamplingParams(), GenerationConfig()),
    "entropy_narrow": (
        SamplingParams(entropy_sampling=True, top_p=0.5),
        GenerationConfig(top_p=0.5),
    ),
    "top_p": (
        SamplingParams(temperature=1.2, top_p=0.7),
        GenerationConfig(temperature=1.2, top_p=0.7, use_entropy_sampling=False),
    ),
    "temperature": (
        SamplingParams(temperature=0.6),
        GenerationConfig(temperature=0.6, top_p=1.0, use_entropy_sampling=False),
    ),
}


@pytest.mark.parametrize("mode", PACKAGE_MODES)
@pytest.mark.parametrize("scale", [0.3, 0.8])
def test_over_many_seeds_a_position_is_distributed_as_in_the_package(mode, scale):
    """Each side's counts against the distribution pooled from both: they draw from one."""
    ours, theirs = PACKAGE_MODES[mode]
    draws = 4000
    logits = logits_of(11, 1, scale)[0]
    seeds = torch.arange(draws)
    numbers = uniform(seeds, torch.full((draws,), 70), torch.zeros(draws, dtype=torch.int64))
    tokens = choose_tokens(logits.expand(draws, -1), choice_of(*[ours] * draws), numbers)
    generator = torch.Generator().manual_seed(5)
    package = torch.stack([_sample_token(logits, theirs, generator) for _ in range(draws)])
    counts = torch.stack([t.bincount(minlength=VOCAB) for t in (tokens, package)]).double()
    counts = counts[:, counts.sum(dim=0) > 0]
    assert counts.shape[1] >= 2, "a distribution with one outcome would compare nothing"
    degrees = counts.shape[1] - 1
    assert chi_square(counts, counts.mean(dim=0)) < bound(degrees)


def test_the_chi_square_test_would_notice_another_temperature():
    logits = logits_of(11, 1, 0.7)[0]
    draws = 4000
    numbers = uniform(torch.arange(draws), torch.full((draws,), 70), torch.zeros(draws, dtype=torch.int64))
    counts = torch.stack(
        [
            choose_tokens(logits.expand(draws, -1), choice_of(*[SamplingParams(temperature=t)] * draws), numbers)
            .bincount(minlength=VOCAB)
            .double()
            for t in (0.6, 0.8)
        ]
    )
    assert chi_square(counts, counts.mean(dim=0)) > bound(counts.shape[1] - 1)


@pytest.mark.parametrize("mode", ["temperature", "entropy", "top_k"])
@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-6, 1e6, 1e30])
@pytest.mark.parametrize("largest", [1.0, 1e30, 3e38])
def test_no_temperature_and_no_logit_makes_a_banned_token_likely(mode, temperature, largest):
    """A tiny temperature, or a huge bias divided by any, gave infinite logits and so NaN probabilities; the mask token
    was drawn from them."""
    values = {"temperature": {}, "entropy": {"entropy_sampling": True}, "top_k": {"top_k": 3}}[mode]
    params = SamplingParams(temperature=temperature, **values)
    logits = logits_of(1)
    logits[0, 7], logits[0, 8] = largest, -largest
    logits[0, [0, 20, VOCAB - 1]] = -math.inf
    choice = choice_of(params)
    probs = kept_probabilities(logits, choice)
    assert probs.isfinite().all() and probs.sum() > 0
    assert not probs[0, [0, 20, VOCAB - 1]].any()
    tokens = choose_tokens(logits.expand(50, -1), choice_of(*[params] * 50), torch.linspace(0, 1, 51)[:50].double())
    assert not set(tokens.tolist()) & {0, 20, VOCAB - 1}
    if temperature < 1e-6 and mode != "entropy":
        assert set(tokens.tolist()) == {int(logits.argmax())}
