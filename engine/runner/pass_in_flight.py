"""A pass that the device has been given, and its commits once they are read.

Shapes: D denoise rows, K picks a row, T top logprobs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor

from ..output import Commit
from ..scheduling import PlannedRow
from .batch import Batch
from .passes import Decision
from .transfer import HostCopy, Stopwatch


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """What one denoise row did. A row that is not finite commits nothing."""

    row: PlannedRow
    commits: tuple[Commit, ...]
    """In commit order, not explained, with the pass's number of top_logprobs."""
    is_finite: bool


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
        self._decision = None if decision is None else HostCopy(decision.packed())
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
        rows = packed.tolist()
        if self._top_logprobs is not None:
            top_id, top_logprob = (part.read().tolist() for part in self._top_logprobs)
        outcomes = []
        for d, row in enumerate(self._batch.rows[: self._batch.num_denoise]):
            commits = []
            for k, (position, token_id, is_commit, confidence, target, logprob, _) in enumerate(rows[d]):
                if not is_commit:
                    continue
                top = () if self._top_logprobs is None else tuple(zip(top_id[d][k], top_logprob[d][k], strict=True))
                commits.append(
                    Commit(
                        position=int(position),
                        token_id=int(token_id),
                        denoising_step=row.sequence.num_denoising_steps,
                        confidence=confidence,
                        target_logit=target,
                        logprob=logprob,
                        top_logprobs=top,
                    )
                )
            outcomes.append(RowOutcome(row=row, commits=tuple(commits), is_finite=bool(rows[d][0][-1])))
        return outcomes
