"""The seam between plan and device: planned rows become one tensor of static shape.

Shapes: R rows of a bucket, B blocks of a page table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..scheduling import PlannedRow, RowKind

_NUM_FIELDS = 7


@dataclass(frozen=True, slots=True)
class RowTensors:
    """One pass's rows on the device, all int64. Denoise rows, drafts and shadows come first, so that only they get
    logits."""

    lane_R: Tensor
    block_R: Tensor
    page_R: Tensor
    """The page each row writes."""
    key_length_R: Tensor
    quota_R: Tensor
    """Most commits of each row; 0 for rows that choose no tokens."""
    base_R: Tensor
    """For a draft, the row whose commit it counts on, which comes before it; for others the row itself."""
    shadow_R: Tensor
    """For a guided denoise row, the row of its unconditional copy; for others the row itself."""
    page_table_RB: Tensor
    """Page of each block in order; past a row's own block any page (masked by key_length)."""

    @classmethod
    def unpack(cls, packed: Tensor, num_rows: int) -> RowTensors:
        """Views of `pack_rows`' tensor, each contiguous."""
        fields = packed[: _NUM_FIELDS * num_rows].view(_NUM_FIELDS, num_rows)
        page_table_RB = packed[_NUM_FIELDS * num_rows :].view(num_rows, -1)
        lane_R, block_R, page_R, key_length_R, quota_R, base_R, shadow_R = fields.unbind()
        return cls(lane_R, block_R, page_R, key_length_R, quota_R, base_R, shadow_R, page_table_RB)


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of a pass in the order of their tensors, and what the host knows about them."""

    rows: tuple[PlannedRow, ...]
    num_denoise: int
    """Rows that need logits: denoise rows, then drafts, then shadows."""
    num_picks: int
    """Most picks of any row: its commits, and one more where it predicts."""
    predicts: bool
    """Drafts ride in the pass, or may ride in the next one: rows of their sequences predict their next commit."""
    alters: bool
    """Some logits are altered before anything is chosen from them: a row is guided."""
    num_pages: int
    """Length of the longest page table."""

    @property
    def bases(self) -> list[int]:
        """The row each row counts on: `RowTensors.base_R`."""
        denoised = {row.sequence.id: index for index, row in enumerate(self.rows) if row.kind is RowKind.DENOISE}
        is_draft = [row.kind is RowKind.DRAFT for row in self.rows]
        return [denoised[row.sequence.id] if is_draft[i] else i for i, row in enumerate(self.rows)]

    @property
    def shadows(self) -> list[int]:
        """The row that guides each row: `RowTensors.shadow_R`."""
        guiding = {row.lane: index for index, row in enumerate(self.rows) if row.kind is RowKind.SHADOW}
        return [i if row.shadow_lane is None else guiding[row.shadow_lane] for i, row in enumerate(self.rows)]


def make_batch(rows: tuple[PlannedRow, ...], draft_row_limit: int) -> Batch:
    """Order the rows of a plan, at least one: denoise rows first, then drafts, then shadows."""
    ordered = tuple(sorted(rows, key=lambda row: row.kind.value))
    choosing = [row for row in ordered if row.kind in (RowKind.DENOISE, RowKind.DRAFT, RowKind.SHADOW)]
    # A draft takes a row beside its base, and a canvas of one position has nothing to expect after its commit.
    has_room = len(ordered) <= draft_row_limit >= 2
    predicts = has_room and any(row.sequence.has_drafts and row.sequence.block_size > 1 for row in choosing)
    return Batch(
        rows=ordered,
        num_denoise=len(choosing),
        num_picks=max(int(predicts) + 1, *(row.num_commits for row in ordered)),
        predicts=predicts,
        alters=any(row.shadow_lane is not None for row in choosing),
        num_pages=max(len(row.page_ids) for row in ordered),
    )


def packed_size(num_rows: int, table_length: int) -> int:
    """Elements of `pack_rows`' tensor."""
    return num_rows * (_NUM_FIELDS + table_length)


def pack_rows(batch: Batch, num_rows: int, table_length: int, *, idle_lane: int, scratch_page: int) -> Tensor:
    """All of RowTensors in one flat int64 tensor on the host, so that one copy brings it to the device.

    Rows beyond the batch's fill the bucket: they stand on `idle_lane`, write to `scratch_page` and commit nothing.
    Each draft stands on a lane and writes a page of nobody, those that follow the idle lane and the scratch page.
    """
    num_idle = num_rows - len(batch.rows)
    drafts = (index for index, row in enumerate(batch.rows) if row.kind is RowKind.DRAFT)
    number_of = {index: number for number, index in enumerate(drafts, start=1)}
    lanes = [idle_lane + number_of[i] if i in number_of else row.lane for i, row in enumerate(batch.rows)]
    tables = [
        [*row.page_ids[:-1], scratch_page + number_of[i]] if i in number_of else list(row.page_ids)
        for i, row in enumerate(batch.rows)
    ]
    fields = [
        lanes + [idle_lane] * num_idle,
        [row.block for row in batch.rows] + [0] * num_idle,
        [table[-1] for table in tables] + [scratch_page] * num_idle,
        [row.key_length for row in batch.rows] + [1] * num_idle,
        [row.num_commits for row in batch.rows] + [0] * num_idle,
        [*batch.bases, *range(len(batch.rows), num_rows)],
        [*batch.shadows, *range(len(batch.rows), num_rows)],
    ]
    tables = [table + [scratch_page] * (table_length - len(table)) for table in tables]
    tables += [[scratch_page] * table_length] * num_idle
    return torch.tensor([value for part in (*fields, *tables) for value in part], dtype=torch.int64)
