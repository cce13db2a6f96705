"""The router's policy: events in, decisions out.

No Ray, no clock, no waiting: the caller brings the time and does what the decisions say, so the same code runs in the
router, in a simulator and in tests that take milliseconds.
"""

from __future__ import annotations

from collections import deque

from .choice import Candidate, Work, cheapest, distance, sooner_with_prefix
from .messages import (
    BLOCK_SIZE,
    Assigned,
    AssignmentReason,
    Decision,
    Lease,
    LeaseRefused,
    LeaseUnused,
    PrefixesWanted,
    Rejected,
    RejectionReason,
    ReplicaGone,
    ReplicaReport,
    Reported,
    RouterEvent,
    Submitted,
    Withdrawn,
)
from .queue import Waiting, WaitingQueue
from .replica import NEVER, Replica
from .settings import RoutingSettings

__all__ = ["RoutingPolicy", "RoutingSettings"]

_MAX_PASSED_OVER = 8
"""So many requests that find no room, for their size or their prefix, are passed over by smaller ones behind them."""
_NUM_RATE_SAMPLES = 128
_NUM_TIMEOUTS_UNTIL_FORGOTTEN = 10
_RETRY_AFTER_S = (1.0, 60.0)
"""Bounds of what a rejected request is told."""


class RoutingPolicy:
    """Keeps the waiting requests and what is known of each replica; binds one to the other as late as it may.

    - A request is assigned while some replica has its lanes and pages, or will have within `release_ahead_s`.
      Among several the cheapest is chosen (see choice.py). Otherwise it waits here, bound to nobody.
    - Order of service is that of WaitingQueue. Requests that do not fit anywhere, or wait for a prefix, are passed over
      by a few behind them. Once such a request is overdue it claims a replica, which gets nothing else until it fits.
    - What a lease reserves counts until its replica's report names it, settled or running, or until it times out.
      A refused one counts until the next report, so a replica is not asked twice on the same mistaken news. One that
      was never used counts no longer.
    """

    def __init__(self, settings: RoutingSettings | None = None, *, lease_prefix: str = "") -> None:
        """`lease_prefix` begins every lease's id: with another one, a new router's leases are never an old one's.

        `settings` may be replaced later: limits of the queue and `prefix_wait_s` then change at once, the other
        times only for replicas that are new; `max_wait_s` stays.
        """
        self.settings = settings or RoutingSettings()
        self.block_size = BLOCK_SIZE
        """Positions of a block, and of a page: what replicas say."""
        self._lease_prefix = lease_prefix
        self._queue = WaitingQueue(self.settings.max_wait_s)
        self._replicas: dict[str, Replica] = {}
        self._claims: dict[str, Waiting] = {}  # by replica
        self._assigned_s: deque[float] = deque(maxlen=_NUM_RATE_SAMPLES)
        self._num_leases = 0
        self._num_releases = 0
        self._now_s = -NEVER
        self._decisions: list[Decision] = []

    @property
    def num_waiting(self) -> int:
        """Requests that wait here."""
        return len(self._queue)

    @property
    def num_lanes_waiting(self) -> int:
        """Lanes that waiting requests want; a guided one wants two."""
        return self._queue.num_lanes

    @property
    def oldest_wait_s(self) -> float:
        """How long the oldest of them has waited, as of the last event; 0 where none waits."""
        oldest = self._queue.oldest
        return max(self._now_s - oldest.arrived_s, 0.0) if oldest is not None else 0.0

    def handle(self, event: RouterEvent | None, now_s: float) -> list[Decision]:
        """Take in what happened, None for nothing but the passing of time, and decide what can be decided.

        `now_s` never falls. Every submitted request gets exactly one Assigned or Rejected, or is withdrawn. One that is
        submitted again while it waits takes its own earlier place, and the two get one decision.
        """
        self._now_s = max(self._now_s, now_s)
        self._decisions = []
        self._num_releases += 1
        submitted = None
        match event:
            case Submitted(request):
                submitted = self._queue.add(request, self._now_s)
            case Withdrawn(request_id):
                self._withdraw(request_id)
            case LeaseRefused(lease_id):
                self._refuse(lease_id)
            case LeaseUnused(lease_id):
                self._free(lease_id)
            case Reported(report):
                self._hear(report)
            case ReplicaGone(replica_id):
                self._forget(replica_id)
            case None:
                pass
        self._dispatch()
        while self._queue.next_deadline_s <= self._now_s:
            self._reject(self._queue.next_deadline, RejectionReason.DEADLINE)
        if submitted is not None:
            self._check_limits(submitted)
        return self._decisions

    def next_wake_s(self) -> float | None:
        """When `handle` should be called again though nothing happened; None: no earlier than the next event."""
        if not self._queue:
            return None
        now_s = self._now_s
        times = [self._queue.next_deadline_s, self._queue.next_overdue_s(now_s)]
        heard = [replica for replica in self._replicas.values() if replica.heard_until_s >= now_s]
        for num_lanes in self._queue.lanes_wanted:
            times += [replica.opens_for(num_lanes) for replica in heard]
        times += [replica.next_expiry_s for replica in heard if replica.num_leases]
        wake_s = min((time_s for time_s in times if time_s > now_s), default=NEVER)
        return None if wake_s == NEVER else wake_s

    # Events.

    def _withdraw(self, request_id: str) -> None:
        waiting = self._queue.find(request_id)
        if waiting is not None:
            self._remove(waiting)
        for replica in self._replicas.values():
            if replica.num_leases:
                replica.cancel(request_id)

    def _refuse(self, lease_id: str) -> None:
        for replica in self._replicas.values():
            if replica.refused(lease_id):
                return

    def _free(self, lease_id: str) -> None:
        for replica in self._replicas.values():
            if replica.unused(lease_id):
                return

    def _hear(self, report: ReplicaReport) -> None:
        replica = self._replicas.get(report.replica_id)
        if replica is None:
            self._forget_the_silent()
            replica = self._replicas[report.replica_id] = Replica(report, self._now_s, self.settings)
        else:
            replica.hear(report, self._now_s)
        if replica.wants_prefixes(self._now_s):
            self._decisions.append(PrefixesWanted(report.replica_id))

    def _forget_the_silent(self) -> None:
        """Forget replicas of whose end nobody told: a new one comes under a new name."""
        silent_s = _NUM_TIMEOUTS_UNTIL_FORGOTTEN * self.settings.replica_timeout_s
        for replica in list(self._replicas.values()):
            if self._now_s > replica.reported_s + silent_s:
                self._forget(replica.id)

    def _forget(self, replica_id: str) -> None:
        self._replicas.pop(replica_id, None)
        claimer = self._claims.pop(replica_id, None)
        if claimer is not None:
            claimer.claimed_replica = None

    # Decisions.

    def _dispatch(self) -> None:
        """Assign as much as there is room for."""
        skipped: set[int] = set()
        num_passed_over = 0
        while num_passed_over < _MAX_PASSED_OVER:
            waiting = next((w for w in self._queue.in_order(self._now_s) if w.number not in skipped), None)
            if waiting is None:
                return
            open_replicas = self._open_replicas()
            if not open_replicas:
                return
            if not self._try_to_assign(waiting, open_replicas):
                skipped.add(waiting.number)
                # Nobody passes a claim: the others go elsewhere.
                num_passed_over += waiting.claimed_replica is None

    def _open_replicas(self) -> list[Replica]:
        now_s = self._now_s
        found = []
        for replica in self._replicas.values():
            if replica.next_expiry_s <= now_s:
                replica.expire(now_s)
            if replica.opens_s <= now_s <= replica.heard_until_s:
                found.append(replica)
        return found

    def _try_to_assign(self, waiting: Waiting, open_replicas: list[Replica]) -> bool:
        """Assign a request, or see to it that it will find room."""
        claims = self._claims
        allowed = [r for r in open_replicas if claims.get(r.id, waiting) is waiting] if claims else open_replicas
        work = Work.of(waiting.request, self.block_size)
        best, is_by_prefix = cheapest(allowed, work, self._now_s)
        is_overdue = self._queue.is_overdue(waiting, self._now_s)
        if best is None:
            if is_overdue:
                self._claim(waiting, work, allowed)
            return False
        if not is_overdue and self._is_worth_waiting(waiting, work, best):
            waiting.has_waited_for_prefix = True
            return False
        is_by_prefix = is_by_prefix or (waiting.has_waited_for_prefix and best.num_cached > 0)
        self._assign(waiting, work, best, AssignmentReason.PREFIX if is_by_prefix else AssignmentReason.SOONEST)
        return True

    def _is_worth_waiting(self, waiting: Waiting, work: Work, best: Candidate) -> bool:
        """True if a full replica that has the prefix would finish the first block sooner."""
        until_s = waiting.submitted_s + self.settings.prefix_wait_s
        if not work.request.prefix_keys or until_s <= self._now_s:
            return False
        closed = (r for r in self._replicas.values() if r.heard_until_s >= self._now_s and r.id not in self._claims)
        return sooner_with_prefix(closed, work, best, self._now_s, until_s) is not None

    def _claim(self, waiting: Waiting, work: Work, allowed: list[Replica]) -> None:
        """Keep others from the replica that is nearest to having the pages it needs, and then the lanes."""
        claimed = self._replicas.get(waiting.claimed_replica or "")
        if claimed is not None and claimed.heard_until_s >= self._now_s:
            return
        self._release_claim(waiting)
        if allowed:
            nearest = min(allowed, key=lambda r: distance(r, work, self._now_s))
            waiting.claimed_replica = nearest.id
            self._claims[nearest.id] = waiting

    def _assign(self, waiting: Waiting, work: Work, chosen: Candidate, reason: AssignmentReason) -> None:
        request, replica = waiting.request, chosen.replica
        self._remove(waiting, served_s=self._now_s)
        self._num_leases += 1
        lease = Lease(
            lease_id=f"{self._lease_prefix}{self._num_leases}",
            request_id=request.request_id,
            replica_id=replica.id,
            expected_start_s=replica.starts_in_s(self._now_s, work.num_lanes),
            group=f"{self._lease_prefix}{self._num_releases}-{replica.id}",
        )
        replica.promise(lease, self._num_leases, work.num_lanes, work.num_pages, self._now_s)
        self._assigned_s.append(self._now_s)
        self._decisions.append(Assigned(lease, reason, self._now_s - waiting.arrived_s))

    def _check_limits(self, waiting: Waiting) -> None:
        """Reject a request that nobody could take at once, where too many wait already."""
        request = waiting.request
        if request.is_returned or self._queue.find(request.request_id) is not waiting:
            return
        per_tenant = self.settings.max_queue_per_tenant
        if len(self._queue) > self.settings.max_queue:
            self._reject(waiting, RejectionReason.QUEUE_FULL)
        elif per_tenant is not None and self._queue.num_of_tenant(request.tenant) > per_tenant:
            self._reject(waiting, RejectionReason.TENANT_LIMIT)

    def _reject(self, waiting: Waiting, reason: RejectionReason) -> None:
        retry_after_s = self._retry_after_s(waiting, reason)
        self._remove(waiting)
        self._decisions.append(
            Rejected(waiting.request.request_id, reason, retry_after_s, self._now_s - waiting.arrived_s)
        )

    def _retry_after_s(self, waiting: Waiting, reason: RejectionReason) -> float:
        """When those that wait now should be gone, at the rate at which requests were assigned lately."""
        lowest, highest = _RETRY_AFTER_S
        num_before = len(self._queue)
        if reason is RejectionReason.TENANT_LIMIT:
            # Its own ones go at its share of the rate.
            num_before = min(num_before, self._queue.num_of_tenant(waiting.request.tenant) * self._queue.num_tenants)
        if len(self._assigned_s) < 2:
            return lowest if self._replicas else highest
        span_s = self._now_s - self._assigned_s[0]
        return min(max(num_before * span_s / (len(self._assigned_s) - 1), lowest), highest)

    def _remove(self, waiting: Waiting, *, served_s: float | None = None) -> None:
        self._queue.remove(waiting, served_s=served_s)
        self._release_claim(waiting)

    def _release_claim(self, waiting: Waiting) -> None:
        if waiting.claimed_replica is not None:
            self._claims.pop(waiting.claimed_replica, None)
            waiting.claimed_replica = None
