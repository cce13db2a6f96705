"""What ingress, router and replicas tell each other around a lease. Plain data, picklable; spans in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from .routing.messages import RouteRequest


class RefusalReason(Enum):
    """Why a leased request was not taken."""

    NO_ROOM = "no_room"
    """Too few lanes or too few pages, now and soon."""
    WRONG_REPLICA = "wrong_replica"
    """It came to another replica than the lease names: that one leaves, has died, or is not known yet."""
    LOST = "lost"
    """The replica died, or did not answer."""
    UNUSED = "unused"
    """Nobody waits for it any more."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """A replica has taken the request; its events follow."""

    replica_id: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """A replica has not taken the request, and nothing of it was begun."""

    replica_id: str
    reason: RefusalReason


@dataclass(frozen=True, slots=True)
class Queued:
    """The router has the request, and will say where it goes."""


@dataclass(frozen=True, slots=True)
class Returned:
    """A lease that came to nothing."""

    lease_id: str
    replica_id: str
    reason: RefusalReason

    @property
    def is_replica_gone(self) -> bool:
        """Whether its replica should get nothing more for now."""
        return self.reason not in (RefusalReason.NO_ROOM, RefusalReason.UNUSED)


@dataclass(frozen=True, slots=True)
class RouteCall:
    """Asks the router where a request goes; with what became of the lease before, if there was one."""

    request: RouteRequest
    returned: Returned | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaLoad:
    """What one replica uses, as it said last."""

    replica_id: str
    """Empty where nobody said whose it is."""
    num_lanes: int
    num_lanes_free: int
    num_pages: int
    num_pages_free: int
    """Free and cached ones."""
    num_waiting: int


def replica_load(stats: Mapping[str, int], replica_id: str = "") -> ReplicaLoad:
    """The same from an engine's stats."""
    return ReplicaLoad(
        replica_id=replica_id,
        num_lanes=stats["num_lanes"],
        num_lanes_free=stats["num_lanes"] - stats["num_lanes_in_use"],
        num_pages=stats["num_pages"],
        num_pages_free=stats["pages_free"] + stats["pages_cached"],
        num_waiting=stats["num_waiting"],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceLoad:
    """What all replicas use, and what waits for them."""

    replicas: tuple[ReplicaLoad, ...]
    num_queued: int = 0
    """Requests that wait in the router."""
    oldest_wait_s: float = 0.0
    is_complete: bool = True
    """False where one replica answered for itself, since there is no router or it is away."""


@dataclass(frozen=True, slots=True)
class ReportAnswer:
    """What the router says to a replica's report."""

    wants_all_prefixes: bool
    """The next report has to list every prefix: the router missed some."""
    num_lanes_queued: int
    """Lanes that the requests in the router want, of any replica."""
    oldest_wait_s: float
    """How long the oldest of them has waited."""
