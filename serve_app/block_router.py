"""The deployment that keeps the queue: a thin shell around RoutingPolicy. No token passes through it.

One replica. It keeps nothing that cannot be lost: replicas tell it again how they are, requests that wait here come
again or choose by themselves.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from typing import Any

from ray import serve

from .lease_messages import Queued, RefusalReason, ReplicaLoad, ReportAnswer, Returned, RouteCall, ServiceLoad
from .routing.messages import (
    Assigned,
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
from .routing.pass_times import coming_pass_s
from .routing.policy import RoutingPolicy, RoutingSettings
from .telemetry import ServeRecorder, hide_calls_of

logger = logging.getLogger("ray.serve")

LIVE_SETTINGS = frozenset({"max_queue", "max_queue_per_tenant"})
"""Settings that `user_config` may change while requests wait."""
GONE_S = 2.0
"""A replica that somebody found gone is not heard for so long: what it sent before, or while it leaves, is void."""
_SHORTEST_WAKE_S = 0.001

Waiting = asyncio.Future[Assigned | Rejected]


@serve.deployment(name="BlockRouter")
class BlockRouter:
    """Hears from ingresses and replicas, and answers with leases."""

    def __init__(
        self,
        settings: RoutingSettings | None = None,
        *,
        policy_factory: Callable[..., RoutingPolicy] = RoutingPolicy,
        recorder_factory: Callable[[], Any] = ServeRecorder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Several a second from each replica, for ever.
        hide_calls_of("report")
        self._settings = settings or RoutingSettings()
        self._policy = policy_factory(self._settings, lease_prefix=f"{uuid.uuid4().hex[:8]}-")
        self._recorder = recorder_factory()
        self._clock = clock
        self._waiting: dict[str, tuple[Waiting, float]] = {}
        """Of each request in the queue: who waits for it, and when it arrived."""
        self._reports: dict[str, tuple[ReplicaReport, float]] = {}
        self._has_heard = False
        self._is_configured = False
        self._gone: dict[str, float] = {}
        self._wants_prefixes: set[str] = set()
        self._boundaries: dict[str, dict[str, tuple[int, float]]] = {}
        """By replica and request: the blocks that follow the running one, and when that should end."""
        self._timer: asyncio.TimerHandle | None = None

    async def assign(self, call: RouteCall) -> AsyncGenerator[Queued | Lease | Rejected, None]:
        """First of all Queued unless it is decided at once, then the decision. Closing it takes the request back."""
        if call.returned is not None:
            self._return(call.returned)
        request = call.request
        waiting: Waiting = asyncio.get_running_loop().create_future()
        if request.request_id in self._waiting:
            # Its ingress gave up on the call before and asks again.
            self._waiting[request.request_id][0].cancel()
        self._waiting[request.request_id] = (waiting, self._clock() - request.age_s)
        is_passed_on = False
        try:
            self._handle(Submitted(request))
            if not waiting.done():
                yield Queued()
            decision = await waiting
            yield decision.lease if isinstance(decision, Assigned) else decision
            is_passed_on = True
        finally:
            if not is_passed_on:
                self._take_back(request.request_id, waiting)

    async def report(self, report: ReplicaReport, block_size: int) -> ReportAnswer:
        """Take a replica's report. `block_size` is its checkpoint's."""
        now = self._clock()
        if now < self._gone.get(report.replica_id, now):
            return self._answer(wants_all_prefixes=False)
        self._policy.block_size = block_size
        if not self._has_heard and report.number > 1:
            # A replica that has reported before, to somebody who is no more.
            self._recorder.count("router_restarts_seen")
        self._has_heard = True
        self._reports[report.replica_id] = (report, now)
        self._measure_boundaries(report, now)
        self._handle(Reported(report))
        wants_all_prefixes = report.replica_id in self._wants_prefixes
        self._wants_prefixes.discard(report.replica_id)
        return self._answer(wants_all_prefixes=wants_all_prefixes)

    async def give_back(self, returned: Returned) -> None:
        """Take back a lease that its request needs no longer, or that came to nothing without another try."""
        self._return(returned)
        self._handle(None)

    async def withdraw(self, request_ids: tuple[str, ...]) -> None:
        """The clients of these requests have left: free their places, and leases that are on the way to them."""
        for request_id in request_ids:
            found = self._waiting.get(request_id)
            if found is not None:
                self._take_back(request_id, found[0])
                found[0].cancel()
            else:
                self._handle(Withdrawn(request_id))

    async def gone(self, replica_id: str) -> None:
        """A replica was found dead."""
        self._forget(replica_id)

    async def load(self) -> ServiceLoad:
        """What the replicas use that the router hears from, and what waits here."""
        return ServiceLoad(
            replicas=tuple(
                ReplicaLoad(
                    replica_id=report.replica_id,
                    num_lanes=report.num_lanes,
                    num_lanes_free=report.num_lanes_free,
                    num_pages=report.num_pages,
                    num_pages_free=report.num_pages_free,
                    num_waiting=report.num_waiting,
                )
                for report, _ in self._reports.values()
            ),
            num_queued=len(self._waiting),
            oldest_wait_s=self._policy.oldest_wait_s,
        )

    async def ping(self) -> None:
        """Answer that there is a router."""

    async def check_health(self) -> None:
        """Called by Serve: fails if the policy does."""
        self._handle(None)
        self._record_state()

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Called by Serve with `user_config`: new limits of the queue, for requests to come.

        One that it leaves out is as the router's own settings say.
        Raises ValueError for bad ones at the start. Later they are logged and change nothing: what is raised here ends
        the replica, and the next one too.
        """
        try:
            settings = with_limits(self._settings, user_config)
        except ValueError as error:
            if not self._is_configured:
                raise
            logger.error(
                "the limits of the queue stay as they are; mend them before this replica is replaced: %s", error
            )
            return
        self._policy.settings = settings
        self._is_configured = True

    def _handle(self, event: RouterEvent | None) -> None:
        """Let the policy decide, and do what it says."""
        assigned: dict[str, int] = {}
        for decision in self._policy.handle(event, self._clock()):
            if isinstance(decision, PrefixesWanted):
                self._wants_prefixes.add(decision.replica_id)
            elif isinstance(decision, Rejected):
                self._reject(decision)
            else:
                assigned[decision.lease.replica_id] = assigned.get(decision.lease.replica_id, 0) + 1
                self._assign(decision)
        for size in assigned.values():
            self._recorder.observe("router_group_requests", size)
        if event is not None:
            self._record_state()
        self._set_timer()

    def _assign(self, decision: Assigned) -> None:
        lease = decision.lease
        self._recorder.count("router_assignments", reason=decision.reason.value)
        self._recorder.observe("router_queue_seconds", decision.waited_s, outcome="assigned")
        self._settle(lease.request_id, decision)

    def _reject(self, decision: Rejected) -> None:
        is_late = decision.reason is RejectionReason.DEADLINE
        outcome = "deadline" if is_late else "rejected"
        self._recorder.observe("router_queue_seconds", decision.waited_s, outcome=outcome)
        if not is_late:
            self._recorder.count("router_rejections", reason=decision.reason.value)
        self._settle(decision.request_id, decision)

    def _settle(self, request_id: str, decision: Assigned | Rejected) -> None:
        waiting, _ = self._waiting.pop(request_id)
        if not waiting.done():
            waiting.set_result(decision)

    def _take_back(self, request_id: str, waiting: Waiting) -> None:
        """Nobody waits any more: leave the queue, or free the lease that did not reach anybody."""
        found = self._waiting.get(request_id)
        if found is not None and found[0] is waiting:
            del self._waiting[request_id]
            self._recorder.observe("router_queue_seconds", self._clock() - found[1], outcome="cancelled")
            self._handle(Withdrawn(request_id))
        elif waiting.done() and not waiting.cancelled() and isinstance(decision := waiting.result(), Assigned):
            lease = decision.lease
            self._return(Returned(lease.lease_id, lease.replica_id, RefusalReason.UNUSED))
            self._handle(None)

    def _return(self, returned: Returned) -> None:
        self._recorder.count("router_refused_leases", reason=returned.reason.value)
        is_unused = returned.reason is RefusalReason.UNUSED
        # By the lease and not by the request, which may wait again by now, or have another lease.
        self._handle(LeaseUnused(returned.lease_id) if is_unused else LeaseRefused(returned.lease_id))
        if returned.is_replica_gone:
            self._forget(returned.replica_id)

    def _forget(self, replica_id: str) -> None:
        now = self._clock()
        self._gone = {other: until for other, until in self._gone.items() if until > now} | {replica_id: now + GONE_S}
        self._reports.pop(replica_id, None)
        self._handle(ReplicaGone(replica_id))

    def _answer(self, *, wants_all_prefixes: bool) -> ReportAnswer:
        return ReportAnswer(wants_all_prefixes, self._policy.num_lanes_waiting, self._policy.oldest_wait_s)

    def _measure_boundaries(self, report: ReplicaReport, now: float) -> None:
        """Compare the ends of blocks with what was predicted when they were first seen."""
        predicted = self._boundaries.get(report.replica_id, {})
        following: dict[str, tuple[int, float]] = {}
        pass_s = coming_pass_s(report) if report.pass_seconds else None
        for block in report.running:
            before = predicted.get(block.request_id)
            if before is not None and before[0] == block.num_blocks_left:
                following[block.request_id] = predicted.pop(block.request_id)
            elif pass_s is not None:
                following[block.request_id] = (block.num_blocks_left, now + block.num_steps_left * pass_s)
        for _, ends_at in predicted.values():
            self._recorder.observe("router_boundary_error_seconds", abs(now - ends_at))
        self._boundaries[report.replica_id] = following

    def _record_state(self) -> None:
        since = self._clock() - self._policy.settings.replica_timeout_s
        self._reports = {id_: item for id_, item in self._reports.items() if item[1] >= since}
        self._boundaries = {id_: item for id_, item in self._boundaries.items() if id_ in self._reports}
        self._recorder.gauge("router_queue_requests", len(self._waiting))
        self._recorder.gauge("router_oldest_wait_seconds", self._policy.oldest_wait_s)
        self._recorder.gauge("router_replicas", len(self._reports))
        self._recorder.gauge("router_lanes_free", sum(report.num_lanes_free for report, _ in self._reports.values()))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake_at = self._policy.next_wake_s()
        if wake_at is not None:
            delay_s = max(wake_at - self._clock(), _SHORTEST_WAKE_S)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._handle, None)


def with_limits(settings: RoutingSettings, user_config: Mapping[str, Any]) -> RoutingSettings:
    """Settings with what `user_config` names in place of what they say; raises ValueError for bad ones."""
    unknown = sorted(set(user_config) - LIVE_SETTINGS)
    if unknown:
        known = ", ".join(sorted(LIVE_SETTINGS))
        raise ValueError(f"user_config of BlockRouter has unknown keys {', '.join(unknown)}; known are {known}")
    for name, value in user_config.items():
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole and not (value is None and name == "max_queue_per_tenant"):
            raise ValueError(f"user_config of BlockRouter has {name} {value!r}; it must be a whole number")
    return replace(settings, **user_config)
