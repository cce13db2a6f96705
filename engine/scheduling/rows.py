"""Which rows ride in the next pass: a pure choice among running sequences within a budget.

Knows sequences, what of them is in flight, and the budget. Must not know pools, lanes or the queue; changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .plan import PlannedRow, RowKind
from .sequence import Sequence

_WRITING = (RowKind.SEAL, RowKind.PREFILL)


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
    """Equal blocks are computed once: a sequence waits for a page that another one is writing."""
    is_lockstep: bool
    """No sequence begins a canvas while another one has begun and not finished its own."""
    draft_row_limit: int
    """Drafts ride only in passes that have no more rows than this with them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """Where a sequence will stand once the passes in flight are done, as far as that is certain now."""

    sequence: Sequence
    num_sealed: int
    """Leading blocks whose final keys and values are on their pages by then."""
    canvas: int
    """The block to denoise next."""
    num_masked: int
    """Most positions of that canvas that can still be masked. 0: the text has ended, which the results will tell."""
    has_begun: bool
    """That canvas has had a denoising step, or one of it is in flight."""

    @property
    def is_prefilling(self) -> bool:
        """True while blocks finished before the lane was given still need rows."""
        return self.num_sealed < self.sequence.num_prefill_blocks


def look_ahead(sequence: Sequence, in_flight: Iterable[PlannedRow]) -> Outlook:
    """The outlook of a running sequence, given its rows whose results are not known yet.

    A block ends for certain when its last masked positions are committed for certain; the text may end sooner, at a
    token that nobody has read yet. Then what was planned beyond it is dropped with the sequence.
    """
    num_sealed = sequence.num_sealed
    canvas = sequence.block
    num_masked, has_begun = sequence.num_masked(sequence.block), sequence.has_begun_canvas
    for row in in_flight:
        if row.kind is RowKind.DRAFT:
            continue
        if row.kind is not RowKind.DENOISE or row.block < sequence.block:
            # A denoise row that found no masks has written final keys and values.
            num_sealed += 1
            continue
        assert row.block == canvas, f"{sequence.id}: block {row.block} is in flight, the canvas is {canvas}"
        num_masked, has_begun = num_masked - row.num_certain_commits, True
        if num_masked > 0:
            continue
        if sequence.end is not None or sequence.is_last(canvas):
            num_masked = 0
        else:
            canvas, has_begun = canvas + 1, False
            num_masked = sequence.num_masked(canvas)
    return Outlook(sequence=sequence, num_sealed=num_sealed, canvas=canvas, num_masked=num_masked, has_begun=has_begun)


def choose_rows(
    running: Iterable[Outlook], budget: RowBudget, in_flight: Iterable[PlannedRow] = ()
) -> tuple[PlannedRow, ...]:
    """The next pass's rows: decoding sequences first, then prefill; returned in the order of kinds.

    `running` is in order of service. Decoding sequences are taken by priority and, within one, by their place in line,
    so they take turns when rows are short. One whose rows do not fit waits while smaller ones pass it, and is ahead of
    them in the next pass. Prefill goes by order of service, several blocks at a time.
    """
    running = _in_step(running) if budget.is_lockstep else list(running)
    decoding = [o for o in running if not o.is_prefilling]
    rows: list[PlannedRow] = []
    for outlook in sorted(decoding, key=lambda o: (o.sequence.priority, o.sequence.last_turn, o.sequence.arrival)):
        new_rows = decode_rows(outlook)
        if len(rows) + len(new_rows) <= budget.max_rows - budget.num_reserved:
            rows += new_rows
    being_written = {_shared_key(row) for row in [*rows, *in_flight] if row.kind in _WRITING}
    rows += _prefill_rows([o for o in running if o.is_prefilling], budget, len(rows), being_written)
    rows += _draft_rows(decoding, rows, budget)
    return tuple(sorted(rows, key=lambda row: row.kind.value))


