"""What the scheduler hands out and takes back: plans, results, changes. Plain frozen data."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ..output import FinishReason
from .sequence import Sequence


class RowKind(enum.Enum):
    """What a row does in a pass. The values give the order of a plan's rows."""

    DENOISE = 0
    """Choose tokens for masked positions of the canvas."""
    DRAFT = 1
    """Choose a token for the canvas as it will be if the lane's prediction of this pass's commit comes true."""
    SHADOW = 2
    """The canvas of a sequence's unconditional copy, whose logits guide the denoise row in the same pass."""
    SEAL = 3
    """Write the final keys and values of a block that was finished on this lane."""
    PREFILL = 4
    """The same for a block whose tokens the lane has not seen, of the prompt or finished before a preemption, and for
    one of an unconditional copy whose alphas have changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRow:
    """One (sequence, block) pair of the next pass."""

    sequence: Sequence
    kind: RowKind
    block: int
    lane: int
    page_ids: tuple[int, ...]
    """Pages of blocks 0 to `block`: the row writes the last, a DRAFT row one of nobody's in its stead, and attends
    to all. Read it each pass: a page may be exchanged for one of equal content when its block seals."""
    key_length: int
    """Positions the row attends to: its block's end, cut at the sequence's limit."""
    num_commits: int
    """Most tokens that a DENOISE or DRAFT row commits; 0 for the other kinds."""
    num_certain_commits: int
    """Tokens that it commits for certain, unless the text ends or its logits are not finite: what may be counted on
    before the pass has run."""
    is_shadow: bool = False
    """Lane and pages are those of the sequence's unconditional copy; so are a SHADOW row's."""
    shadow_lane: int | None = None
    """Of a DENOISE row with a SHADOW row beside it: that one's lane."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that was given a lane."""

    sequence: Sequence
    lane: int
    num_cached_tokens: int
    """Tokens whose pages came from the prefix index."""
    shadow_lane: int | None = None
    """The lane of its unconditional copy, if it is guided."""


@dataclass(frozen=True, slots=True)
class Preemption:
    """A sequence that lost its lane and waits again."""

    sequence: Sequence
    lane: int
    """The lane it had."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One pass. Preemptions come first, then admissions, then the rows.

    A preempted sequence's lane may be given to an admitted one, and the two may be the same sequence.
    """

    rows: tuple[PlannedRow, ...]
    """Denoise rows, then drafts, shadows, seal rows and prefill rows. Their order means nothing for the results, since
    every row writes its keys and values before any row attends. None if all that runs awaits results."""
    admitted: tuple[Admission, ...] = ()
    preempted: tuple[Preemption, ...] = ()

    def of_kind(self, kind: RowKind) -> tuple[PlannedRow, ...]:
        """The rows of one kind, in order."""
        return tuple(row for row in self.rows if row.kind is kind)

    @property
    def denoise_rows(self) -> tuple[PlannedRow, ...]:
        """Rows that commit tokens: the only ones with a result."""
        return self.of_kind(RowKind.DENOISE)

    @property
    def draft_rows(self) -> tuple[PlannedRow, ...]:
        """Rows that may add a commit to the one of their sequence's denoise row, whose result tells of both."""
        return self.of_kind(RowKind.DRAFT)

    @property
    def shadow_rows(self) -> tuple[PlannedRow, ...]:
        """Canvases of unconditional copies, one for each guided sequence's denoise row."""
        return self.of_kind(RowKind.SHADOW)

    @property
    def seal_rows(self) -> tuple[PlannedRow, ...]:
        """Rows that seal a block finished on their lane."""
        return self.of_kind(RowKind.SEAL)

    @property
    def prefill_rows(self) -> tuple[PlannedRow, ...]:
        """Rows that seal a block of the prompt, or one finished before a preemption."""
        return self.of_kind(RowKind.PREFILL)


@dataclass(frozen=True, slots=True)
class RowResult:
    """What a sequence's denoise row brought, and its draft if there was one."""

    sequence_id: str
    commits: tuple[tuple[int, int], ...]
    """(absolute position, token id) in commit order."""
    is_finite: bool = True
    """False if the row's logits held an infinity or NaN; then the commits are void."""


@dataclass(frozen=True, slots=True)
class CanvasStarted:
    """The first of the denoising steps that fill positions [start, end). Once a canvas, also across preemption."""

    sequence: Sequence
    block: int
    start: int
    """The block's first position, past the prompt."""
    end: int
    """The block's end, cut at the sequence's limit."""


@dataclass(frozen=True, slots=True)
class CanvasFinished:
    """No masked position is left in the canvas: the text's positions [start, end) are final."""

    sequence: Sequence
    block: int
    start: int
    end: int
    """The end token's position if the block holds one, else as in CanvasStarted."""


@dataclass(frozen=True, slots=True)
class SequenceFinished:
    """The sequence ended; its lane and pages are free already."""

    sequence: Sequence
    reason: FinishReason
    """LENGTH, STOP or ERROR."""


Change = CanvasStarted | CanvasFinished | SequenceFinished
