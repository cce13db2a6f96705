"""Captured passes: CUDA graphs of the layers and of the choice of tokens, one of each for a bucket of rows.

A pass replays two: the layers', for its length of page table, and the choice's, for its number of picks a row. They
meet in a canvas that all buckets share, as they share the logits. Passes with guided rows have choices of their own, so
that others do not carry what guidance takes. Whatever else a pass needs it finds in the lanes, so no mix of phases,
steering, attribution, policies or sampling ever needs another graph. Only where a row sets concept weights is the
choice made kernel by kernel, because what is to be done then differs from request to request.

Shapes: R rows, C canvas positions, D model width, W padded vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from ..decoding.overrides import OverridePlan
from .batch import Batch, RowTensors, pack_rows, packed_size
from .passes import Canvas, Decision, PassProgram

logger = logging.getLogger(__name__)

_BUCKETS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_FEW_PICKS = 8

T = TypeVar("T")
_Graph = torch.cuda.CUDAGraph


@dataclass(frozen=True, slots=True)
class _Layers:
    """The layers of a bucket at one length of page table, over their own input buffer."""

    inputs: Tensor
    graph: _Graph


@dataclass(frozen=True, slots=True)
class _Bucket:
    """All that is captured for one number of rows."""

    fields: Tensor
    """The rows' fields without their page tables, which the choice reads."""
    layers: dict[tuple[int, bool], _Layers] = field(default_factory=dict)
    """By length of page table, and whether there may be drafts."""
    choices: dict[tuple[int, bool, bool], tuple[_Graph, Decision]] = field(default_factory=dict)
    """By picks a row, whether rows predict, and whether logits are altered."""


def row_buckets(max_rows: int) -> tuple[int, ...]:
    """Numbers of rows that get a graph; the last one is `max_rows`."""
    return (*(bucket for bucket in _BUCKETS if bucket < max_rows), max_rows)


def drafting_buckets(buckets: tuple[int, ...], draft_row_limit: int) -> frozenset[int]:
    """The buckets that a pass with drafts may need: those of up to `draft_row_limit` rows."""
    return frozenset(_first_at_least(buckets, rows) for rows in range(2, min(draft_row_limit, buckets[-1]) + 1)) | (
        frozenset({1}) if draft_row_limit >= 2 else frozenset()
    )


