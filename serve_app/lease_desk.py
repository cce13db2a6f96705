"""A replica's own word on leases: it alone knows what is free, so it takes a request or refuses it.

Knows the engine's last load and what was taken since. Must not know Ray, asyncio or the router.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from engine import EngineLoad

from .lease_messages import RefusalReason
from .routing.messages import Lease
from .routing.pass_times import coming_pass_s


class LeaseDesk:
    """Counts what is taken and not yet running on top of the engine's load, so that no lane is promised twice."""

    def __init__(self, replica_id: str, *, grace_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`grace_s`: a lane that comes free within this is as good as free."""
        self.replica_id = replica_id
        self.grace_s = grace_s
        self._clock = clock
        self._load: EngineLoad | None = None
        self._load_at = 0.0
        self._prefixes: set[bytes] = set()
        self._taken: dict[str, tuple[int, int]] = {}
        """Lanes and pages of each request, by its id, from being taken until it is seen to run."""
        self._settled: list[str] = []

    @property
    def load(self) -> EngineLoad | None:
        """The engine's last load; None before the first."""
        return self._load

    @property
    def load_age_s(self) -> float:
        """Seconds since that load came."""
        return self._clock() - self._load_at

    @property
    def num_waiting(self) -> int:
        """Requests that are here and have no lane, as far as is known."""
        # The engine also counts preempted ones; those that have just been taken it does not count yet.
        return max(len(self._taken), self._load.num_waiting if self._load is not None else 0)

    @property
    def num_lanes_waiting(self) -> int:
        """Lanes that requests without one want, as far as is known; a guided one wants two."""
        num_taken = sum(num_lanes for num_lanes, _ in self._taken.values())
        return max(num_taken, self._load.num_lanes_waiting if self._load is not None else 0)

    def update(self, load: EngineLoad) -> None:
        """Take the engine's load; the loads of one engine have to come in their order."""
        self._load, self._load_at = load, self._clock()
        if load.prefixes.is_everything:
            self._prefixes = set()
        # From here on the engine counts them, also those that it preempts; what ends them nobody need say.
        for block in load.running:
            self._taken.pop(block.request_id, None)
        self._prefixes.difference_update(load.prefixes.removed)
        self._prefixes.update(load.prefixes.added)

    def refusal(
        self, lease: Lease, num_lanes: int, num_pages: int, prefix_keys: Sequence[bytes]
    ) -> RefusalReason | None:
        """Why a request with this lease cannot be taken, or None: then `take` it before anything else is asked.

        `num_pages`: of all its lanes, up to and including the first canvas. `prefix_keys`: of its prompt's complete
        blocks. What wants more than there is in all is taken where all is free: the engine says what is wrong with it.
        """
        if lease.replica_id != self.replica_id:
            return RefusalReason.WRONG_REPLICA
        self._settled.append(lease.lease_id)
        return None if self._has_room(num_lanes, num_pages, prefix_keys) else RefusalReason.NO_ROOM

    def take(self, request_id: str, num_lanes: int, num_pages: int) -> None:
        """Count a request that has come, leased or not."""
        self._taken[request_id] = (num_lanes, num_pages)

    def leave(self, request_id: str) -> None:
        """Forget a request that has ended, perhaps before it ran."""
        self._taken.pop(request_id, None)

    def take_settled(self) -> tuple[str, ...]:
        """Ids of the leases that were answered since this was last called."""
        settled, self._settled = tuple(self._settled), []
        return settled

    def _has_room(self, num_lanes: int, num_pages: int, prefix_keys: Sequence[bytes]) -> bool:
        load = self._load
        if load is None:
            return False
        num_shared = 0
        while num_shared < len(prefix_keys) and prefix_keys[num_shared] in self._prefixes:
            num_shared += 1
        lanes_free = load.num_lanes_free - self.num_lanes_waiting
        pages_free = load.num_pages_free - sum(pages for _, pages in self._taken.values())
        lanes_wanted = min(num_lanes, load.num_lanes)
        pages_wanted = min(num_pages, load.num_pages) - num_shared
        if lanes_free >= lanes_wanted and pages_free >= pages_wanted:
            return True
        for lanes, pages in self._ending_soon(load):
            lanes_free += lanes
            pages_free += pages
            if lanes_free >= lanes_wanted and pages_free >= pages_wanted:
                return True
        return False

    def _ending_soon(self, load: EngineLoad) -> list[tuple[int, int]]:
        """Lanes and pages of each running request that ends within the grace period."""
        if not load.pass_seconds:
            return []
        pass_s = coming_pass_s(load)
        until_s = self._clock() - self._load_at + self.grace_s
        return [
            (block.num_lanes, block.num_pages)
            for block in load.running
            if block.num_blocks_left == 0 and block.num_steps_left * pass_s <= until_s
        ]