def _in_step(running: Iterable[Outlook]) -> list[Outlook]:
    """Those that may have rows when all wait for the slowest at each block."""
    running = list(running)
    is_between = not any(o.has_begun for o in running)
    return [o for o in running if is_between or o.has_begun or o.is_prefilling]


def decode_rows(outlook: Outlook) -> list[PlannedRow]:
    """The canvas's denoise row and, if the block before is finished but not sealed, its seal row.

    None for a sequence that awaits results, of its text's last commits or before it gives up its pages.
    """
    sequence, canvas = outlook.sequence, outlook.canvas
    if outlook.num_masked == 0 or len(sequence.page_ids) == canvas:
        return []
    assert canvas - outlook.num_sealed in (0, 1), f"{sequence.id}: {outlook.num_sealed} sealed, canvas {canvas}"
    seal = [_write_row(sequence, RowKind.SEAL, b) for b in range(outlook.num_sealed, canvas)]
    return [*seal, _denoise_row(outlook)]


def _prefill_rows(
    prefilling: list[Outlook], budget: RowBudget, num_taken: int, being_written: set[bytes | None]
) -> list[PlannedRow]:
    """Prefill rows in the room that is left, each sequence's canvas behind its last one if it fits."""
    rows: list[PlannedRow] = []
    num_prefill = 0
    for outlook in prefilling:
        sequence = outlook.sequence
        for block in range(outlook.num_sealed, sequence.num_prefill_blocks):
            row = _write_row(sequence, RowKind.PREFILL, block)
            is_full = num_taken + len(rows) == budget.max_rows or num_prefill == budget.max_prefill_rows
            is_written = budget.share_prefixes and _shared_key(row) in being_written
            if is_full or is_written:
                break
            being_written.add(_shared_key(row))
            rows.append(row)
            num_prefill += 1
        else:
            # In lockstep a canvas begins with the others, in a pass of its own.
            if num_taken + len(rows) < budget.max_rows and not budget.is_lockstep:
                rows.append(_denoise_row(outlook))
    return rows


def _draft_rows(decoding: list[Outlook], taken: list[PlannedRow], budget: RowBudget) -> list[PlannedRow]:
    """A draft beside each denoise row that may have one, while the pass is small enough for it to be nearly free."""
    denoised = {row.sequence.id for row in taken if row.kind is RowKind.DENOISE}
    able = [o for o in decoding if o.sequence.has_drafts and o.sequence.id in denoised]
    # A canvas that begins has no prediction yet, and one with a single mask left has nothing to add.
    rows = [_row(o.sequence, RowKind.DRAFT, o.canvas, 1, 0) for o in able if o.has_begun and o.num_masked > 1]
    return rows[: max(min(budget.draft_row_limit, budget.max_rows) - len(taken), 0)]


def _shared_key(row: PlannedRow) -> bytes | None:
    """Key under which others will find the page that a row writes; None while its tokens are not known yet."""
    return row.sequence.prefix_key(row.block) if row.block < row.sequence.block else None


def _denoise_row(outlook: Outlook) -> PlannedRow:
    sequence = outlook.sequence
    num_commits = min(sequence.tokens_per_step, outlook.num_masked)
    num_certain = 1 if sequence.is_adaptive else num_commits
    return _row(sequence, RowKind.DENOISE, outlook.canvas, num_commits, num_certain)


def _write_row(sequence: Sequence, kind: RowKind, block: int) -> PlannedRow:
    return _row(sequence, kind, block, 0, 0)


def _row(sequence: Sequence, kind: RowKind, block: int, num_commits: int, num_certain_commits: int) -> PlannedRow:
    assert sequence.lane is not None and len(sequence.page_ids) > block, f"{sequence.id}: no page for block {block}"
    return PlannedRow(
        sequence=sequence,
        kind=kind,
        block=block,
        lane=sequence.lane,
        page_ids=tuple(sequence.page_ids[: block + 1]),
        key_length=sequence.key_length(block),
        num_commits=num_commits,
        num_certain_commits=num_certain_commits,
    )
