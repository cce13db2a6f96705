"""Embeddings against the reference package's own `get_embeddings`."""

from __future__ import annotations

import pytest
import torch

from engine import EmbedTokens, InvalidValue
from tests.checkpoints import EOT, RECIPES, Recipe
from tests.text_oracle import plain_embedding

TOLERANCE = 2e-5
KINDS = ("hidden", "composed", "known", "discovered")
POOLINGS = ("mean", "last", "first")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_every_kind_and_pooling_is_the_packages(make_engine, oracle, recipe):
    engine = make_engine(recipe, max_rows=2)
    for length in (1, recipe.block, 2 * recipe.block + 3):
        token_ids = recipe.plain_ids(length, seed=length)
        for kind in KINDS:
            for pooling in POOLINGS:
                ours = engine.analyze(EmbedTokens(token_ids=token_ids, kind=kind, pooling=pooling))
                expected = plain_embedding(oracle(recipe), token_ids, kind, pooling)
                error = float((torch.tensor(ours.vector) - expected).abs().max())
                assert error < TOLERANCE, f"{length} tokens, {kind}, {pooling}: {error}"


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("length", [16, 32, 37])
def test_pages_found_in_the_index_change_nothing(make_engine, pooling, length):
    """A row of a found block may not write its page: others read it."""
    engine = make_engine(EOT, max_rows=3)
    asked = EmbedTokens(token_ids=EOT.plain_ids(length), pooling=pooling)
    first = engine.analyze(asked)
    cached = engine.stats().pages_cached
    assert cached == (1 if pooling == "first" else length // 16)
    before = engine.runner.cache.k_LPCGE[:, : engine.stats().num_pages].clone()
    held = sorted(engine.scheduler._prefix_index.page_ids)
    second = engine.analyze(asked)
    assert torch.equal(engine.runner.cache.k_LPCGE[:, held], before[:, held])
    assert second.vector == pytest.approx(first.vector, abs=TOLERANCE)
    assert engine.stats().pages_cached == cached


def test_the_smallest_pool_gives_the_same_vector(make_engine):
    token_ids = EOT.plain_ids(40)
    plenty = make_engine(EOT).analyze(EmbedTokens(token_ids=token_ids))
    engine = make_engine(EOT, num_pages=3)
    for _ in range(2):  # the second time, all complete blocks are found, and one scratch page serves all three
        assert engine.analyze(EmbedTokens(token_ids=token_ids)).vector == pytest.approx(plenty.vector, abs=TOLERANCE)


def test_a_vector_of_pad_and_end_tokens_is_a_vector(make_engine, oracle):
    recipe: Recipe = EOT
    token_ids = [recipe.special_ids["eos_token_id"], recipe.special_ids["pad_token_id"]]
    vector = make_engine(recipe).analyze(EmbedTokens(token_ids=token_ids)).vector
    expected = plain_embedding(oracle(recipe), token_ids, "composed", "mean")
    assert vector == pytest.approx(expected.tolist(), abs=TOLERANCE)


def test_a_masked_text_is_refused(make_engine):
    with pytest.raises(InvalidValue, match="is the mask token"):
        make_engine(EOT).begin_analysis(EmbedTokens(token_ids=(EOT.special_ids["mask_token_id"],)))
