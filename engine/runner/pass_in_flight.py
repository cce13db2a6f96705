"""A pass that the device has been given, and its commits once they are read.

Shapes: D denoise rows and drafts, K picks a row, F fields of a pick, T top logprobs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor

from ..decoding.policies import PickFields
from ..output import Commit
from ..scheduling import PlannedRow, RowKind
from .batch import Batch
from .passes import Decision
from .transfer import HostCopy, Stopwatch


@dataclass(frozen=True, slots=True)
class DraftOutcome:
    """What became of a draft."""

    is_position_right: bool
    """The commit that it was made for came at the expected position."""
    is_token_right: bool
    """And with the expected token."""
    is_commit: bool
    """So its own commit counted."""


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """What one denoise row did, and its draft. A row that is not finite commits nothing."""

    row: PlannedRow
    commits: tuple[Commit, ...]
    """In commit order, not explained, with the pass's number of top_logprobs."""
    is_finite: bool
    draft: DraftOutcome | None
    """None where no draft rode beside it."""


@dataclass(frozen=True, slots=True)
class PassTiming:
    """Where the time of a pass went, in seconds."""

    device: float
    """The device's work."""
    wait: float
    """The host waited for it."""


class PassInFlight:
    """Results on their way to the host. Passes are read in the order in which they were launched."""

    def __init__(
        self,
        batch: Batch,
        decision: Decision | None,
        top_logprobs: tuple[Tensor, Tensor] | None,
        stopwatch: Stopwatch,
    ) -> None:
        """`top_logprobs`: ids and log-probabilities [D, K, T] of the picks, best first, where a request asks."""
        self._batch = batch
        self._decision = None if decision is None else HostCopy(decision.packed_DKF)
        self._top_logprobs = None if top_logprobs is None else [HostCopy(part) for part in top_logprobs]
        self._stopwatch = stopwatch
        stopwatch.stop()

    def read(self) -> tuple[list[RowOutcome], PassTiming]:
        """Wait for the device and return what its denoise rows did.

        To be called once the results of earlier passes are applied: a commit's denoising step is counted from them.
        """
        started = time.perf_counter()
        device_seconds = self._stopwatch.seconds()
        timing = PassTiming(device=device_seconds, wait=time.perf_counter() - started)
        return [] if self._decision is None else self._outcomes(self._decision.read()), timing

    def _outcomes(self, packed: Tensor) -> list[RowOutcome]:
        picks = [[PickFields(*values) for values in row] for row in packed.tolist()]
        tops = None
        if self._top_logprobs is not None:
            tops = [part.read().tolist() for part in self._top_logprobs]
        outcomes = []
        bases = self._batch.bases
        for d, row in enumerate(self._batch.rows[: self._batch.num_denoise]):
            if row.kind is not RowKind.DENOISE:
                continue
            drafts = [i for i in range(d + 1, self._batch.num_denoise) if bases[i] == d]
            commits: list[Commit] = []
            for index in (d, *drafts):
                for k, pick in enumerate(picks[index]):
                    if pick.is_commit:
                        top = () if tops is None else tuple(zip(tops[0][index][k], tops[1][index][k], strict=True))
                        commits.append(_commit(pick, row.sequence.num_denoising_steps + (index != d), top))
            draft = _judge(picks[d][0], picks[drafts[0]][0]) if drafts else None
            outcomes.append(RowOutcome(row, tuple(commits), bool(picks[d][0].is_finite), draft))
        return outcomes


def _commit(pick: PickFields, step: int, top_logprobs: tuple[tuple[int, float], ...]) -> Commit:
    return Commit(
        position=int(pick.position),
        token_id=int(pick.token),
        denoising_step=step,
        confidence=pick.confidence,
        target_logit=pick.target_logit,
        logprob=pick.logprob,
        top_logprobs=top_logprobs,
    )


def _judge(base: PickFields, draft: PickFields) -> DraftOutcome:
    is_position_right = bool(base.is_commit) and base.position == draft.draft_position
    return DraftOutcome(
        is_position_right=is_position_right,
        is_token_right=is_position_right and base.token == draft.draft_token,
        is_commit=bool(draft.is_commit),
    )
