"""Which of several replicas a request should go to.

    cost = start + steps x T(n + m) + prefill            until the request's own first block is finished
         + n x (horizon x (T(n + m) - T(n)) + prefill)   by which it delays those that run there

T(n) is the replica's measured time of a pass with n rows, n the rows that will run beside the request when it begins,
m its own rows in a pass, one for each of its lanes, and prefill the time by which the rows of prompt blocks that are
not cached there lengthen passes. The first rows of a pass are nearly free and later ones are not, so the second line is
what keeps an empty replica ahead of a busy one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil
from operator import attrgetter
from typing import NamedTuple

from .messages import RouteRequest
from .replica import Replica

_NUM_LIGHT = 6
_NUM_SHARING = 4
"""Replicas that are weighed: those with the fewest rows, and those with the fewest rows of all that have a prefix."""
_STANDING = attrgetter("standing")


@dataclass(frozen=True, slots=True)
class Work:
    """What a request asks of any replica."""

    request: RouteRequest
    num_pages: int
    """Those that a replica reserves at admission, for each lane: the prompt's complete blocks and the first canvas."""
    num_prompt_blocks: int
    """Complete ones; each lane computes them for itself."""
    num_first_passes: int
    """Denoise passes of its first block."""
    horizon: int
    """Passes over which it is weighed what it costs others: all it may take, up to a block of one token a pass.
    Beyond that those who run now are mostly gone."""

    @property
    def num_lanes(self) -> int:
        """Lanes that the request takes."""
        return self.request.num_lanes

    @classmethod
    def of(cls, request: RouteRequest, block_size: int) -> Work:
        """Count it."""
        in_first = min(block_size - request.num_prompt_tokens % block_size, max(request.max_tokens, 1))
        tokens_per_step = max(request.tokens_per_step, 1e-3)
        num_first = ceil(in_first / tokens_per_step)
        num_all = ceil(max(request.max_tokens, 1) / tokens_per_step)
        num_blocks = max(request.num_prompt_tokens // block_size, len(request.prefix_keys))
        return cls(
            request=request,
            num_pages=request.num_lanes * (num_blocks + 1),
            num_prompt_blocks=num_blocks,
            num_first_passes=num_first,
            horizon=max(num_first, min(num_all, block_size)),
        )


class Candidate(NamedTuple):
    """A replica and what would come of choosing it."""

    replica: Replica
    num_cached: int
    first_block_s: float
    """Until the request's first block is finished."""
    cost_s: float
    """The same, and all that others lose."""
    cost_uncached_s: float
    """The cost if no prompt block were cached there."""


def estimate(replica: Replica, work: Work, now_s: float) -> Candidate:
    """What would come of sending the work to a replica as soon as it can begin."""
    num_lanes = work.num_lanes
    start_s = replica.starts_in_s(now_s, num_lanes)
    rows = replica.rows_at(now_s + start_s, num_lanes)
    seconds = replica.pass_times
    beside_s, with_it_s = seconds(rows), seconds(rows + num_lanes)
    denoise_s = start_s + work.num_first_passes * with_it_s
    cost_s = denoise_s + rows * work.horizon * (with_it_s - beside_s)
    if not work.num_prompt_blocks:
        return Candidate(replica, 0, denoise_s, cost_s, cost_s)
    # Each lane computes the prompt's blocks for itself, and only the first one shares what is cached.
    most_rows = rows + num_lanes * (1 + work.num_prompt_blocks)
    all_prefill_s = seconds(most_rows) - with_it_s
    num_cached = replica.num_cached(work.request.prefix_keys)
    prefill_s = seconds(most_rows - num_cached) - with_it_s if num_cached else all_prefill_s
    return Candidate(
        replica,
        num_cached,
        denoise_s + prefill_s,
        cost_s + (rows + 1) * prefill_s,
        cost_s + (rows + 1) * all_prefill_s,
    )


def cheapest(replicas: Iterable[Replica], work: Work, now_s: float) -> tuple[Candidate | None, bool]:
    """The cheapest of the replicas that have room for the work, and whether it is so by its cached prefix.

    Only those with the fewest rows are weighed, and a few that hold the beginning of the prompt:
    `cheapest_of_all` would rarely choose another one.
    """
    return _cheapest([estimate(replica, work, now_s) for replica in _short_list(replicas, work, now_s)])


def cheapest_of_all(replicas: Iterable[Replica], work: Work, now_s: float) -> tuple[Candidate | None, bool]:
    """The same, weighing every replica."""
    return _cheapest([estimate(r, work, now_s) for r in replicas if r.has_room(work.num_lanes, work.num_pages, now_s)])


def _cheapest(candidates: list[Candidate]) -> tuple[Candidate | None, bool]:
    if not candidates:
        return None, False
    best = min(candidates, key=lambda c: (c.cost_s, c.replica.last_leased, c.replica.id))
    if not best.num_cached:
        return best, False
    other = min(candidates, key=lambda c: (c.cost_uncached_s, c.replica.last_leased, c.replica.id))
    return best, other is not best


def _short_list(replicas: Iterable[Replica], work: Work, now_s: float) -> list[Replica]:
    """Those worth weighing: they have room, and few rows or a part of the prompt."""
    first_key = work.request.prefix_keys[0] if work.request.prefix_keys else None
    found: list[Replica] = []
    num_sharing = 0
    for replica in sorted(replicas, key=_STANDING):
        is_sharing = first_key is not None and num_sharing < _NUM_SHARING and replica.has_prefix(first_key)
        if len(found) - num_sharing >= _NUM_LIGHT and not is_sharing:
            if first_key is None or num_sharing >= _NUM_SHARING:
                break
        elif replica.has_room(work.num_lanes, work.num_pages, now_s):
            found.append(replica)
            num_sharing += is_sharing
    return found


def sooner_with_prefix(
    closed: Iterable[Replica], work: Work, best: Candidate, now_s: float, until_s: float
) -> Candidate | None:
    """A full replica that opens by `until_s`, shares more of the prompt, and would have the first block sooner."""
    if best.num_cached >= work.num_prompt_blocks:
        return None
    for replica in closed:
        if (
            now_s < replica.opens_for(work.num_lanes) <= until_s
            and replica.num_cached(work.request.prefix_keys) > best.num_cached
        ):
            candidate = estimate(replica, work, now_s)
            if candidate.first_block_s < best.first_block_s and candidate.cost_s < best.cost_s:
                return candidate
    return None


def distance(replica: Replica, work: Work, now_s: float) -> tuple[int, float, str]:
    """How far a replica is from having room for the work; the nearest has the least.

    First the pages that it will still lack when it has the lanes; then when it has them; its name if these are equal.
    """
    num_short = max(replica.num_pages_short(work.num_lanes, work.num_pages), 0)
    return num_short, max(replica.opens_for(work.num_lanes), now_s), replica.id
