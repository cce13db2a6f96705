"""Known and discovered concept heads: which concepts a hidden state activates, and their embeddings.

A head has an embedding per concept and a score per concept. Both come in two forms, and every pair works:
embeddings dense or a low-rank product, scores from a linear predictor or from a query against the embeddings.
All four reduce to `score = query . table[concept] * scale`, clamped, so one top-k serves them all.

Shapes: M hidden states, D model width, N concepts, Q query width, F factor rank, K concepts kept.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ConceptConfig, ModelConfig
from .ranking import ids_of_keys, ranking_keys

LOGIT_LIMIT = 15.0
"""Concept logits are clamped to plus or minus this, as in the reference."""


class ConceptHead(nn.Module):
    """Scores and embeddings of one set of concepts."""

    def __init__(
        self,
        num_concepts: int,
        width: int,
        *,
        use_attention: bool,
        rank: int | None,
        pad_multiple: int,
        chunk_size: int,
    ) -> None:
        """`rank` None: dense embeddings. Rows are padded to `pad_multiple`; scores come `chunk_size` at a time."""
        super().__init__()
        self.num_concepts = num_concepts
        self.chunk_size = chunk_size
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
        if self.embedding_table is not None:
            embedding: Tensor = self.embedding_table(ids)
            return embedding
        assert self.coefficient is not None and self.basis is not None
        product: Tensor = self.basis(self.coefficient(ids))
        return product

    def logits(self, hidden_MD: Tensor) -> Tensor:
        """Clamped logits of every concept, float32 logits_MN. Differentiable; mind the size of large heads."""
        return self._scores(self._query(hidden_MD), slice(0, self.num_concepts))

    def top_k(self, hidden_MD: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k concepts with the largest logits: int64 ids_MK, float32 logits_MK, best first, ties to the lowest id.

        Concepts are scored `chunk_size` at a time, so memory is M * (chunk_size + 2 k).
        """
        k = min(k, self.num_concepts)
        query_MQ = self._query(hidden_MD)
        best_MK: Tensor | None = None
        for start in range(0, self.num_concepts, self.chunk_size):
            stop = min(start + self.chunk_size, self.num_concepts)
            keys = ranking_keys(self._scores(query_MQ, slice(start, stop)), start)
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
        scores_MK = torch.einsum("mq,mkq->mk", query_MQ, rows_MKQ) * self.scale
        return scores_MK.clamp(-LOGIT_LIMIT, LOGIT_LIMIT)

    def alignments(self, ids_MK: Tensor, vectors_MD: Tensor) -> Tensor:
        """Dot product of each concept's embedding with a vector, float32 [M, K]."""
        vectors_MD = vectors_MD.float()
        if self.embedding_table is not None:
            return torch.einsum("mkd,md->mk", self.embedding_table(ids_MK).float(), vectors_MD)
        assert self.coefficient is not None and self.basis is not None
        vectors_MF = vectors_MD @ self.basis.weight.float()
        return torch.einsum("mkf,mf->mk", self.coefficient(ids_MK).float(), vectors_MF)

    def features(self, hidden_MD: Tensor, k: int | None) -> Tensor:
        """Sum of weight * embedding over the top k concepts (None: all), features_MD in hidden's dtype."""
        if k is None:
            return self._all_features(hidden_MD).to(hidden_MD.dtype)
        ids_MK, logits_MK = self.top_k(hidden_MD, k)
        weights_MK = logits_MK.sigmoid()
        if self.embedding_table is not None:
            embedding_MKD = self.embedding_table(ids_MK)
            features = torch.einsum("mk,mkd->md", weights_MK.to(embedding_MKD.dtype), embedding_MKD)
        else:
            assert self.coefficient is not None and self.basis is not None
            coefficient_MKF = self.coefficient(ids_MK)
            features = self.basis(torch.einsum("mk,mkf->mf", weights_MK.to(coefficient_MKF.dtype), coefficient_MKF))
        return features.to(hidden_MD.dtype)

    def _all_features(self, hidden_MD: Tensor) -> Tensor:
        query_MQ = self._query(hidden_MD)
        table = self.embedding_table if self.embedding_table is not None else self.coefficient
        assert table is not None
        total = torch.zeros(hidden_MD.shape[0], table.weight.shape[1], device=hidden_MD.device)
        for start in range(0, self.num_concepts, self.chunk_size):
            chunk = slice(start, min(start + self.chunk_size, self.num_concepts))
            total = total + self._scores(query_MQ, chunk).sigmoid() @ table.weight[chunk].float()
        return total if self.basis is None else total @ self.basis.weight.float().T

    def _query(self, hidden_MD: Tensor) -> Tensor:
        """What is compared with the rows of `_table`: query_MQ."""
        if self.predictor is not None:
            return hidden_MD
        if self.predictor_down is not None:
            down: Tensor = self.predictor_down(hidden_MD)
            return down
        assert self.query is not None
        query: Tensor = self.query(hidden_MD)
        return query if self.basis is None else query @ self.basis.weight

    def _table(self) -> Tensor:
        """One row a concept, compared with the query: table_NQ, padding left off."""
        for module in (self.predictor, self.predictor_up, self.coefficient, self.embedding_table):
            if module is not None:
                return module.weight[: self.num_concepts]
        raise AssertionError("a concept head has a table")

    def _scores(self, query_MQ: Tensor, chunk: slice) -> Tensor:
        table = self._table()[chunk]
        if query_MQ.is_cuda and query_MQ.dtype != torch.float32 and not query_MQ.requires_grad:
            # Rounding scores to bfloat16 would make ties of concepts that differ.
            scores = torch.mm(query_MQ, table.T, out_dtype=torch.float32)
        else:
            scores = query_MQ.float() @ table.T.float()
        return (scores * self.scale).clamp(-LOGIT_LIMIT, LOGIT_LIMIT)


def make_known_head(config: ModelConfig) -> ConceptHead:
    """The supervised head of this config, with fresh weights."""
    concept = config.concept
    return ConceptHead(
        concept.n_concepts,
        config.n_embd,
        use_attention=concept.use_attention_known,
        rank=None,
        pad_multiple=concept.pad_multiple,
        chunk_size=concept.block_size,
    )


def make_discovered_head(config: ModelConfig) -> ConceptHead | None:
    """The unsupervised head of this config, with fresh weights; None where the config has none."""
    concept: ConceptConfig = config.concept
    if not concept.use_discovered:
        return None
    return ConceptHead(
        concept.n_discovered,
        config.n_embd,
        use_attention=concept.use_attention_discovered,
        rank=concept.factorize_rank if concept.factorize_discovered else None,
        pad_multiple=concept.pad_multiple,
        chunk_size=concept.block_size,
    )
