"""Which rows ride in the next pass: a pure choice among running sequences within a budget.

Knows sequences and the budget. Must not know pools, lanes or the queue; changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .plan import PlannedRow, RowKind
from .sequence import Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBudget:
    """What one pass may carry."""

    max_rows: int
    """Rows of all kinds; at least 2, since a seal row and the next denoise row go together."""
    max_prefill_rows: int
    """Prefill rows; at least 1."""
    num_reserved: int
    """Rows kept from decoding sequences for prefill, 0 or 1."""
    share_prefixes: bool
    """Equal blocks are computed once: a sequence waits a pass for a page that another one is writing."""


def choose_rows(running: Iterable[Sequence], budget: RowBudget) -> tuple[PlannedRow, ...]:
    """The next pass's rows: decoding sequences first, then prefill; returned in the order of kinds.

    `running` is in order of service, and every sequence has its pages up to the canvas. Decoding
    sequences are taken by priority and, within one, by their place in line, so they take turns
    when rows are short. One whose rows do not fit waits while smaller ones pass it, and is
    ahead of them in the next pass. Prefill goes by order of service, several blocks at a time.
    """
    running = list(running)
    decoding = sorted((s for s in running if not s.is_prefilling), key=lambda s: (s.priority, s.last_turn, s.arrival))
    rows: list[PlannedRow] = []
    for sequence in decoding:
        new_rows = decode_rows(sequence)
        if len(rows) + len(new_rows) <= budget.max_rows - budget.num_reserved:
            rows += new_rows
    rows += _prefill_rows([s for s in running if s.is_prefilling], budget, rows)
    return tuple(sorted(rows, key=lambda row: row.kind.value))


def decode_rows(sequence: Sequence) -> list[PlannedRow]:
    """The canvas's denoise row and, if the block before is finished but not sealed, its seal row."""
    canvas = sequence.block
    assert canvas - sequence.num_sealed in (0, 1), f"{sequence.id}: {sequence.num_sealed} sealed, canvas {canvas}"
    seal = [_row(sequence, RowKind.SEAL, b) for b in range(sequence.num_sealed, canvas)]
    return [*seal, _row(sequence, RowKind.DENOISE, canvas)]


def _prefill_rows(prefilling: list[Sequence], budget: RowBudget, taken: list[PlannedRow]) -> list[PlannedRow]:
    """Prefill rows in the room that is left, each sequence's canvas behind its last one if it fits."""
    rows: list[PlannedRow] = []
    num_prefill = 0
    written = {_shared_key(row) for row in taken if row.kind is RowKind.SEAL}
    for sequence in prefilling:
        for block in range(sequence.num_sealed, sequence.num_prefill_blocks):
            row = _row(sequence, RowKind.PREFILL, block)
            is_full = len(taken) + len(rows) == budget.max_rows or num_prefill == budget.max_prefill_rows
            is_written = budget.share_prefixes and _shared_key(row) in written
            if is_full or is_written:
                break
            written.add(_shared_key(row))
            rows.append(row)
            num_prefill += 1
        else:
            if len(taken) + len(rows) < budget.max_rows:
                rows.append(_row(sequence, RowKind.DENOISE, sequence.block))
    return rows


def _shared_key(row: PlannedRow) -> bytes:
    return row.sequence.prefix_key(row.block)


def _row(sequence: Sequence, kind: RowKind, block: int) -> PlannedRow:
    assert sequence.lane is not None and len(sequence.page_ids) > block, f"{sequence.id}: no page for block {block}"
    is_denoise = kind is RowKind.DENOISE
    return PlannedRow(
        sequence=sequence,
        kind=kind,
        block=block,
        lane=sequence.lane,
        page_ids=tuple(sequence.page_ids[: block + 1]),
        key_length=sequence.key_length(block),
        num_commits=min(sequence.tokens_per_step, sequence.num_masked(block)) if is_denoise else 0,
    )
