"""Explaining tokens from hidden states, against the package's heads on every kind of checkpoint."""

import pytest
import torch
from steerling.configs import SteeringConfig

from engine.decoding.attribution import explain, top_tokens
from engine.model.weights import load_model
from tests.checkpoints import RECIPES, STEERLING_LIKE
from tests.parity import TOLERANCE, Comparison, compare_concepts


@pytest.fixture(params=RECIPES, ids=lambda r: r.name)
def pair(request, checkpoint, oracle):
    recipe = request.param
    return load_model(checkpoint(recipe), device=torch.device("cpu"), dtype=torch.float32), oracle(recipe)


def concepts(head, row):
    columns = (head.ids_MK[row], head.weights_MK[row], head.contributions_MK[row])
    return {c: (w, x) for c, w, x in zip(*(column.tolist() for column in columns), strict=True)}


def test_explanations_equal_the_package_and_the_residual_vector(pair):
    model, oracle = pair
    recipe = oracle.recipe
    ids = recipe.plain_ids(recipe.block) + [oracle.mask_id] * 10
    seen = oracle.forward(ids)
    tokens = torch.tensor(recipe.plain_ids(10, seed=4))
    rows = torch.arange(recipe.block, recipe.block + 10)
    targets = seen.logits_SV[rows, tokens]
    found = explain(model, seen.outputs.hidden[0, rows], tokens, targets)
    for row, (position, token) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
        expected = oracle.attribute(seen, position, token)
        compare_concepts(Comparison(), concepts(found.known, row), expected.known)
        compare_concepts(Comparison(), concepts(found.discovered, row), expected.discovered)
        assert float(found.epsilon_M[row]) == pytest.approx(expected.epsilon, abs=TOLERANCE)
        if expected.epsilon_by_vector is not None:
            assert float(found.epsilon_M[row]) == pytest.approx(expected.epsilon_by_vector, abs=TOLERANCE)
    assert (found.known.contributions_MK.abs().diff(dim=-1) <= 0).all()
    for head in (found.known, found.discovered):
        torch.testing.assert_close(head.total_M, head.contributions_MK.sum(dim=-1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("steering", [None, SteeringConfig.injection(3, 6.0, inject_layer=1)])
def test_the_oracle_s_own_top_k_equals_the_package_s_accumulator(oracle, steering):
    """Guards the tests themselves: the oracle scores all concepts plainly, the package streams."""
    model = oracle(STEERLING_LIKE)
    prompt = STEERLING_LIKE.plain_ids(STEERLING_LIKE.block)
    theirs = model.accumulated_attributions(prompt, STEERLING_LIKE.block, steering)
    ours = model.generate_full(prompt, STEERLING_LIKE.block, steering=steering)
    assert sorted(theirs) == sorted(c.position for c in ours)
    for choice in ours:
        expected = theirs[choice.position]
        compare_concepts(Comparison(), choice.attribution.known, expected.known)
        compare_concepts(Comparison(), choice.attribution.discovered, expected.discovered)
        assert choice.attribution.epsilon == pytest.approx(expected.epsilon, abs=1e-5)


def test_the_tokens_a_concept_promotes_equal_the_package_s(checkpoint, oracle):
    model = load_model(checkpoint(STEERLING_LIKE), device=torch.device("cpu"), dtype=torch.float32)
    theirs = oracle(STEERLING_LIKE).generator.concept_top_tokens(7, k=12)
    ids, values = top_tokens(model, model.known_head, 7, 12)
    assert ids.tolist() == [int(text) for text, _ in theirs]
    assert values.tolist() == pytest.approx([value for _, value in theirs], abs=1e-5)
