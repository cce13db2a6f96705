"""Choosing a replica without the router, from what each replica publishes.

Published news is old by the time it is read, so a replica publishes its clock and not a sample: when its lanes come
free, counted from the moment it wrote that down. The reader subtracts the news' age.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from .messages import BLOCK_SIZE, ReplicaReport, RouteRequest
from .pass_times import coming_pass_s


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaClock:
    """A replica's room, now and soon. All spans are seconds from the moment it was read off."""

    replica_id: str
    num_lanes_free: int
    num_pages_free: int
    num_lanes_waiting: int
    """Lanes that requests there want which have none yet."""
    num_lanes_in_use: int = 0
    boundaries_s: tuple[float, ...] = ()
    """When lanes come free, each of them: the ends of running sequences' last blocks, rising."""
    age_s: float = 0.0
    """How old this is where it is read."""
    is_silent: bool = False
    """Its engine has not said its load for too long: it hangs, and what is said here is no longer so."""


def clock_of(report: ReplicaReport, age_s: float = 0.0) -> ReplicaClock:
    """What a report says of when lanes come free."""
    pass_s = coming_pass_s(report)
    ending = [block for block in report.running if block.num_blocks_left == 0]
    ends = sorted(block.num_steps_left * pass_s for block in ending for _ in range(block.num_lanes))
    return ReplicaClock(
        replica_id=report.replica_id,
        num_lanes_free=report.num_lanes_free,
        num_pages_free=report.num_pages_free,
        num_lanes_waiting=report.num_lanes_waiting,
        num_lanes_in_use=report.num_lanes - report.num_lanes_free,
        boundaries_s=tuple(ends),
        age_s=age_s,
    )


def starts_in_s(clock: ReplicaClock, num_lanes: int) -> float:
    """Seconds until one more request would have so many lanes; infinite where the clock does not tell."""
    missing = num_lanes + clock.num_lanes_waiting - clock.num_lanes_free
    if missing <= 0:
        return 0.0
    if missing > len(clock.boundaries_s):
        return float("inf")
    return max(clock.boundaries_s[missing - 1] - clock.age_s, 0.0)


def rank_replicas(clocks: Iterable[ReplicaClock], request: RouteRequest, *, block_size: int = BLOCK_SIZE) -> list[str]:
    """Replica ids, best first: soonest start, then pages for the prompt, fewest lanes taken there, most pages.

    Those whose engine is silent come last: they are asked only if there is nobody else.
    """
    num_lanes = request.num_lanes
    num_pages = num_lanes * (max(request.num_prompt_tokens // block_size, len(request.prefix_keys)) + 1)

    def order(clock: ReplicaClock) -> tuple[bool, bool, float, int, int, str]:
        # Sequences whose boundary has passed since are gone.
        num_there = clock.num_lanes_in_use + clock.num_lanes_waiting - bisect_right(clock.boundaries_s, clock.age_s)
        lacks_pages, start_s = clock.num_pages_free < num_pages, starts_in_s(clock, num_lanes)
        return (clock.is_silent, lacks_pages, start_s, num_there, -clock.num_pages_free, clock.replica_id)

    return [clock.replica_id for clock in sorted(clocks, key=order)]
