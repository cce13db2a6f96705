"""Weights that are set, against the package's `intervene` and against sums over every concept of a head."""

import dataclasses

import pytest
import torch

from engine import SteeringParams, WeightOverride
from engine.decoding.attribution import explain
from engine.decoding.overrides import MOST_IN_DENSE_HEAD, override, plan_overrides
from engine.model.weights import load_model
from tests.checkpoints import RECIPES, STEERLING_LIKE, Recipe
from tests.oracle import Overrides
from tests.parity import TOLERANCE, Comparison, compare_concepts

LARGE_HEADS = Recipe(
    name="heads_too_large_for_dense_sums",
    model={"n_layers": 1},
    concept={"n_concepts": MOST_IN_DENSE_HEAD + 10, "n_unknown_concepts": MOST_IN_DENSE_HEAD + 20, "topk_known": 5},
)
LARGE_HEADS_NO_CORRECTION = dataclasses.replace(
    LARGE_HEADS,
    name="heads_too_large_for_dense_sums_no_epsilon_correction",
    concept={**LARGE_HEADS.concept, "use_epsilon_correction": False, "use_attention_unknown": True},
)
ALL = [*RECIPES, LARGE_HEADS, LARGE_HEADS_NO_CORRECTION]
KNOWN = {3: 2.5, 7: 0.0, 12: -1.0}
DISCOVERED = {0: 4.0, 29: 0.25}
NUM_MASKED = 7


@pytest.fixture(params=ALL, ids=lambda recipe: recipe.name)
def pair(request, checkpoint, oracle):
    recipe = request.param
    return load_model(checkpoint(recipe), device=torch.device("cpu"), dtype=torch.float32), oracle(recipe)


def plan(model, known=None, discovered=None, mode="delta"):
    """The plan for concept -> weight of each head."""
    wanted = [("known", known or {})]
    if model.discovered_head is not None:
        wanted.append(("discovered", discovered or {}))
    overrides = tuple(
        WeightOverride(concept_id=concept, head=head, weight=weight)
        for head, weights in wanted
        for concept, weight in weights.items()
    )
    return plan_overrides(SteeringParams(overrides=overrides, override_mode=mode), torch.device("cpu"))


def forward(oracle, overrides=None):
    """A pass of the package over a prompt and some masks; the second value says where these are."""
    ids = oracle.recipe.plain_ids(oracle.block + 3, seed=2) + [oracle.mask_id] * NUM_MASKED
    return oracle.forward(ids, (), overrides), slice(oracle.block + 3, None)


def both(recipe):
    """Weights of both heads, as far as the checkpoint has them."""
    return KNOWN, DISCOVERED if recipe.concept_config.use_unknown else {}


@torch.no_grad()
def test_to_add_the_difference_is_to_sum_all_concepts_with_other_weights(pair):
    model, oracle = pair
    known, discovered = both(oracle.recipe)
    seen, masked = forward(oracle)
    hidden_MD, composed_MD = seen.outputs.hidden[0, masked], seen.outputs.composed[0, masked]
    expected_MD = composed_MD
    for head, wanted in ((oracle.model.known_head, known), (oracle.model.unknown_head, discovered)):
        if wanted:
            old_MN = oracle.weights(head, hidden_MD)
            new_MN = old_MN.clone()
            new_MN[:, list(wanted)] = torch.tensor(list(wanted.values()))
            embedding_ND = head._get_embedding_weight()[: head.n_concepts]
            expected_MD = expected_MD + (new_MN - old_MN) @ embedding_ND
    found_MD = override(model, hidden_MD, model.compose(hidden_MD), plan(model, known, discovered))
    torch.testing.assert_close(found_MD, expected_MD, atol=TOLERANCE, rtol=0)
    assert (found_MD - composed_MD).abs().amax(dim=-1).min() > 0.1


@torch.no_grad()
def test_to_set_a_position_s_current_weights_changes_nothing(pair):
    """Of concepts that are active and of others alike. By hand, at one position after another: each has its own."""
    model, oracle = pair
    seen, masked = forward(oracle)
    hidden_MD = seen.outputs.hidden[0, masked]
    composed_MD = model.compose(hidden_MD)
    for m in range(NUM_MASKED):
        known_N = oracle.weights(oracle.model.known_head, hidden_MD[m])
        ids = [*known_N.topk(3).indices.tolist(), *known_N.topk(3, largest=False).indices.tolist()]
        known = {concept: float(known_N[concept]) for concept in ids}
        discovered = {}
        if oracle.model.unknown_head is not None:
            discovered_N = oracle.weights(oracle.model.unknown_head, hidden_MD[m])
            discovered = {concept: float(discovered_N[concept]) for concept in (1, int(discovered_N.argmax()))}
        found_MD = override(model, hidden_MD, composed_MD, plan(model, known, discovered))
        torch.testing.assert_close(found_MD[m], composed_MD[m], atol=1e-5, rtol=0)
        assert (found_MD - composed_MD).abs().amax(dim=-1).max() > 1e-3, "other positions have other weights"


