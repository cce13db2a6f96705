"""Captured passes: one CUDA graph per bucket of rows and length of page table.

A graph reads its rows from a static buffer and leaves its commits in static tensors. Whatever else a pass needs it
finds in the lanes, so no mix of phases, steering, attribution or sampling ever needs another graph.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from .batch import Batch, RowTensors, pack_rows, packed_size
from .passes import Canvas, Decision, PassProgram

logger = logging.getLogger(__name__)

_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True, slots=True)
class _Captured:
    """One bucket's graphs over the same input buffer."""

    inputs: Tensor
    rows: RowTensors
    forward: torch.cuda.CUDAGraph
    """The layers alone."""
    canvas: Canvas
    full: torch.cuda.CUDAGraph
    """Layers, then one commit a row."""
    decision: Decision


def row_buckets(max_rows: int) -> tuple[int, ...]:
    """Numbers of rows that get a graph; the last one is `max_rows`."""
    return (*(bucket for bucket in _BUCKETS if bucket < max_rows), max_rows)


class GraphedPasses:
    """Runs passes by replaying graphs; the slow twin is calling the PassProgram itself."""

    def __init__(
        self, program: PassProgram, *, max_rows: int, table_lengths: tuple[int, ...], scratch_page: int
    ) -> None:
        """Capture every graph. `table_lengths` ascend; the last is the longest page table there can be."""
        self._program = program
        self._scratch_page = scratch_page
        self._table_lengths = table_lengths
        self._buckets = row_buckets(max_rows)
        self._pool = torch.cuda.graph_pool_handle()
        started = time.monotonic()
        # The largest first, so that the others fit into the memory it leaves in the pool.
        self._captured = {
            (num_rows, table_length): self._capture(num_rows, table_length)
            for num_rows in reversed(self._buckets)
            for table_length in reversed(table_lengths)
        }
        logger.info("captured %d graphs in %.1f s", 2 * len(self._captured), time.monotonic() - started)

    def run(self, batch: Batch) -> Decision | None:
        """Run a pass; the decision's tensors are overwritten by the next one. None if no row denoises."""
        num_rows = next(bucket for bucket in self._buckets if bucket >= len(batch.rows))
        table_length = next(length for length in self._table_lengths if length >= batch.num_pages)
        captured = self._captured[num_rows, table_length]
        packed = pack_rows(
            batch,
            num_rows,
            table_length,
            idle_lane=self._program.lanes.idle_lane,
            scratch_page=self._scratch_page,
        )
        # Pinned anew for each pass: the copy may still wait behind the pass before.
        captured.inputs.copy_(packed.pin_memory(), non_blocking=True)
        if batch.num_picks == 1:
            captured.full.replay()
            return captured.decision
        captured.forward.replay()
        if batch.num_denoise == 0:
            return None
        # Several commits a row are rare and would need a graph for each number of them.
        return self._program.decide(captured.rows, captured.canvas, batch.num_denoise, batch.num_picks)

    def _capture(self, num_rows: int, table_length: int) -> _Captured:
        program = self._program
        idle = pack_rows(
            Batch((), 0, 0, 0, 0),
            num_rows,
            table_length,
            idle_lane=program.lanes.idle_lane,
            scratch_page=self._scratch_page,
        )
        assert len(idle) == packed_size(num_rows, table_length)
        inputs = idle.to(program.lanes.device)
        rows = RowTensors.unpack(inputs, num_rows)
        stream = torch.cuda.Stream(program.lanes.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Compiles kernels and lets libraries allocate before the capture forbids it.
            program.decide(rows, program.forward(rows), num_rows, 1)
        torch.cuda.current_stream().wait_stream(stream)
        forward, full = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward, pool=self._pool):
            canvas = program.forward(rows)
        with torch.cuda.graph(full, pool=self._pool):
            decision = program.decide(rows, program.forward(rows), num_rows, 1)
        return _Captured(inputs, rows, forward, canvas, full, decision)
