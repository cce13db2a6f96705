"""The dense model equals the reference package's on every switch of the configuration."""

import pytest
import torch

from engine.config import ConceptConfig, ModelConfig
from engine.model.transformer import Transformer
from engine.model.weights import load_model
from tests.checkpoints import NO_ROPE, RECIPES

CPU = torch.device("cpu")


@pytest.fixture(params=[*RECIPES, NO_ROPE], ids=lambda r: r.name)
def pair(request, checkpoint, oracle):
    recipe = request.param
    return recipe, load_model(checkpoint(recipe), device=CPU, dtype=torch.float32), oracle(recipe)


def canvas(recipe, prompt_length, length):
    ids = recipe.plain_ids(length)
    for position in range(prompt_length, length, 2):
        ids[position] = recipe.special_ids["mask_token_id"]
    return ids


@pytest.mark.parametrize("blocks", [0.1, 1, 2.3])
def test_hidden_states_and_logits_equal_the_package(pair, blocks):
    recipe, model, oracle = pair
    ids = canvas(recipe, recipe.block // 2, max(1, int(blocks * recipe.block)))
    expected = oracle.forward(ids)
    hidden = model.hidden_dense(torch.tensor([ids]))[0]
    torch.testing.assert_close(hidden, expected.outputs.hidden[0], atol=1e-4, rtol=0)
    logits = model.transformer.logits(model.compose(hidden))
    assert logits.shape == (len(ids), recipe.vocab_size)
    torch.testing.assert_close(logits, expected.logits_SV, atol=1e-4, rtol=0)


def test_features_equal_the_package(pair):
    recipe, model, oracle = pair
    expected = oracle.forward(canvas(recipe, 3, recipe.block + 5)).outputs
    hidden = expected.hidden[0]
    torch.testing.assert_close(model.known_features(hidden), expected.known_features[0], atol=1e-4, rtol=0)
    if expected.unk_hat is None:
        assert not model.discovered_features(hidden).any()
    else:
        torch.testing.assert_close(model.discovered_features(hidden), expected.unk_hat[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("layer", [0, 1, 2, None])
def test_injection_equals_the_package(pair, layer):
    recipe, model, oracle = pair
    ids = canvas(recipe, 3, recipe.block + 5)
    direction = torch.randn(recipe.model_config.n_embd, generator=torch.Generator().manual_seed(1))
    first = recipe.model_config.n_layers // 2 if layer is None else layer
    expected = oracle.forward(ids, [(first, direction)]).outputs.hidden
    masked = torch.tensor([ids]) == recipe.special_ids["mask_token_id"]
    hidden = model.hidden_dense(torch.tensor([ids]), masked[..., None] * direction, layer)
    torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=0)
    assert not torch.allclose(hidden, oracle.forward(ids).outputs.hidden, atol=1e-2)


def test_a_block_sees_no_later_block(pair):
    recipe, model, _ = pair
    ids = recipe.plain_ids(3 * recipe.block)
    cut = 2 * recipe.block
    whole = model.hidden_dense(torch.tensor([ids]))
    torch.testing.assert_close(whole[:, :cut], model.hidden_dense(torch.tensor([ids[:cut]])), atol=1e-5, rtol=0)


def test_alignments_with_tokens_cover_every_token_of_a_large_vocabulary():
    """A large vocabulary is converted to float32 in parts."""
    config = ModelConfig(
        vocab_size=20_000,
        n_layers=1,
        n_head=2,
        n_kv_heads=1,
        n_embd=8,
        concept=ConceptConfig(concept_dim=8),
        mask_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
    )
    transformer = Transformer(config, vocab_multiple=64).requires_grad_(False)
    vectors = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    expected = vectors @ transformer.lm_head.weight[:20_000].T
    torch.testing.assert_close(transformer.token_alignments(vectors), expected, atol=1e-5, rtol=0)
