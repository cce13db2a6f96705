"""Likelihoods against the reference package's own evaluation, given the masks that it draws."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter

import pytest

from engine import EstimateLikelihood, Likelihood, PromptTooLong, RequestTooLarge
from engine.analyzing.likelihood import combine, draw_mask
from tests.analyses_parity import estimate_with
from tests.checkpoints import EOT, RECIPES, STEERLING_LIKE
from tests.text_oracle import plain_likelihood

RELATIVE = 1e-5
CHECKPOINTS = [EOT, *RECIPES[1:3], *(recipe for recipe in RECIPES if recipe.name.startswith("no_epsilon"))]


def compare(engine, oracle, recipe, num_prompt, num_continuation, cfg_scale, **config):
    token_ids = recipe.plain_ids(num_prompt + num_continuation, seed=num_prompt)
    prompt, continuation = token_ids[:num_prompt], token_ids[num_prompt:]
    settings = {"num_samples": 7, "batch_size": 3, "cfg_scale": cfg_scale, **config}
    theirs = plain_likelihood(oracle(recipe), prompt, continuation, **settings)
    asked = EstimateLikelihood(prompt_token_ids=prompt, continuation_token_ids=continuation, **settings)
    ours = estimate_with(engine, asked, theirs.masks)
    assert ours.log_likelihood == pytest.approx(theirs.log_likelihood, rel=RELATIVE)
    assert ours.num_samples == 7


@pytest.mark.parametrize("cfg_scale", [0.0, 1.5])
@pytest.mark.parametrize("recipe", CHECKPOINTS, ids=lambda r: r.name)
def test_the_estimate_is_the_packages_given_its_masks(make_engine, oracle, recipe, cfg_scale):
    size, engine = recipe.block, make_engine(recipe, max_rows=5)
    for num_prompt, num_continuation in ((0, 3), (0, 2 * size + 1), (1, size - 1), (size, size), (2 * size + 3, 5)):
        compare(engine, oracle, recipe, num_prompt, num_continuation, cfg_scale)


@pytest.mark.parametrize("cfg_scale", [0.0, 0.7])
def test_blocks_of_64_with_a_continuation_over_three_of_them(make_engine, oracle, cfg_scale):
    compare(make_engine(STEERLING_LIKE), oracle, STEERLING_LIKE, 70, 125, cfg_scale, batch_size=7)


@pytest.mark.parametrize("config", [{"max_rows": 2}, {"max_rows": 3}, {"num_pages": 12}, {"share_prefixes": False}])
def test_a_sample_may_take_several_passes_and_share_no_page(make_engine, oracle, config):
    """A continuation of more blocks than a pass has rows, one sample at a time."""
    compare(make_engine(EOT, **config), oracle, EOT, 20, 45, 1.5)


@pytest.mark.parametrize(("num_prompt", "cfg_scale"), [(0, 0.0), (0, 2.0), (40, 0.0), (40, 2.0)])
def test_the_smallest_pool_is_told_exactly(make_engine, num_prompt, cfg_scale):
    # 12 tokens from position 40 on stand in blocks 2 and 3; the prompt's two complete blocks are clean, and masked too.
    num_pages = {(0, 0.0): 1, (0, 2.0): 1, (40, 0.0): 4, (40, 2.0): 8}[num_prompt, cfg_scale]
    asked = EstimateLikelihood(
        prompt_token_ids=EOT.plain_ids(num_prompt),
        continuation_token_ids=EOT.plain_ids(12, seed=1),
        num_samples=5,
        cfg_scale=cfg_scale,
    )
    plenty = make_engine(EOT).analyze(asked)
    enough = make_engine(EOT, num_pages=num_pages).analyze(asked)
    assert enough.log_likelihood == pytest.approx(plenty.log_likelihood, rel=RELATIVE)
    if num_pages > 1:
        with pytest.raises(RequestTooLarge, match=f"needs {num_pages} pages at once and the engine has"):
            make_engine(EOT, num_pages=num_pages - 1).begin_analysis(asked)


def test_complete_blocks_of_the_prompt_are_prefilled_once_and_nothing_masked_is_shared(make_engine):
    engine = make_engine(EOT)
    for seed in range(2):
        asked = EstimateLikelihood(
            prompt_token_ids=EOT.plain_ids(40),
            continuation_token_ids=EOT.plain_ids(30, seed=seed),
            num_samples=3,
            cfg_scale=1.0,
        )
        engine.analyze(asked)
        assert engine.stats().pages_cached == 2


def test_a_seed_gives_the_same_estimate_and_another_seed_another_one(make_engine):
    def ask(seed: int) -> Likelihood:
        asked = EstimateLikelihood(
            prompt_token_ids=EOT.plain_ids(5),
            continuation_token_ids=EOT.plain_ids(25, seed=1),
            num_samples=6,
            seed=seed,
        )
        return make_engine(EOT).analyze(asked)

    assert ask(3).log_likelihood == pytest.approx(ask(3).log_likelihood, rel=RELATIVE)
    assert ask(3).log_likelihood != pytest.approx(ask(4).log_likelihood, rel=1e-3)


def test_a_continuation_of_one_token_needs_no_luck(make_engine, oracle):
    """One mask is possible, so every sample gives the token's own log-probability."""
    token_ids = EOT.plain_ids(20)
    asked = EstimateLikelihood(
        prompt_token_ids=token_ids[:-1], continuation_token_ids=token_ids[-1:], num_samples=6, batch_size=2
    )
    found = make_engine(EOT).analyze(asked)
    seen = oracle(EOT).forward([*token_ids[:-1], EOT.special_ids["mask_token_id"]])
    expected = float(seen.logits_SV[-1].log_softmax(dim=-1)[token_ids[-1]])
    assert found.log_likelihood == pytest.approx(expected, rel=RELATIVE)
    assert found.standard_error == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize(("num_tokens", "batch_size"), [(1, 4), (7, 7), (50, 10), (9, 32)])
