"""Concept heads against the package's, their top-k against sorting everything, and ties."""

import itertools

import pytest
import torch
from steerling.models.interpretable.concept_head import ConceptHead as PackageHead

from engine.model.concept_heads import ConceptHead
from engine.model.ranking import ids_of_keys, ranking_keys, top_k_lowest_id
from engine.model.weights import public_name

WIDTH, CONCEPTS = 24, 37


@pytest.fixture(autouse=True, params=[0, 60], ids=["sliced", "joined slices"])
def logits_at_once(request, monkeypatch):
    """Few states share larger slices; here sometimes none, sometimes ten logits of each of six."""
    monkeypatch.setattr("engine.model.concept_heads._LOGITS_AT_ONCE", request.param)


def heads(use_attention, rank, slice_size=4096, seed=0):
    """The same random head, ours and the package's."""
    ours = ConceptHead(CONCEPTS, WIDTH, use_attention=use_attention, rank=rank, pad_multiple=16, slice_size=slice_size)
    theirs = PackageHead(
        CONCEPTS,
        WIDTH,
        WIDTH,
        use_attention=use_attention,
        topk=5,
        block_size=slice_size,
        factorize=rank is not None,
        factorize_rank=rank or 1,
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
        state = theirs.state_dict()
        for name, parameter in ours.named_parameters():
            parameter.copy_(state[public_name(f"known_head.{name}").removeprefix("known_head.")])
    return ours.requires_grad_(False), theirs.requires_grad_(False)


def hidden(count=6):
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(9))


FORMS = list(itertools.product([False, True], [None, 16]))


@pytest.mark.parametrize(("use_attention", "rank"), FORMS)
def test_logits_and_embeddings_equal_the_package(use_attention, rank):
    ours, theirs = heads(use_attention, rank)
    ids = torch.arange(CONCEPTS)
    expected = theirs.compute_logits_for_indices(hidden(), ids.expand(6, -1))
    torch.testing.assert_close(ours.logits(hidden()), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.logits_at(hidden(), ids.expand(6, -1)), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.embedding(ids), theirs._get_embedding(ids), atol=1e-5, rtol=0)
    vectors = hidden().flip(0)
    products = vectors @ theirs._get_embedding(ids).T
    torch.testing.assert_close(ours.alignments(ids.expand(6, -1), vectors), products, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("use_attention", "rank"), FORMS)
def test_a_head_multiplies_in_the_way_it_is_told(use_attention, rank):
    """All that depends on how many hidden states come at once, save its linear maps, goes through `product`."""
    head = heads(use_attention, rank)[0]
    vectors, ids = hidden().flip(0), torch.arange(CONCEPTS).expand(6, -1)
    expected = head.logits(hidden()), head.alignments(ids, vectors)
    shapes = []

    def double(x_MQ, table_NQ):
        shapes.append((len(x_MQ), len(table_NQ)))
        return (x_MQ.double() @ table_NQ.double().T).float()

    head.product = double
    for ours, theirs in zip((head.logits(hidden()), head.alignments(ids, vectors)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    through_basis = [(6, rank)] if rank else []
    assert shapes == [*(through_basis if use_attention else []), (6, CONCEPTS), *through_basis]


@pytest.mark.parametrize(("use_attention", "rank"), FORMS)
@pytest.mark.parametrize("slice_size", [1, 7, 16, 4096])
@pytest.mark.parametrize("k", [1, 5, CONCEPTS, CONCEPTS + 9])
def test_top_k_equals_sorting_everything_whatever_the_slice(use_attention, rank, slice_size, k):
    ours, _ = heads(use_attention, rank, slice_size)
    ids, logits = ours.top_k(hidden(), k)
    everything = ours.logits(hidden()).sort(dim=-1, descending=True, stable=True)
    assert torch.equal(ids, everything.indices[:, :k])
    torch.testing.assert_close(logits, everything.values[:, :k], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("use_attention", "rank"), FORMS)
@pytest.mark.parametrize("k", [5, None])
def test_features_equal_the_package(use_attention, rank, k):
    ours, theirs = heads(use_attention, rank, slice_size=16)
    theirs.topk = theirs.topk_features = k
    expected = theirs(hidden().unsqueeze(0)).features[0]
    torch.testing.assert_close(ours.features(hidden(), k), expected, atol=1e-5, rtol=0)


def test_padding_never_wins():
    """Concept rows past the last concept hold whatever training left there."""
    ours, _ = heads(False, None)
    ours.predictor.weight[CONCEPTS:] = 100 * torch.sign(hidden(1))
    ids, _ = ours.top_k(hidden(1), CONCEPTS)
    assert sorted(ids[0].tolist()) == list(range(CONCEPTS))


def test_logits_are_clamped_as_in_the_package_and_clamped_ones_tie_to_the_lowest_id():
    ours, theirs = heads(False, None, slice_size=8)
    wide = 1000 * hidden(3)
    ids, logits = ours.top_k(wide, 8)
    expected = theirs.compute_logits_for_indices(wide, torch.arange(CONCEPTS).expand(3, -1))
    for row in range(3):
        tied = (expected[row] == 15).nonzero().flatten().tolist()
        assert len(tied) > 8
        assert ids[row].tolist() == tied[:8]
    assert (logits == 15).all()


def test_ranking_puts_larger_scores_first_and_equal_ones_by_id():
    scores = torch.tensor([[0.0, -0.0, 3.0, -1.0, 3.0, float("-inf"), float("inf"), -2.5, 1e-40, -1e-40]])
    assert top_k_lowest_id(scores, 10)[0].tolist() == [6, 2, 4, 8, 0, 1, 9, 3, 7, 5]
    assert ids_of_keys(ranking_keys(scores, 100)).tolist() == [list(range(100, 110))]
