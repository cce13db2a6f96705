"""Which rows ride in the next pass: a pure choice among running sequences within a budget.

Knows sequences, what of them is in flight, and the budget. Must not know pools, lanes or the queue; changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import takewhile

from .plan import PlannedRow, RowKind
from .sequence import Sequence
from .shadow import Shadow

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
    num_shadow_sealed: int = 0
    """As `num_sealed`, of the unconditional copy."""
    awaits_cutoff: bool = False
    """The passes in flight may end a steering schedule, and what comes next depends on whether they do."""

    @property
    def is_prefilling(self) -> bool:
        """True while blocks finished before the lane was given, or stale ones of the copy, still need rows."""
        shadow = self.sequence.shadow
        is_shadow_prefilling = shadow is not None and self.num_shadow_sealed < shadow.num_prefill_blocks
        return self.num_sealed < self.sequence.num_prefill_blocks or is_shadow_prefilling

    @property
    def num_to_prefill(self) -> int:
        """Rows that takes."""
        shadow = self.sequence.shadow
        num_of_shadow = 0 if shadow is None else max(shadow.num_prefill_blocks - self.num_shadow_sealed, 0)
        return max(self.sequence.num_prefill_blocks - self.num_sealed, 0) + num_of_shadow

    @property
    def is_idle(self) -> bool:
        """True while its canvas has no rows: it awaits results, or a page."""
        has_page = len(self.sequence.page_ids) > self.canvas
        return self.num_masked == 0 or not has_page or self.awaits_cutoff

    def after_prefill(self) -> Outlook:
        """The same once all that `num_to_prefill` counts is written."""
        shadow = self.sequence.shadow
        num_of_shadow = 0 if shadow is None else max(shadow.num_prefill_blocks, self.num_shadow_sealed)
        num_sealed = max(self.sequence.num_prefill_blocks, self.num_sealed)
        return replace(self, num_sealed=num_sealed, num_shadow_sealed=num_of_shadow)


def look_ahead(sequence: Sequence, in_flight: Iterable[PlannedRow]) -> Outlook:
    """The outlook of a running sequence, given its rows whose results are not known yet.

    A block ends for certain when its last masked positions are committed for certain; the text may end sooner, at a
    token that nobody has read yet. Then what was planned beyond it is dropped with the sequence.
    """
    in_flight = list(in_flight)
    num_sealed = sequence.num_sealed
    canvas = sequence.block
    num_masked, has_begun = sequence.num_masked(sequence.block), sequence.has_begun_canvas
    for row in in_flight:
        if row.kind is RowKind.DRAFT or row.is_shadow:
            continue
        if _is_written(row):
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
    found = Outlook(sequence=sequence, num_sealed=num_sealed, canvas=canvas, num_masked=num_masked, has_begun=has_begun)
    return found if sequence.shadow is None else _with_shadow(found, sequence.shadow, in_flight)


def _with_shadow(outlook: Outlook, shadow: Shadow, in_flight: list[PlannedRow]) -> Outlook:
    num_committed = outlook.sequence.num_committed
    most = num_committed + sum(row.num_commits for row in in_flight)
    return replace(
        outlook,
        num_shadow_sealed=shadow.num_sealed + sum(row.is_shadow and _is_written(row) for row in in_flight),
        awaits_cutoff=shadow.may_pass_cutoff(num_committed, most),
    )


def _is_written(row: PlannedRow) -> bool:
    """True for rows that leave final keys and values; a canvas that found no masks has written them too."""
    return row.kind in _WRITING or row.block < row.sequence.block


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
        new_rows = decode_rows(outlook, budget.max_rows)
        if len(rows) + len(new_rows) <= budget.max_rows - budget.num_reserved:
            rows += new_rows
    being_written = {_shared_key(row) for row in [*rows, *in_flight] if row.kind in _WRITING and not row.is_shadow}
    rows += _prefill_rows([o for o in running if o.is_prefilling], budget, len(rows), being_written)
    rows += _draft_rows(decoding, rows, budget)
    return tuple(sorted(rows, key=lambda row: row.kind.value))


def _in_step(running: Iterable[Outlook]) -> list[Outlook]:
    """Those that may have rows when all wait for the slowest at each block."""
    running = list(running)
    is_between = not any(o.has_begun for o in running)
    return [o for o in running if is_between or o.has_begun or o.is_prefilling]


def decode_rows(outlook: Outlook, max_rows: int) -> list[PlannedRow]:
    """The canvas's denoise row and, if the block before is finished but not sealed, its seal row.

    None for a sequence that awaits results, of its text's last commits or before it gives up its pages. A guided one
    has both rows of its copy beside them; where four are more than a pass has, those that seal come first.
    """
    sequence, canvas = outlook.sequence, outlook.canvas
    if outlook.is_idle:
        return []
    assert canvas - outlook.num_sealed in (0, 1), f"{sequence.id}: {outlook.num_sealed} sealed, canvas {canvas}"
    seals = [_write_row(sequence, RowKind.SEAL, b) for b in range(outlook.num_sealed, canvas)]
    rows = [_denoise_row(outlook)]
    if sequence.shadow is not None:
        seals += [_shadow_row(sequence, RowKind.SEAL, b) for b in range(outlook.num_shadow_sealed, canvas)]
        rows.append(_shadow_row(sequence, RowKind.SHADOW, canvas))
    return [*seals, *rows] if len(seals) + len(rows) <= max_rows else seals


def _prefill_rows(
    prefilling: list[Outlook], budget: RowBudget, num_taken: int, being_written: set[bytes | None]
) -> list[PlannedRow]:
    """Prefill rows in the room that is left, each sequence's canvas behind its last one if it fits."""
    rows: list[PlannedRow] = []
    num_prefill = 0
    for outlook in prefilling:
        wanted = _rows_to_prefill(outlook, being_written if budget.share_prefixes else set())
        room = min(budget.max_rows - num_taken - len(rows), budget.max_prefill_rows - num_prefill)
        wanted = wanted[:room]
        being_written |= {_shared_key(row) for row in wanted if not row.is_shadow}
        rows += wanted
        num_prefill += len(wanted)
        # In lockstep a canvas begins with the others, in a pass of its own.
        if len(wanted) == outlook.num_to_prefill and not budget.is_lockstep:
            canvas_rows = decode_rows(outlook.after_prefill(), budget.max_rows)
            if num_taken + len(rows) + len(canvas_rows) <= budget.max_rows:
                rows += canvas_rows
    return rows


