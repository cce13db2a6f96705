"""Who decides: the usual ways to balance load, and an ideal one that knows everything at once."""

from __future__ import annotations

from collections import deque

from .replica import SimReplica
from .workload import BLOCK_SIZE, SimRequest
from .world import World


class _Direct:
    """Sends each request at once to where it stays; replicas queue."""

    def __init__(self, age_s: float = 0.0) -> None:
        self._age_s = age_s
        """How old the queue lengths are."""

    def start(self, world: World) -> None:
        self.world = world
        self._lengths = [0] * len(world.replicas)
        self._news: deque[tuple[float, int, int]] = deque()
        world.length_changes = self._note

    def arrive(self, request: SimRequest) -> None:
        while self._news and self._news[0][0] <= self.world.now_s:
            _, index, length = self._news.popleft()
            self._lengths[index] = length
        self.world.send(request, self.choose(self._lengths))

    def delivered(self, request: SimRequest, replica: SimReplica) -> None:
        """Known already."""

    def boundary(self, replica: SimReplica) -> None:
        """Nobody asks."""

    def choose(self, lengths: list[int]) -> int:
        """Index of the replica, by how many requests each has."""
        raise NotImplementedError

    def _note(self, index: int) -> None:
        self._news.append((self.world.now_s + self._age_s, index, self.world.num_sent[index]))


class PowerOfTwo(_Direct):
    """The shorter queue of two replicas drawn at random, as Ray Serve chooses."""

    def choose(self, lengths: list[int]) -> int:
        if len(lengths) == 1:
            return 0
        first, second = self.world.rng.sample(range(len(lengths)), 2)
        return first if lengths[first] <= lengths[second] else second


class ShortestQueue(_Direct):
    """The shortest queue of all; of several, a random one."""

    def choose(self, lengths: list[int]) -> int:
        least = min(lengths)
        return self.world.rng.choice([i for i, length in enumerate(lengths) if length == least])


class RoundRobin(_Direct):
    """One after the other."""

    def start(self, world: World) -> None:
        super().start(world)
        self._next = -1

    def choose(self, lengths: list[int]) -> int:
        self._next = (self._next + 1) % len(lengths)
        return self._next


class Ideal:
    """One queue, no delay, and the true length of everything.

    It weighs replicas as the policy does, with each request's real passes in place of a forecast. No router can know
    that much; it is still one decision at a time, so no proof of what is possible.
    """

    def start(self, world: World) -> None:
        self.world = world
        self._waiting: deque[SimRequest] = deque()

    def arrive(self, request: SimRequest) -> None:
        self._waiting.append(request)
        self._dispatch()

    def delivered(self, request: SimRequest, replica: SimReplica) -> None:
        """Known already."""

    def boundary(self, replica: SimReplica) -> None:
        self._dispatch()

    def _dispatch(self) -> None:
        world = self.world
        while self._waiting:
            free = [r for r in world.replicas if world.num_sent[r.index] < r.num_lanes]
            if not free:
                return
            request = self._waiting.popleft()
            best = min(free, key=lambda r: (self._cost_s(r, request), r.index))
            world.send(request, best.index, delay_s=0.0)

    def _cost_s(self, replica: SimReplica, request: SimRequest) -> float:
        num_first = request.num_passes(0)
        num_all = num_first + request.num_passes_after(0)
        horizon = max(num_first, min(num_all, BLOCK_SIZE))
        num_running = replica.num_running
        # In transit or waiting there: counted as running all the time.
        rows = float(self.world.num_sent[replica.index] - num_running) + len(replica.prefilling)
        for end_pass, _, running in replica.decoding:
            left = end_pass - replica.pass_at(self.world.now_s) + running.request.num_passes_after(running.block)
            rows += min(left, horizon) / horizon
        rows = min(rows, replica.num_lanes - 1)
        beside_s, with_it_s = self._seconds(rows), self._seconds(rows + 1)
        num_uncached = request.num_prompt_blocks - replica.cache.num_found(request.system_prompt)
        prefill_s = self._seconds(rows + 1 + num_uncached) - with_it_s
        return num_first * with_it_s + rows * horizon * (with_it_s - beside_s) + (rows + 1) * prefill_s

    def _seconds(self, rows: float) -> float:
        table = self.world.seconds
        whole = min(int(rows), len(table) - 2)
        below = max(table[whole], table[1])
        return below + (rows - whole) * (table[whole + 1] - below)
