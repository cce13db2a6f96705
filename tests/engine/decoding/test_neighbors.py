"""Concepts that point alike, found slice by slice and all at once."""

from __future__ import annotations

import pytest
import torch

from engine.decoding.neighbors import nearest_concepts, nearest_concepts_dense
from engine.model.concept_heads import ConceptHead
from engine.model.weights import load_model
from tests.checkpoints import RECIPES


def make_head(*, rank: int | None, num_concepts: int = 50, slice_size: int = 7) -> ConceptHead:
    head = ConceptHead(
        num_concepts, 16, use_attention=True, rank=rank, pad_multiple=8, slice_size=slice_size
    ).requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    for parameter in head.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return head


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_slices_find_what_a_dense_computation_finds_on_every_checkpoint(recipe, checkpoint):
    model = load_model(checkpoint(recipe), device=torch.device("cpu"), dtype=torch.float32)
    for head in filter(None, (model.known_head, model.discovered_head)):
        for concept_id in (0, 7, head.num_concepts - 1):
            found, expected = nearest_concepts(head, concept_id, 12), nearest_concepts_dense(head, concept_id, 12)
            assert found[0].tolist() == expected[0].tolist()
            torch.testing.assert_close(found[1], expected[1])
            assert concept_id not in found[0].tolist()


@pytest.mark.parametrize("rank", [None, 4])
@pytest.mark.parametrize("slice_size", [1, 7, 50, 1000])
@pytest.mark.parametrize("k", [0, 1, 49, 50, 1000])
def test_any_slice_and_any_number_give_the_same(rank, slice_size, k):
    head = make_head(rank=rank, slice_size=slice_size)
    found, expected = nearest_concepts(head, 13, k), nearest_concepts_dense(head, 13, k)
    assert found[0].tolist() == expected[0].tolist() and len(found[0]) == min(k, 49)
    torch.testing.assert_close(found[1], expected[1])


def test_the_nearest_is_what_points_the_same_way_however_long_it_is():
    head = make_head(rank=None)
    table = head.embedding_table.weight
    table[31] = 100 * table[5]
    table[40] = -table[5]
    ids, cosines = nearest_concepts(head, 5, 49)
    assert (ids[0], ids[-1]) == (31, 40)
    assert cosines[[0, -1]].tolist() == pytest.approx([1, -1], abs=1e-6)


def test_equal_ones_come_by_their_ids_and_padding_never_comes():
    head = make_head(rank=None, slice_size=3)
    head.embedding_table.weight[:] = 1.0
    ids, _ = nearest_concepts(head, 2, 5)
    assert ids.tolist() == [0, 1, 3, 4, 5]
    assert nearest_concepts(head, 2, 1000)[0].max() == 49


def test_a_concept_without_an_embedding_is_near_nothing():
    head = make_head(rank=None)
    head.embedding_table.weight[4] = 0.0
    _, cosines = nearest_concepts(head, 4, 3)
    assert cosines.tolist() == [0.0, 0.0, 0.0]
