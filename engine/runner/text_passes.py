"""What analyses of text ask of the device: rows of texts through the layers, and what follows from hidden states.

The same layers and pages as a pass's, without lanes: nothing is chosen, steered or kept. Nothing here waits for the
device but `Readable.read`.

Shapes: R rows, C positions of a block, B blocks of a page table, M chosen positions, D model width, L layers,
V vocabulary, T top logprobs, K concepts, F fields of a packed result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from ..analysis import EmbeddingKind, TokenConcepts
from ..model.concept_heads import ConceptHead
from ..model.ranking import top_k_lowest_id
from ..model.steerling import SteerlingModel
from ..output import ConceptContribution
from .backend import Backend
from .batch import RowTensors
from .transfer import HostCopy, to_device

_VALUES_AT_ONCE = 2**25
"""Float32 values that a step over many positions may hold at once (128 MiB), a few times over."""
_NUM_FIELDS = 3

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRow:
    """One block of a text in a pass. It writes its last page, and attends to all of them below its key length."""

    block: int
    token_ids: tuple[int, ...]
    """C ids; past the key length any will do."""
    page_ids: tuple[int, ...]
    """Of blocks 0 to `block`. No two rows of a pass write one page."""
    key_length: int
    """Positions that exist for this row, counted from the text's first."""


@dataclass(frozen=True, slots=True)
class TokenScore:
    """What the model says of one position."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, logprob), best first."""


class Readable(Generic[T]):
    """Results on their way to the host, one for each position asked for."""

    def __init__(self, packed_MF: Tensor, unpack: Callable[[list[float]], T]) -> None:
        self._copy = HostCopy(packed_MF)
        self._unpack = unpack

    def read(self) -> list[T]:
        """The results, in order; waits for the device."""
        return [self._unpack(values) for values in self._copy.read().tolist()]


