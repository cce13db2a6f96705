"""Which concepts point the same way: cosines of embeddings within one head.

Shapes: N concepts of a slice, D model width, K concepts returned.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..model.concept_heads import ConceptHead
from ..model.ranking import ids_of_keys, ranking_keys

_TINY = 1e-12


def nearest_concepts(head: ConceptHead, concept_id: int, k: int) -> tuple[Tensor, Tensor]:
    """The k concepts nearest to one, itself left out: int64 ids_K and float32 cosines_K, best first, ties to lower ids.

    Embeddings are made `slice_size` at a time, so memory does not grow with the head.
    """
    k = min(k, head.num_concepts - 1)
    own_1 = _ids(head, concept_id, concept_id + 1)
    own_D = _directions(head, own_1)[0]
    best_K = torch.empty(1, 0, dtype=torch.int64, device=own_D.device)
    for start in range(0, head.num_concepts, head.slice_size):
        ids_N = _ids(head, start, min(start + head.slice_size, head.num_concepts))
        cosines_N = _directions(head, ids_N) @ own_D
        cosines_N = cosines_N.masked_fill(ids_N == concept_id, -torch.inf)
        keys = torch.cat((best_K, ranking_keys(cosines_N[None], start)), dim=-1)
        best_K = keys.topk(min(k + 1, keys.shape[-1]), dim=-1).values
    ids_K = ids_of_keys(best_K)[0, :k]
    return ids_K, _directions(head, ids_K) @ own_D


def nearest_concepts_dense(head: ConceptHead, concept_id: int, k: int) -> tuple[Tensor, Tensor]:
    """The same from all embeddings at once."""
    directions_ND = _directions(head, _ids(head, 0, head.num_concepts))
    cosines_N = directions_ND @ directions_ND[concept_id]
    order_N = cosines_N.sort(descending=True, stable=True).indices
    ids_K = order_N[order_N != concept_id][:k]
    return ids_K, cosines_N[ids_K]


def _ids(head: ConceptHead, start: int, end: int) -> Tensor:
    table = head.coefficient if head.embedding_table is None else head.embedding_table
    assert table is not None
    return torch.arange(start, end, device=table.weight.device)


def _directions(head: ConceptHead, ids_N: Tensor) -> Tensor:
    """Unit embeddings, float32 [N, D]."""
    embeddings_ND = head.embedding(ids_N).float()
    lengths_N1: Tensor = embeddings_ND.norm(dim=-1, keepdim=True)
    return embeddings_ND / (lengths_N1 + _TINY)
