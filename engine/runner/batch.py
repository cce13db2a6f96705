"""The seam between plan and device: planned rows become tensors of static shape.

Shapes: R rows (a bucket's worth), B blocks in the longest page table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..scheduling import PlannedRow, RowKind


@dataclass(frozen=True, slots=True)
class Batch:
    """One pass's rows on the device. Denoise rows come first, so that logits are made for them alone."""

    rows: tuple[PlannedRow, ...]
    """What each row stands for, in the tensors' order."""
    num_denoise: int
    num_picks: int
    """Most commits of any row in this pass."""
    num_logprobs: int
    """Most top_logprobs asked for by any row."""
    lane_R: Tensor
    block_R: Tensor
    page_R: Tensor
    """The page each row writes."""
    page_table_RB: Tensor
    """Page of each block in order; past a row's own block, its own page again (masked by key_length)."""
    key_length_R: Tensor
    quota_R: Tensor
    """Commits of each row; 0 for prefill and seal rows."""


def make_batch(rows: tuple[PlannedRow, ...], num_logprobs: int, device: torch.device) -> Batch:
    """Tensors (int64) for the rows of a plan; at least one row."""
    ordered = tuple(sorted(rows, key=lambda row: row.kind is not RowKind.DENOISE))
    num_blocks = max(len(row.page_ids) for row in ordered)
    tables = [row.page_ids + (row.page_ids[-1],) * (num_blocks - len(row.page_ids)) for row in ordered]

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)

    return Batch(
        rows=ordered,
        num_denoise=sum(row.kind is RowKind.DENOISE for row in ordered),
        num_picks=max(row.num_commits for row in ordered),
        num_logprobs=num_logprobs,
        lane_R=tensor([row.lane for row in ordered]),
        block_R=tensor([row.block for row in ordered]),
        page_R=tensor([row.page_ids[row.block] for row in ordered]),
        page_table_RB=torch.tensor(tables, dtype=torch.int64).to(device, non_blocking=True),
        key_length_R=tensor([row.key_length for row in ordered]),
        quota_R=tensor([row.num_commits for row in ordered]),
    )
