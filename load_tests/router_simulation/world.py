"""Requests, a router, replicas, and the time between them."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from .replica import SimReplica, pass_table
from .workload import SimRequest, SystemPrompts

HOP_S = 0.001
"""From one process to another."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """What is the same for all routers."""

    num_replicas: int
    num_lanes: int = 16
    num_pages: int = 6000
    system: SystemPrompts | None = None
    """With it the replicas' caches are warm at the start."""


class Router(Protocol):
    """Brings requests to replicas, by `World.send`."""

    def start(self, world: World) -> None:
        """Before anything happens."""

    def arrive(self, request: SimRequest) -> None:
        """A request comes in."""

    def delivered(self, request: SimRequest, replica: SimReplica) -> None:
        """A request has come to its replica."""

    def boundary(self, replica: SimReplica) -> None:
        """Blocks have ended at a replica, or requests have begun there, and its next pass runs."""


class World:
    """The event loop. Ties are served in the order in which they were scheduled, so runs repeat exactly."""

    def __init__(self, deployment: Deployment, router: Router, seed: int = 0) -> None:
        seconds = pass_table()
        self.deployment = deployment
        self.router = router
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.replicas = [
            SimReplica(i, deployment.num_lanes, deployment.num_pages, seconds) for i in range(deployment.num_replicas)
        ]
        self.seconds = seconds
        self.num_sent = [0] * deployment.num_replicas
        """Requests at each replica or on their way to it."""
        self.length_changes: Callable[[int], None] = lambda index: None
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._num_to_come = 0
        if deployment.system is not None:
            for replica in self.replicas:
                replica.cache.warm_up(self.rng, deployment.system)
        router.start(self)

    def schedule(self, at_s: float, action: Callable[[], None]) -> None:
        """Do something then."""
        self._num_events += 1
        heapq.heappush(self._events, (at_s, self._num_events, action))

    @property
    def is_busy(self) -> bool:
        """True while requests are to come or not finished."""
        return self._num_to_come > 0

    def run(self, requests: list[SimRequest]) -> None:
        """Until every request is finished."""
        self._num_to_come = len(requests)
        coming = iter(requests)

        def arrive(request: SimRequest) -> None:
            following = next(coming, None)
            if following is not None:
                self.schedule(following.arrival_s, lambda: arrive(following))
            self.router.arrive(request)

        first = next(coming, None)
        if first is not None:
            self.schedule(first.arrival_s, lambda: arrive(first))
        while self._num_to_come:
            self.now_s, _, action = heapq.heappop(self._events)
            action()

    def send(self, request: SimRequest, index: int, delay_s: float = HOP_S) -> None:
        """Bring a request to a replica."""
        self.num_sent[index] += 1
        self.length_changes(index)
        self.schedule(self.now_s + delay_s, lambda: self._deliver(request, index))

    def take_back(self, request: SimRequest, index: int) -> bool:
        """Take a request out of a replica's queue again; False if it runs already."""
        replica = self.replicas[index]
        if request not in replica.waiting:
            return False
        replica.waiting.remove(request)
        self.num_sent[index] -= 1
        self.length_changes(index)
        return True

    def _deliver(self, request: SimRequest, index: int) -> None:
        replica = self.replicas[index]
        self.router.delivered(request, replica)
        is_idle = replica.ends_s is None
        if replica.add(request, self.now_s) or is_idle:
            if is_idle:
                self._begin(replica)
            else:
                self._await_end(replica)

    def _await_end(self, replica: SimReplica) -> None:
        ends_s = replica.ends_s
        assert ends_s is not None

        def end() -> None:
            # Cut short since, and ended by another event.
            if replica.ends_s == ends_s:
                self._end(replica)

        self.schedule(ends_s, end)

    def _end(self, replica: SimReplica) -> None:
        ended = replica.end_stretch(self.now_s)
        for running in ended:
            if running.request.finished_s is not None:
                self._num_to_come -= 1
                self.num_sent[replica.index] -= 1
                self.length_changes(replica.index)
        self._begin(replica, is_boundary=bool(ended))

    def _begin(self, replica: SimReplica, *, is_boundary: bool = False) -> None:
        admitted = replica.begin_stretch(self.now_s)
        if replica.ends_s is not None:
            self._await_end(replica)
        if admitted or is_boundary:
            self.router.boundary(replica)