def _rows_to_prefill(outlook: Outlook, being_written: set[bytes | None]) -> list[PlannedRow]:
    """Those of the sequence, up to a block that is being written, and all of its copy's, which nobody else writes."""
    sequence, shadow = outlook.sequence, outlook.sequence.shadow
    blocks = range(outlook.num_sealed, sequence.num_prefill_blocks)
    rows = [_write_row(sequence, RowKind.PREFILL, block) for block in blocks]
    rows = list(takewhile(lambda row: _shared_key(row) not in being_written, rows))
    if shadow is not None:
        of_shadow = range(outlook.num_shadow_sealed, shadow.num_prefill_blocks)
        rows += [_shadow_row(sequence, RowKind.PREFILL, block) for block in of_shadow]
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
    row = _row(sequence, RowKind.DENOISE, outlook.canvas, num_commits, num_certain)
    return row if sequence.shadow is None else replace(row, shadow_lane=sequence.shadow.lane)


def _write_row(sequence: Sequence, kind: RowKind, block: int) -> PlannedRow:
    return _row(sequence, kind, block, 0, 0)


def _shadow_row(sequence: Sequence, kind: RowKind, block: int) -> PlannedRow:
    """A row of the unconditional copy, in place of its sequence's."""
    shadow = sequence.shadow
    assert shadow is not None and shadow.lane is not None, f"{sequence.id} has no copy that runs"
    row = _write_row(sequence, kind, block)
    return replace(row, lane=shadow.lane, page_ids=tuple(shadow.page_ids[: block + 1]), is_shadow=True)


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