@pytest.mark.parametrize("heads", ["both", "known", "discovered"])
@torch.no_grad()
def test_as_the_reference_means_as_the_package_s_intervene(pair, heads):
    model, oracle = pair
    recipe = oracle.recipe
    if recipe.concept_config.topk_on_logits:
        pytest.skip("refused: the package weighs all concepts outside the top k 0.5")
    known, discovered = both(recipe)
    known = known if heads != "discovered" else {}
    discovered = discovered if heads != "known" else {}
    if not (known or discovered):
        pytest.skip("no discovered head")
    seen, masked = forward(oracle, Overrides(known, discovered, is_by_package=True))
    plain, _ = forward(oracle)
    hidden_MD = plain.outputs.hidden[0, masked]
    composed_MD = model.compose(hidden_MD)
    found_MD = override(model, hidden_MD, composed_MD, plan(model, known, discovered, "reference"))
    torch.testing.assert_close(found_MD, seen.outputs.composed[0, masked], atol=TOLERANCE, rtol=0)
    concept = recipe.concept_config
    is_unchanged = not concept.use_unknown or (concept.use_epsilon_correction and not known)
    assert is_unchanged == bool((found_MD - composed_MD).abs().amax() < 1e-5)


@pytest.mark.parametrize("mode", ["delta", "reference"])
@torch.no_grad()
def test_explanations_report_the_weights_as_set_and_the_logits_as_changed(pair, mode):
    model, oracle = pair
    recipe = oracle.recipe
    if mode == "reference" and recipe.concept_config.topk_on_logits:
        pytest.skip("refused")
    known, discovered = both(recipe)
    seen, masked = forward(oracle, Overrides(known, discovered, is_by_package=mode == "reference"))
    tokens_M = torch.tensor(recipe.plain_ids(NUM_MASKED, seed=4))
    targets_M = seen.logits_SV[masked].gather(1, tokens_M[:, None])[:, 0]
    hidden_MD = seen.outputs.hidden[0, masked]
    found = explain(model, hidden_MD, tokens_M, targets_M, plan(model, known, discovered, mode))
    for m, token in enumerate(tokens_M.tolist()):
        expected = oracle.attribute(seen, masked.start + m, token)
        for head, theirs, wanted in (
            (found.known, expected.known, known),
            (found.discovered, expected.discovered, discovered),
        ):
            ours = {
                concept: (weight, contribution)
                for concept, weight, contribution in zip(
                    head.ids_MK[m].tolist(), head.weights_MK[m].tolist(), head.contributions_MK[m].tolist(), strict=True
                )
                if concept >= 0
            }
            compare_concepts(Comparison(), ours, theirs)
            assert {concept: ours[concept][0] for concept in wanted} == pytest.approx(wanted)
        assert float(found.epsilon_M[m]) == pytest.approx(expected.epsilon, abs=TOLERANCE)
        if expected.epsilon_by_vector is not None:
            assert float(found.epsilon_M[m]) == pytest.approx(expected.epsilon_by_vector, abs=TOLERANCE)


@torch.no_grad()
def test_entries_that_report_nothing_come_last(checkpoint):
    """A concept that is set is reported once, though the head may find it too: its other entry is void."""
    model = load_model(checkpoint(STEERLING_LIKE), device=torch.device("cpu"), dtype=torch.float32)
    hidden_MD = torch.randn(5, model.config.n_embd, generator=torch.Generator().manual_seed(1))
    best_M = model.known_head.top_k(hidden_MD, 1)[0][:, 0].tolist()
    tokens_M = torch.arange(5)
    for concept in best_M:
        found = explain(model, hidden_MD, tokens_M, torch.zeros(5), plan(model, {concept: 0.0})).known
        for ids in found.ids_MK.tolist():
            real = [one for one in ids if one >= 0]
            assert ids == real + [-1] * (len(ids) - len(real))
            assert real.count(concept) == 1 and len(set(real)) == len(real)
    assert (found.ids_MK < 0).any(), "some state has the concept among its own"
