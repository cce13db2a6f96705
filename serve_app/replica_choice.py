"""Which EngineServer replica a call goes to: the one that a lease names, else the one that can start soonest.

This runs in every process that calls EngineServer, inside Ray Serve's routing tasks, of which there are few: it never
waits. Queues are kept elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from .routing.messages import RouteRequest
from .routing.ranking import ReplicaClock, rank_replicas

ANY_REQUEST = RouteRequest(request_id="", num_prompt_tokens=0, max_tokens=1)
"""Stands for a call that brings no RouteRequest."""
_OLDEST_CLOCK_S = 10.0
"""Published clocks come through the controller and are up to half a second old; without one they stop."""


def publish_clock(clock: ReplicaClock, now_s: float) -> dict[str, Any]:
    """A clock as routing stats. `now_s` is the wall clock's, the only one that machines share."""
    return {
        "read_at": now_s,
        "num_lanes_free": clock.num_lanes_free,
        "num_pages_free": clock.num_pages_free,
        "num_lanes_waiting": clock.num_lanes_waiting,
        "num_lanes_in_use": clock.num_lanes_in_use,
        "boundaries_s": list(clock.boundaries_s),
        "is_silent": clock.is_silent,
    }


def read_clock(replica_id: str, stats: dict[str, Any], now_s: float, num_lanes_sent: int) -> ReplicaClock:
    """What a replica's routing stats say; nothing free where it has published none yet.

    `num_lanes_sent`: lanes of requests that were sent there from here since, which it could not know of.
    """
    if "read_at" not in stats:
        return ReplicaClock(replica_id=replica_id, num_lanes_free=0, num_pages_free=0, num_lanes_waiting=num_lanes_sent)
    return ReplicaClock(
        replica_id=replica_id,
        num_lanes_free=stats["num_lanes_free"],
        num_pages_free=stats["num_pages_free"],
        num_lanes_waiting=stats["num_lanes_waiting"] + num_lanes_sent,
        num_lanes_in_use=stats["num_lanes_in_use"],
        boundaries_s=tuple(stats["boundaries_s"]),
        # Machines' clocks may disagree: then the news is taken as fresh.
        age_s=min(max(now_s - stats["read_at"], 0.0), _OLDEST_CLOCK_S),
        is_silent=stats["is_silent"],
    )


class ReplicaChoice(RequestRouter):
    """A call with a session id goes to the replica of that id, any other to the best by the replicas' clocks.

    Where the named replica is not among those that Serve lists, the call goes to another one, which sees that the
    lease is not its own and refuses it: so the ingress hears of it at once, and no call waits for the dead.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Called by Serve once."""
        self._lanes_sent: dict[str, tuple[float, int]] = {}
        self._pending: dict[int, PendingRequest] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One replica a rank, the best first; Serve takes the first that accepts."""
        if pending_request is None:
            return [candidate_replicas]
        # Otherwise Serve would ask again without a pause for as long as nobody accepts.
        pending_request.routing_context.should_backoff = True
        by_id = {replica.replica_id.to_full_id_str(): replica for replica in candidate_replicas}
        pinned = by_id.get(pending_request.metadata.session_id)
        if pinned is not None:
            return [[pinned]]
        now_s = time.time()
        clocks = [
            read_clock(id_, replica.routing_stats, now_s, self._num_lanes_sent(id_, replica.routing_stats))
            for id_, replica in by_id.items()
        ]
        route = route_of(pending_request.args)
        ranked = rank_replicas(clocks, route or ANY_REQUEST)
        if ranked and route is not None:
            self._count(ranked[0], by_id[ranked[0]].routing_stats, route.num_lanes)
        return [[by_id[id_]] for id_ in ranked]

    # Serve finds the call that a replica was chosen for by the id of the HTTP request around it, which all calls for
    # that share: of several at once, as for several prompts, one would get another's replica, and one would wait for
    # ever. Here it is found by its own metadata.

    def _add_pending_request_to_indices(self, pending_request: PendingRequest) -> None:
        self._pending[id(pending_request.metadata)] = pending_request

    def _remove_pending_request_from_indices(self, pending_request: PendingRequest) -> None:
        self._pending.pop(id(pending_request.metadata), None)

    def _get_pending_request_matching_internal_request_id(self, request_metadata: Any = None) -> PendingRequest | None:
        pending = self._pending.get(id(request_metadata))
        return pending if pending is not None and not pending.future.done() else None

    def _count(self, replica_id: str, stats: dict[str, Any], num_lanes: int) -> None:
        """The lanes of what is sent count until the replica's clock is newer."""
        self._lanes_sent[replica_id] = (stats.get("read_at", 0.0), self._num_lanes_sent(replica_id, stats) + num_lanes)

    def _num_lanes_sent(self, replica_id: str, stats: dict[str, Any]) -> int:
        read_at, number = self._lanes_sent.get(replica_id, (0.0, 0))
        return number if read_at == stats.get("read_at", 0.0) else 0


def route_of(args: Sequence[Any]) -> RouteRequest | None:
    """The RouteRequest among a call's arguments, if it has one."""
    return next((arg for arg in args if isinstance(arg, RouteRequest)), None)