def test_mask_counts_of_a_batch_are_spread_evenly(num_tokens, batch_size):
    for seed in range(20):
        masks = [draw_mask(num_tokens, sample, batch_size, batch_size, seed) for sample in range(batch_size)]
        assert all(len(set(mask)) == len(mask) and mask == tuple(sorted(mask)) for mask in masks)
        assert all(1 <= len(mask) <= num_tokens and set(mask) <= set(range(num_tokens)) for mask in masks)
        counts = Counter(len(mask) for mask in masks)
        most = math.ceil(batch_size / num_tokens)
        assert max(counts.values()) <= most + 1
        assert len(counts) >= min(num_tokens, batch_size) - 1


def test_a_mask_depends_on_its_own_sample_alone():
    few = [draw_mask(30, sample, 8, 4, seed=5) for sample in range(8)]
    many = [draw_mask(30, sample, 64, 4, seed=5) for sample in range(8)]
    assert few == many
    assert len(set(few)) == 8
    assert few[0] != draw_mask(30, 0, 8, 4, seed=6)


def test_every_token_is_masked_as_often_as_any_other():
    times = Counter(position for seed in range(400) for position in draw_mask(10, 0, 1, 1, seed))
    # 400 masks of 1 to 10 tokens: 220 times each, give or take four standard deviations of 10.
    assert all(180 <= times[position] <= 260 for position in range(10))


def test_batches_count_alike_and_the_error_is_that_of_their_mean():
    whole = combine([1.0, 3.0, 5.0, 7.0, 9.0], batch_size=2)
    # Means of 2, 6 and 9.
    assert whole.log_likelihood == pytest.approx(-17 / 3)
    assert whole.standard_error == pytest.approx(math.sqrt((11 / 3) ** 2 + (1 / 3) ** 2 + (10 / 3) ** 2) / math.sqrt(6))


def test_the_error_of_batches_is_how_far_their_estimates_are_apart():
    """Over many draws its square is on average the variance of the estimate, with a smaller last batch as well."""
    rng = random.Random(0)
    losses = [[rng.gauss(5, 2) for _ in range(5)] for _ in range(4000)]
    found = [combine(sample, batch_size=2) for sample in losses]
    variance = statistics.variance(likelihood.log_likelihood for likelihood in found)
    # Batches of two, two and one: (4/2 + 4/2 + 4/1) / 9.
    assert variance == pytest.approx(8 / 9, rel=0.1)
    assert statistics.fmean(likelihood.standard_error**2 for likelihood in found) == pytest.approx(8 / 9, rel=0.1)


@pytest.mark.parametrize(("num_samples", "batch_size"), [(1, 1), (2, 2), (3, 32)])
def test_one_batch_does_not_tell_its_error(num_samples, batch_size):
    """It said 0, as if the estimate were certain."""
    found = combine([1.0, 2.0, 6.0][:num_samples], batch_size)
    assert found == Likelihood(
        log_likelihood=[-1.0, -1.5, -3.0][num_samples - 1], standard_error=None, num_samples=num_samples
    )


def test_one_sample_more_than_a_batch_tells_an_error(make_engine):
    def ask(num_samples: int) -> Likelihood:
        asked = EstimateLikelihood(
            prompt_token_ids=EOT.plain_ids(5),
            continuation_token_ids=EOT.plain_ids(9, seed=1),
            num_samples=num_samples,
            batch_size=4,
        )
        return make_engine(EOT).analyze(asked)

    assert ask(4).standard_error is None
    assert ask(5).standard_error > 0


def test_prompt_and_continuation_beyond_the_context_are_refused_together(make_engine):
    engine = make_engine(EOT)
    asked = EstimateLikelihood(prompt_token_ids=EOT.plain_ids(500), continuation_token_ids=EOT.plain_ids(13))
    with pytest.raises(PromptTooLong, match="continuation_token_ids has 13 tokens behind 500 others") as refused:
        engine.begin_analysis(asked)
    assert refused.value.param == "continuation_token_ids"