class GraphedPasses:
    """Runs passes by replaying graphs; the slow twin is calling the PassProgram itself."""

    def __init__(
        self,
        program: PassProgram,
        *,
        max_rows: int,
        draft_row_limit: int,
        table_lengths: tuple[int, ...],
        scratch_page: int,
    ) -> None:
        """Capture every graph. `table_lengths` ascend; the last is the longest page table there can be."""
        self._program = program
        self._scratch_page = scratch_page
        self._table_lengths = table_lengths
        block_size = program.config.diff_block_size
        self._picks = tuple(sorted({1, min(_FEW_PICKS, block_size), block_size}))
        self._rows = row_buckets(max_rows)
        self._drafting = drafting_buckets(self._rows, draft_row_limit)
        self._pool = torch.cuda.graph_pool_handle()
        # One for all: libraries keep a workspace for each stream.
        self._stream = torch.cuda.Stream(program.lanes.device)  # type: ignore[no-untyped-call]
        self._canvas = self._make_canvas(max_rows)
        width = program.model.transformer.lm_head.weight.shape[0]
        self._logits_RCW = self._canvas.hidden_RCD.new_zeros(max_rows, block_size, width)
        started = time.monotonic()
        # The largest first, so that the others fit into the memory it leaves in the pool.
        self._buckets = {num_rows: self._capture_bucket(num_rows) for num_rows in reversed(self._rows)}
        num_graphs = sum(len(bucket.layers) + len(bucket.choices) for bucket in self._buckets.values())
        logger.info("captured %d graphs in %.1f s", num_graphs, time.monotonic() - started)

    def run(self, batch: Batch, overrides: Mapping[int, OverridePlan]) -> Decision | None:
        """Run a pass; the decision's tensors are overwritten by a later one. None if no row chooses tokens.

        `overrides`: the concept weights that rows set, by row.
        """
        num_rows = _first_at_least(self._rows, len(batch.rows))
        table_length = _first_at_least(self._table_lengths, batch.num_pages)
        bucket = self._buckets[num_rows]
        layers = bucket.layers[table_length, batch.predicts]
        packed = self._pack(batch, num_rows, table_length)
        # Pinned anew for each pass: the copy may still wait behind the pass before.
        layers.inputs.copy_(packed.pin_memory(), non_blocking=True)
        layers.graph.replay()
        if batch.num_denoise == 0:
            return None
        num_picks = _first_at_least(self._picks_for(batch.predicts, batch.alters), batch.num_picks)
        if overrides:
            # With the very shapes of the graph, for which all kernels are compiled.
            return self._decide(bucket.fields, num_rows, num_picks, batch.predicts, batch.alters, overrides)
        graph, decision = bucket.choices[num_picks, batch.predicts, batch.alters]
        graph.replay()
        return decision

    def _picks_for(self, predicts: bool, alters: bool) -> tuple[int, ...]:
        few = {2} if predicts else {1} if alters else set(self._picks)
        return tuple(sorted(few | {self._picks[-1]}))

    def _capture_bucket(self, num_rows: int) -> _Bucket:
        program, device = self._program, self._program.lanes.device
        canvas = self._canvas.first(num_rows)
        idle = Batch((), num_denoise=0, num_picks=0, predicts=False, alters=False, num_pages=0)
        fields = self._pack(idle, num_rows, 0).to(device)
        bucket = _Bucket(fields)
        modes = (False, True) if num_rows in self._drafting else (False,)
        for predicts in modes:
            for table_length in reversed(self._table_lengths):
                inputs = self._pack(idle, num_rows, table_length).to(device)
                rows = RowTensors.unpack(inputs, num_rows)

                def layers(rows: RowTensors = rows, inputs: Tensor = inputs, predicts: bool = predicts) -> None:
                    fields.copy_(inputs[: packed_size(num_rows, 0)])
                    canvas.copy_(program.forward(rows, predicts=predicts))

                bucket.layers[table_length, predicts] = _Layers(inputs, self._capture(layers)[0])
            for alters in (False, True):
                for num_picks in self._picks_for(predicts, alters):

                    def choice(
                        num_picks: int = num_picks, predicts: bool = predicts, alters: bool = alters
                    ) -> Decision:
                        return self._decide(fields, num_rows, num_picks, predicts, alters)

                    bucket.choices[num_picks, predicts, alters] = self._capture(choice)
        return bucket

    def _decide(
        self,
        fields: Tensor,
        num_rows: int,
        num_picks: int,
        predicts: bool,
        alters: bool,
        overrides: Mapping[int, OverridePlan] | None = None,
    ) -> Decision:
        return self._program.decide(
            RowTensors.unpack(fields, num_rows),
            self._canvas.first(num_rows),
            num_rows,
            num_picks,
            predicts=predicts,
            alters=alters,
            logits_out=self._logits_RCW[:num_rows],
            overrides=overrides,
        )

    def _make_canvas(self, num_rows: int) -> Canvas:
        lanes, config = self._program.lanes, self._program.config
        shape = (num_rows, config.diff_block_size)
        return Canvas(
            hidden_RCD=torch.zeros(*shape, config.n_embd, dtype=lanes.hidden_NCD.dtype, device=lanes.device),
            position_RC=torch.zeros(shape, dtype=torch.int64, device=lanes.device),
            masked_RC=torch.zeros(shape, dtype=torch.bool, device=lanes.device),
        )

    def _pack(self, batch: Batch, num_rows: int, table_length: int) -> Tensor:
        return pack_rows(
            batch,
            num_rows,
            table_length,
            idle_lane=self._program.lanes.idle_lane,
            scratch_page=self._scratch_page,
        )

    def _capture(self, work: Callable[[], T]) -> tuple[_Graph, T]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Compiles kernels and lets libraries allocate before the capture forbids it.
            work()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = _Graph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result = work()
        return graph, result


def _first_at_least(sizes: tuple[int, ...], number: int) -> int:
    return next(size for size in sizes if size >= number)
