"""The seam between plan and device: planned rows become one tensor of static shape.

Shapes: R rows of a bucket, B blocks of a page table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..scheduling import PlannedRow, RowKind

_NUM_FIELDS = 5


@dataclass(frozen=True, slots=True)
class RowTensors:
    """One pass's rows on the device, all int64. Denoise rows come first, so that logits are made for them alone."""

    lane_R: Tensor
    block_R: Tensor
    page_R: Tensor
    """The page each row writes."""
    key_length_R: Tensor
    quota_R: Tensor
    """Commits of each row; 0 for rows that do not denoise."""
    page_table_RB: Tensor
    """Page of each block in order; past a row's own block any page (masked by key_length)."""

    @classmethod
    def unpack(cls, packed: Tensor, num_rows: int) -> RowTensors:
        """Views of `pack_rows`' tensor, each contiguous."""
        fields = packed[: _NUM_FIELDS * num_rows].view(_NUM_FIELDS, num_rows)
        lane_R, block_R, page_R, key_length_R, quota_R = fields.unbind()
        page_table_RB = packed[_NUM_FIELDS * num_rows :].view(num_rows, -1)
        return cls(lane_R, block_R, page_R, key_length_R, quota_R, page_table_RB)


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of a pass in the order of their tensors, and what the host knows about them."""

    rows: tuple[PlannedRow, ...]
    num_denoise: int
    num_picks: int
    """Most commits of any row."""
    num_logprobs: int
    """Most top_logprobs that any row's request asks for."""
    num_pages: int
    """Length of the longest page table."""


def make_batch(rows: tuple[PlannedRow, ...], num_logprobs: int) -> Batch:
    """Order the rows of a plan, at least one: denoise rows first."""
    ordered = tuple(sorted(rows, key=lambda row: row.kind is not RowKind.DENOISE))
    return Batch(
        rows=ordered,
        num_denoise=sum(row.kind is RowKind.DENOISE for row in ordered),
        num_picks=max(row.num_commits for row in ordered),
        num_logprobs=num_logprobs,
        num_pages=max(len(row.page_ids) for row in ordered),
    )


def packed_size(num_rows: int, table_length: int) -> int:
    """Elements of `pack_rows`' tensor."""
    return num_rows * (_NUM_FIELDS + table_length)


def pack_rows(batch: Batch, num_rows: int, table_length: int, *, idle_lane: int, scratch_page: int) -> Tensor:
    """All of RowTensors in one flat int64 tensor on the host, so that one copy brings it to the device.

    Rows beyond the batch's fill the bucket: they stand on `idle_lane`, write to `scratch_page` and commit nothing.
    """
    num_idle = num_rows - len(batch.rows)
    fields = [
        [row.lane for row in batch.rows] + [idle_lane] * num_idle,
        [row.block for row in batch.rows] + [0] * num_idle,
        [row.page_ids[row.block] for row in batch.rows] + [scratch_page] * num_idle,
        [row.key_length for row in batch.rows] + [1] * num_idle,
        [row.num_commits for row in batch.rows] + [0] * num_idle,
    ]
    tables = [list(row.page_ids) + [scratch_page] * (table_length - len(row.page_ids)) for row in batch.rows]
    tables += [[scratch_page] * table_length] * num_idle
    return torch.tensor([value for part in (*fields, *tables) for value in part], dtype=torch.int64)
