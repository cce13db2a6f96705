"""How busy an engine is: what somebody who spreads requests over several engines wants to know. Plain data.

Knows what the scheduler says of its sequences, and measured times. Must not know tensors, threads or the network.
"""

from __future__ import annotations

from dataclasses import dataclass

from .scheduling import Outlook, PrefixChanges, Scheduler

_WEIGHT_OF_NEW = 0.2
"""Of a new measurement in its moving average: about the last ten passes count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningLoad:
    """What one running sequence holds, and for how long."""

    request_id: str
    num_steps_left: int
    """Passes until its canvas is full: prefill still to do, then masked positions by its commits a pass so far."""
    num_blocks_left: int
    """Blocks that follow the canvas at most. Sealing costs no pass: it rides with the next block's first."""
    num_pages: int
    """Pages that nobody else holds: they come free with it."""
    num_lanes: int = 1
    """Lanes that come free with it: two for a guided one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLoad:
    """What is in use at one moment, between two passes."""

    num_lanes: int
    num_lanes_free: int
    num_pages: int
    num_pages_free: int
    """Pages that a new sequence could take: free and cached ones."""
    num_waiting: int
    """Requests without a lane, preempted ones included."""
    num_lanes_waiting: int
    """Lanes that requests without one want; a guided one wants two."""
    running: tuple[RunningLoad, ...]
    """In order of service."""
    pass_seconds: tuple[tuple[int, float], ...]
    """(rows, seconds of a pass of so many rows), moving averages, rising by rows; none before the first pass."""
    prefixes: PrefixChanges
    """Keys of prefixes that came and went since the load before."""


class PassAverages:
    """Moving averages of what a pass takes, for each number of rows."""

    def __init__(self) -> None:
        self._seconds_of: dict[int, float] = {}

    def observe(self, num_rows: int, seconds: float) -> None:
        """Add a measurement."""
        old = self._seconds_of.get(num_rows, seconds)
        self._seconds_of[num_rows] = old + _WEIGHT_OF_NEW * (seconds - old)

    def averages(self) -> tuple[tuple[int, float], ...]:
        """(rows, seconds), rising by rows."""
        return tuple(sorted(self._seconds_of.items()))


def measure(
    scheduler: Scheduler, pass_averages: PassAverages, *, num_lanes: int, with_all_prefixes: bool
) -> EngineLoad:
    """The load now. Takes the news of prefixes with it: the next load tells only what came after."""
    outlooks = scheduler.outlooks()
    running = [_running(o, scheduler.num_own_pages(o.sequence), scheduler.prefill_row_limit) for o in outlooks]
    return EngineLoad(
        num_lanes=num_lanes,
        num_lanes_free=scheduler.num_free_lanes,
        num_pages=scheduler.num_free_pages + scheduler.num_cached_pages + scheduler.num_held_pages,
        num_pages_free=scheduler.num_free_pages + scheduler.num_cached_pages,
        num_waiting=scheduler.num_waiting,
        num_lanes_waiting=scheduler.num_lanes_waiting,
        running=tuple(running),
        pass_seconds=pass_averages.averages(),
        prefixes=scheduler.take_prefix_changes(everything=with_all_prefixes),
    )


def _running(outlook: Outlook, num_own_pages: int, prefill_row_limit: int) -> RunningLoad:
    sequence = outlook.sequence
    commits_a_pass: float = sequence.tokens_per_step
    if sequence.is_adaptive:
        # Until it has shown how many it commits, one is certain.
        commits_a_pass = max(sequence.num_committed / max(sequence.num_forward_passes, 1), 1.0)
    num_blocks_left = 0 if sequence.end is not None else (sequence.limit - 1) // sequence.block_size - outlook.canvas
    return RunningLoad(
        request_id=sequence.id,
        num_steps_left=-(-outlook.num_to_prefill // prefill_row_limit) + int(-(-outlook.num_masked // commits_a_pass)),
        num_blocks_left=num_blocks_left,
        num_pages=num_own_pages,
        num_lanes=sequence.num_lanes,
    )
