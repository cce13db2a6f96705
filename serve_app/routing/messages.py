"""What the router hears and says. Plain data, picklable; every time is in seconds.

A time called `..._s` is a span, so that no two machines need agree on a clock: whoever receives a message sets it
against the moment of its arrival.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import isfinite

BLOCK_SIZE = 64
"""Positions of a block, and of a page, until a replica says otherwise."""
PREFIX_KEY_BYTES = 8
"""Of the engine's keys of 32 bytes; two prefixes that agree by chance cost a worse choice, never a wrong answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteRequest:
    """What a choice needs to know of a request; its tokens and its text stay with the ingress."""

    request_id: str
    tenant: str = ""
    """Whom to be fair to, such as the name of an API key."""
    priority: int = 0
    """Smaller is served first, as everywhere in the engine."""
    num_prompt_tokens: int
    max_tokens: int
    tokens_per_step: float = 1.0
    """Tokens that a pass of it is expected to commit."""
    num_lanes: int = 1
    """Lanes that it takes, each with rows and pages of its own: two for a guided request."""
    prefix_keys: tuple[bytes, ...] = ()
    """One for each complete block of the prompt, from block 0 on: each stands for all tokens up to its block's end."""
    age_s: float = 0.0
    """How long ago it arrived, so that it keeps its place where it comes again, refused or after a router's restart."""
    deadline_s: float | None = None
    """It is given up unless it is assigned within this time from now."""
    is_returned: bool = False
    """A replica refused it, so it goes to the head of its queue."""

    def __post_init__(self) -> None:
        # One that compares with nothing would put the lines of the queue out of order, for everybody.
        for name, value in (("age_s", self.age_s), ("deadline_s", self.deadline_s)):
            if value is not None and not isfinite(value):
                raise ValueError(f"{name} of request {self.request_id} is {value}; it must be finite")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningBlock:
    """A sequence that has its lane, or lanes."""

    request_id: str
    num_steps_left: int
    """Passes until its block is finished, as far as can be known: prefill still to do, then masked positions by its
    tokens a pass. The seal rides with the next block's first pass."""
    num_blocks_left: int
    """Blocks that follow the present one at most; with 0 its lanes come free at this block's end."""
    num_pages: int
    """Pages that it holds and that come free with it."""
    num_lanes: int = 1
    """Lanes that come free with it: two for a guided one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaReport:
    """What a replica uses now; sent at block boundaries and at least every heartbeat."""

    replica_id: str
    number: int
    """Rises by one with each report of this replica's life. An older one than the last is void."""
    num_lanes: int
    num_pages: int
    num_lanes_free: int
    num_pages_free: int
    """Free and cached ones: as many as a new sequence could take."""
    num_waiting: int
    """Requests that it has taken and not yet given a lane."""
    num_lanes_waiting: int
    """Lanes that requests without one want; a guided one wants two."""
    running: tuple[RunningBlock, ...]
    pass_seconds: tuple[tuple[int, float], ...]
    """(rows, seconds of a pass of so many rows), measured, rising by rows. Empty before the first pass."""
    prefixes_added: tuple[bytes, ...] = ()
    """Prefix keys that it can share since the report before."""
    prefixes_removed: tuple[bytes, ...] = ()
    has_all_prefixes: bool = False
    """`prefixes_added` is everything there is, not what came since."""
    settled_leases: tuple[str, ...] = ()
    """Leases that it has taken or refused since the report before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """The router's word that a replica has, or is about to have, lanes and pages for a request."""

    lease_id: str
    request_id: str
    replica_id: str
    expected_start_s: float
    """From now: 0 where the replica has room, else the boundary at which it should have."""
    group: str
    """The same for all leases that were let go together, at one boundary: their requests share the passes to come."""


class AssignmentReason(Enum):
    """Why a replica was chosen."""

    PREFIX = "prefix"
    SOONEST = "soonest"


class RejectionReason(Enum):
    """Why a request will not be served."""

    QUEUE_FULL = "queue_full"
    TENANT_LIMIT = "tenant_limit"
    DEADLINE = "deadline"


# Events: what happened.


@dataclass(frozen=True, slots=True)
class Submitted:
    """A request waits for a replica."""

    request: RouteRequest


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """Nobody waits for this request any more; unknown ids are ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class LeaseRefused:
    """A replica had no room for a lease, or was gone. The request comes again, if it comes, as Submitted."""

    lease_id: str


@dataclass(frozen=True, slots=True)
class LeaseUnused:
    """Nobody will use a lease, and no replica was asked: what it reserved is free. Unknown ids are ignored."""

    lease_id: str


@dataclass(frozen=True, slots=True)
class Reported:
    """A replica said how it is."""

    report: ReplicaReport


@dataclass(frozen=True, slots=True)
class ReplicaGone:
    """A replica is known to be dead."""

    replica_id: str


RouterEvent = Submitted | Withdrawn | LeaseRefused | LeaseUnused | Reported | ReplicaGone


# Decisions: what follows.


@dataclass(frozen=True, slots=True)
class Assigned:
    """The request may go to the lease's replica now."""

    lease: Lease
    reason: AssignmentReason
    waited_s: float


@dataclass(frozen=True, slots=True)
class Rejected:
    """The request is given up."""

    request_id: str
    reason: RejectionReason
    retry_after_s: float
    waited_s: float


@dataclass(frozen=True, slots=True)
class PrefixesWanted:
    """The replica's next report should list all its prefixes: one of its reports was missed."""

    replica_id: str


Decision = Assigned | Rejected | PrefixesWanted