class TextPasses:
    """Runs rows of texts over the pages of an engine."""

    def __init__(
        self, model: SteerlingModel, backend: Backend, *, max_rows: int, filler_page: int, is_deterministic: bool
    ) -> None:
        """`filler_page` stands in page tables behind a row's own pages; nobody attends to it there.

        `is_deterministic`: what is computed of one block, or one position, goes to the device in a size of its own, so
        that a library has no choice of kernels.
        """
        self.config = model.config
        self.max_rows = max_rows
        """Rows that a pass may have."""
        self._model = model
        self._backend = backend
        self._filler_page = filler_page
        self._is_deterministic = is_deterministic
        self._device = model.transformer.lm_head.weight.device
        self._offset_C = torch.arange(self.config.diff_block_size, device=self._device)

    @torch.no_grad()
    def hidden(self, rows: list[TextRow]) -> Tensor:
        """Hidden states of at least one row, hidden_RCD; writes the rows' pages."""
        assert 0 < len(rows) <= self.max_rows, f"{len(rows)} rows in a pass of at most {self.max_rows}"
        num_rows, table_length = len(rows), max(len(row.page_ids) for row in rows)
        block_size = self.config.diff_block_size
        tables = [[*row.page_ids, *[self._filler_page] * (table_length - len(row.page_ids))] for row in rows]
        # One copy brings all.
        numbers = [
            (row.block, row.page_ids[-1], row.key_length, *table, *row.token_ids)
            for row, table in zip(rows, tables, strict=True)
        ]
        packed = to_device(numbers, torch.int64, self._device)
        block_R, page_R, key_length_R = packed[:, :_NUM_FIELDS].T.contiguous().unbind()
        table_RB = packed[:, _NUM_FIELDS : _NUM_FIELDS + table_length].contiguous()
        token_RC = packed[:, _NUM_FIELDS + table_length :].contiguous()
        nothing_R = torch.zeros_like(block_R)
        row_tensors = RowTensors(
            lane_R=nothing_R,
            block_R=block_R,
            page_R=page_R,
            key_length_R=key_length_R,
            quota_R=nothing_R,
            base_R=nothing_R,
            shadow_R=nothing_R,
            page_table_RB=table_RB,
        )
        # Masks in a text are no canvas: nothing is added to them.
        nothing_LRD = torch.zeros(self.config.n_layers, num_rows, self.config.n_embd, device=self._device)
        return self._backend.layers(
            row_tensors,
            token_RC,
            block_R[:, None] * block_size + self._offset_C,
            torch.zeros_like(token_RC, dtype=torch.bool),
            nothing_LRD,
        )

    @torch.no_grad()
    def at(self, hidden_RCD: Tensor, places: list[tuple[int, int]]) -> Tensor:
        """Hidden states of chosen (row, offset) places, hidden_MD."""
        place_M = [row * hidden_RCD.shape[1] + offset for row, offset in places]
        return hidden_RCD.flatten(0, 1)[to_device(place_M, torch.int64, self._device)]

    @torch.no_grad()
    def scores(
        self,
        hidden_MD: Tensor,
        token_ids: list[int],
        *,
        num_logprobs: int = 0,
        unconditional_MD: Tensor | None = None,
        cfg_scale: float = 0.0,
    ) -> Readable[TokenScore]:
        """Log-softmax of the raw logits at one token for each hidden state, padding excluded.

        With `unconditional_MD` the logits are guided: unconditional + (cfg_scale + 1) * (conditional - unconditional).
        """
        # Zeros fill the last part where all have to be of one size.
        num_absent = -len(token_ids) % self.config.diff_block_size if self._is_deterministic else 0
        token_M = to_device([*token_ids, *[0] * num_absent], torch.int64, self._device)
        hidden_MD = nn.functional.pad(hidden_MD, (0, 0, 0, num_absent))
        if unconditional_MD is not None:
            unconditional_MD = nn.functional.pad(unconditional_MD, (0, 0, 0, num_absent))
        parts = []
        for part in self._parts(len(token_M), self.config.vocab_size):
            logits_MV = self._logits(hidden_MD[part])
            if unconditional_MD is not None:
                without_MV = self._logits(unconditional_MD[part])
                logits_MV = without_MV + (cfg_scale + 1) * (logits_MV - without_MV)
            id_MT = top_k_lowest_id(logits_MV, num_logprobs) if num_logprobs else token_M.new_zeros(len(logits_MV), 0)
            value_MT = logits_MV.gather(1, torch.cat((token_M[part, None], id_MT), dim=1))
            logprob_MT = value_MT - logits_MV.logsumexp(dim=-1, keepdim=True)
            parts.append(torch.cat((logprob_MT.double(), id_MT.double()), dim=1))
        return Readable(torch.cat(parts)[: len(token_ids)], _token_score)

    @torch.no_grad()
    def add_features(self, total_D: Tensor | None, hidden_MD: Tensor, kind: EmbeddingKind) -> Tensor:
        """A sum over positions of one kind of features, float64 total_D; with what there was of it, one part by one."""
        concept = self.config.concept
        num_embeddings = max(concept.num_active_known, concept.num_reported_discovered)
        for part in self._parts(len(hidden_MD), num_embeddings * self.config.n_embd):
            part_D = self._features(hidden_MD[part], kind).double().sum(dim=0)
            total_D = part_D if total_D is None else total_D + part_D
        assert total_D is not None, "no position has features"
        return total_D

    def vector(self, sum_D: Tensor, count: int) -> Readable[float]:
        """sum_D / count, in float32, one number an entry."""
        return Readable((sum_D / count).float()[:, None], lambda values: values[0])

    @torch.no_grad()
    def top_concepts(self, hidden_MD: Tensor, token_ids: list[int], k: int) -> Readable[TokenConcepts]:
        """The k concepts of each head with the largest weights, and what each gives to the logit of the token."""
        token_M = to_device(token_ids, torch.int64, self._device)
        parts = []
        for part in self._parts(len(token_ids), k * self.config.n_embd):
            vector_MD = self._model.transformer.token_vectors_VD[token_M[part]]
            heads = [self._model.known_head, self._model.discovered_head]
            packed = [_top_of(head, hidden_MD[part], vector_MD, k) for head in heads if head is not None]
            parts.append(torch.cat(packed, dim=1))
        num_known = min(k, self._model.known_head.num_concepts)
        return Readable(torch.cat(parts), lambda values: _token_concepts(values, num_known))

    def _parts(self, num_positions: int, values_a_position: int) -> Iterator[slice]:
        size = max(_VALUES_AT_ONCE // max(values_a_position, 1), 1)
        if self._is_deterministic:
            size = self.config.diff_block_size
        for start in range(0, num_positions, size):
            yield slice(start, start + size)

    def _logits(self, hidden_MD: Tensor) -> Tensor:
        """Raw logits in float32, logits_MV."""
        return self._model.transformer.logits(self._model.compose(hidden_MD)).float()

    def _features(self, hidden_MD: Tensor, kind: EmbeddingKind) -> Tensor:
        model = self._model
        match kind:
            case "hidden":
                return hidden_MD
            case "composed":
                return model.compose(hidden_MD)
            case "known":
                return model.known_features(hidden_MD)
            case "discovered" if model.discovered_head is None:
                # All that the known concepts leave counts as discovered.
                return hidden_MD - model.known_features(hidden_MD)
            case "discovered":
                return model.discovered_features(hidden_MD)


def _token_score(values: list[float]) -> TokenScore:
    num_top = (len(values) - 1) // 2
    top = zip(map(int, values[1 + num_top :]), values[1 : 1 + num_top], strict=True)
    return TokenScore(values[0], tuple(top))


def _top_of(head: ConceptHead, hidden_MD: Tensor, vector_MD: Tensor, k: int) -> Tensor:
    """(id, weight, contribution) of each concept, packed_MF in float64."""
    id_MK, logit_MK = head.top_k(hidden_MD, k)
    weight_MK = logit_MK.sigmoid()
    contribution_MK = weight_MK * head.alignments(id_MK, vector_MD)
    return torch.stack((id_MK.double(), weight_MK.double(), contribution_MK.double()), dim=-1).flatten(1)


def _token_concepts(values: list[float], num_known: int) -> TokenConcepts:
    triples = zip(values[::3], values[1::3], values[2::3], strict=True)
    found = [ConceptContribution(int(id_), weight, amount) for id_, weight, amount in triples]
    return TokenConcepts(known=tuple(found[:num_known]), discovered=tuple(found[num_known:]))
