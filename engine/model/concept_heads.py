"""Known and discovered concept heads: which concepts a hidden state activates, and their embeddings.

A head gives each concept an embedding and each hidden state a logit per concept. Both come in two forms, and
every pair works: embeddings dense or a low-rank product, logits from a linear predictor or from a query against
the embeddings. All four reduce to `logit = query . table[concept] * scale`, clamped, so one top-k serves them all.

Shapes: M hidden states, D model width, N concepts, Q query width, F width of a stored row (D, or the factor rank),
K concepts kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from .ranking import ids_of_keys, ranking_keys

_LOGITS_AT_ONCE = 2**23
"""Logits of all states together that a slice may hold beyond its own size: 96 MiB with their sorting keys."""
LOGIT_LIMIT = 15.0
"""Concept logits are clamped to plus or minus this, as in the reference."""


def plain_product(x_MQ: Tensor, table_NQ: Tensor) -> Tensor:
    """x @ table.T as float32 [M, N]. Differentiable."""
    has_gradient = torch.is_grad_enabled() and (x_MQ.requires_grad or table_NQ.requires_grad)
    if x_MQ.is_cuda and x_MQ.dtype == table_NQ.dtype != torch.float32 and not has_gradient:
        # Rounding logits to bfloat16 would make ties of concepts that differ.
        return torch.mm(x_MQ, table_NQ.T, out_dtype=torch.float32)
    return x_MQ.float() @ table_NQ.T.float()


class ConceptHead(nn.Module):
    """Logits and embeddings of one set of concepts."""

    product: Callable[[Tensor, Tensor], Tensor]
    """x [M, Q] times the transpose of a table [N, Q], float32 [M, N]: `plain_product`, or one whose bits do not depend
    on M, which knows no gradients."""

    def __init__(
        self,
        num_concepts: int,
        width: int,
        *,
        use_attention: bool,
        rank: int | None,
        pad_multiple: int,
        slice_size: int,
    ) -> None:
        """`rank` None: dense embeddings. Rows are padded to `pad_multiple`; logits come `slice_size` at a time."""
        super().__init__()
        self.num_concepts = num_concepts
        self.slice_size = slice_size
        self.product = plain_product
        self.scale = 1.0 / math.sqrt(width) if use_attention else 1.0
        rows = -(-num_concepts // pad_multiple) * pad_multiple
        self.embedding_table: nn.Embedding | None = None
        self.coefficient: nn.Embedding | None = None
        self.basis: nn.Linear | None = None
        self.predictor: nn.Linear | None = None
        self.predictor_down: nn.Linear | None = None
        self.predictor_up: nn.Linear | None = None
        self.query: nn.Linear | None = None
        if rank is None:
            self.embedding_table = nn.Embedding(rows, width)
        else:
            self.coefficient = nn.Embedding(rows, rank)
            self.basis = nn.Linear(rank, width, bias=False)
        if use_attention:
            self.query = nn.Linear(width, width, bias=False)
        elif rank is None:
            self.predictor = nn.Linear(width, rows, bias=False)
        else:
            self.predictor_down = nn.Linear(width, rank, bias=False)
            self.predictor_up = nn.Linear(rank, rows, bias=False)

    def embedding(self, ids: Tensor) -> Tensor:
        """Embeddings of concepts: int64 [...] -> [..., D]."""
        return self._expand(self._stored(ids))

    def logits(self, hidden_MD: Tensor) -> Tensor:
        """Clamped logits of every concept, float32 logits_MN. Differentiable; mind the size of large heads."""
        return self._logits(self._query(hidden_MD), slice(0, self.num_concepts))

    def top_k(self, hidden_MD: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k concepts with the largest logits: int64 ids_MK, float32 logits_MK, best first, ties to the lowest id.

        Logits come `slice_size` at a time, or more where M is small, so memory is M * (slice_size + 2 k) or bounded.
        """
        k = min(k, self.num_concepts)
        query_MQ = self._query(hidden_MD)
        best_MK: Tensor | None = None
        # Each slice costs some ten kernels, which for a few states are all waiting and no work.
        for concepts in self._slices(max(self.slice_size, _LOGITS_AT_ONCE // max(hidden_MD.shape[0], 1))):
            keys = ranking_keys(self._logits(query_MQ, concepts), concepts.start)
            if best_MK is not None:
                keys = torch.cat((best_MK, keys), dim=-1)
            best_MK = keys.topk(min(k, keys.shape[-1]), dim=-1).values
        assert best_MK is not None
        ids_MK = ids_of_keys(best_MK)
        return ids_MK, self.logits_at(hidden_MD, ids_MK)

    def logits_at(self, hidden_MD: Tensor, ids_MK: Tensor) -> Tensor:
        """Clamped logits of chosen concepts, float32 logits_MK."""
        query_MQ = self._query(hidden_MD).float()
        rows_MKQ = F.embedding(ids_MK, self._table()).float()
        logits_MK = torch.einsum("mq,mkq->mk", query_MQ, rows_MKQ) * self.scale
        return logits_MK.clamp(-LOGIT_LIMIT, LOGIT_LIMIT)

    def logits_of(self, hidden_MD: Tensor, ids_K: Tensor) -> Tensor:
        """Clamped logits of the same concepts in every state, float32 logits_MK."""
        rows_KQ = F.embedding(ids_K, self._table()).float()
        logits_MK = self._query(hidden_MD).float() @ rows_KQ.T * self.scale
        return logits_MK.clamp(-LOGIT_LIMIT, LOGIT_LIMIT)

    def alignments(self, ids_MK: Tensor, vectors_MD: Tensor) -> Tensor:
        """Dot product of each concept's embedding with a vector, float32 [M, K]."""
        vectors_MF = vectors_MD.float() if self.basis is None else self.product(vectors_MD, self.basis.weight.T)
        return torch.einsum("mkf,mf->mk", self._stored(ids_MK).float(), vectors_MF)

    def features(self, hidden_MD: Tensor, k: int | None) -> Tensor:
        """Sum of weight * embedding over the top k concepts (None: all), features_MD in hidden's dtype."""
        if k is None:
            return self._all_features(hidden_MD).to(hidden_MD.dtype)
        ids_MK, logits_MK = self.top_k(hidden_MD, k)
        return self.mix(ids_MK, logits_MK.sigmoid()).to(hidden_MD.dtype)

    def mix(self, ids_MK: Tensor, weights_MK: Tensor) -> Tensor:
        """Sum of weight * embedding over each state's concepts, [M, D] in the embeddings' dtype."""
        stored_MKF = self._stored(ids_MK)
        return self._expand(torch.einsum("mk,mkf->mf", weights_MK.to(stored_MKF.dtype), stored_MKF))

    def _all_features(self, hidden_MD: Tensor) -> Tensor:
        query_MQ, stored_NF = self._query(hidden_MD), self._stored.weight
        total_MF = torch.zeros(hidden_MD.shape[0], stored_NF.shape[1], device=hidden_MD.device)
        # Sums depend on the slices, so these depend on nothing.
        for concepts in self._slices(self.slice_size):
            total_MF = total_MF + self._logits(query_MQ, concepts).sigmoid() @ stored_NF[concepts].float()
        return total_MF if self.basis is None else total_MF @ self.basis.weight.float().T

    @property
    def _stored(self) -> nn.Embedding:
        """One row a concept: its embedding, or its coefficients over the basis."""
        stored = self.coefficient if self.embedding_table is None else self.embedding_table
        assert stored is not None
        return stored

    def _expand(self, rows: Tensor) -> Tensor:
        """Embeddings of stored rows: [..., F] -> [..., D]."""
        return rows if self.basis is None else F.linear(rows, self.basis.weight)

    def _slices(self, size: int) -> Iterator[slice]:
        for start in range(0, self.num_concepts, size):
            yield slice(start, min(start + size, self.num_concepts))

    def _query(self, hidden_MD: Tensor) -> Tensor:
        """What is compared with the rows of `_table`: query_MQ."""
        if self.predictor is not None:
            return hidden_MD
        if self.predictor_down is not None:
            down: Tensor = self.predictor_down(hidden_MD)
            return down
        assert self.query is not None
        query: Tensor = self.query(hidden_MD)
        return query if self.basis is None else self.product(query, self.basis.weight.T).to(query.dtype)

    def _table(self) -> Tensor:
        """One row a concept, compared with the query: table_NQ, padding left off."""
        for module in (self.predictor, self.predictor_up, self.coefficient, self.embedding_table):
            if module is not None:
                return module.weight[: self.num_concepts]
        raise AssertionError("a concept head has a table")

    def _logits(self, query_MQ: Tensor, concepts: slice) -> Tensor:
        logits_MN = self.product(query_MQ, self._table()[concepts])
        return (logits_MN * self.scale).clamp(-LOGIT_LIMIT, LOGIT_LIMIT)


def make_known_head(config: ModelConfig) -> ConceptHead:
    """The supervised head of this config, with fresh weights."""
    concept = config.concept
    return ConceptHead(
        concept.n_concepts,
        config.n_embd,
        use_attention=concept.use_attention_known,
        rank=None,
        pad_multiple=concept.pad_multiple,
        slice_size=concept.block_size,
    )


def make_discovered_head(config: ModelConfig) -> ConceptHead | None:
    """The unsupervised head of this config, with fresh weights; None where the config has none."""
    concept = config.concept
    if not concept.use_discovered:
        return None
    return ConceptHead(
        concept.n_discovered,
        config.n_embd,
        use_attention=concept.use_attention_discovered,
        rank=concept.factorize_rank if concept.factorize_discovered else None,
        pad_multiple=concept.pad_multiple,
        slice_size=concept.block_size,
    )
