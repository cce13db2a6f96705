"""The real routing policy, unchanged, with messages that take time."""

from __future__ import annotations

from serve_app.routing.messages import (
    Assigned,
    Decision,
    LeaseRefused,
    PrefixesWanted,
    Rejected,
    ReplicaReport,
    Reported,
    RouteRequest,
    RouterEvent,
    RunningBlock,
    Submitted,
)
from serve_app.routing.policy import RoutingPolicy, RoutingSettings

from .replica import PASS_SECONDS, Running, SimReplica
from .workload import SimRequest
from .world import HOP_S, World

REPORT_DELAY_S = (0.001, 0.005)
"""A report takes so long, evenly."""
HEARTBEAT_S = 1.0
PATIENCE_S = 0.1
"""A replica refuses a lease that finds no lane for so long."""


def key_of(system_prompt: int, block: int) -> bytes:
    """Stands for all tokens of a system prompt up to a block's end."""
    return system_prompt.to_bytes(6, "big") + block.to_bytes(2, "big")


class BlockRouter:
    """Router and ingress: a request goes to the router, its lease comes back, and then it goes to the replica."""

    def __init__(self, settings: RoutingSettings | None = None) -> None:
        self.policy = RoutingPolicy(settings or RoutingSettings(max_queue=10**9))
        self.num_rejected = 0
        self.num_by_prefix = 0
        self._requests: dict[str, SimRequest] = {}
        self._numbers: list[int] = []
        self._settled: list[list[str]] = []
        self._leases: dict[SimRequest, str] = {}
        self._wants_all: set[int] = set()
        self._told: list[dict[int, int]] = []
        self._woken_s = float("inf")

    def start(self, world: World) -> None:
        self.world = world
        for replica in world.replicas:
            self._numbers.append(0)
            self._settled.append([])
            self._told.append({})
            self._wants_all.add(replica.index)
            self._tell(Reported(self._report(replica)))
            self._beat(replica)

    def arrive(self, request: SimRequest) -> None:
        self._requests[str(request.number)] = request
        self._submit(request, is_returned=False)

    def delivered(self, request: SimRequest, replica: SimReplica) -> None:
        """The replica has taken it, into a lane or its queue, and will say so."""
        self._settled[replica.index].append(self._leases[request])

    def boundary(self, replica: SimReplica) -> None:
        """It reports."""
        report = self._report(replica)
        self.world.schedule(
            self.world.now_s + self.world.rng.uniform(*REPORT_DELAY_S), lambda: self._tell(Reported(report))
        )

    def _beat(self, replica: SimReplica) -> None:
        def beat() -> None:
            if self.world.is_busy:
                self.boundary(replica)
                self._beat(replica)

        self.world.schedule(self.world.now_s + HEARTBEAT_S, beat)

    def _submit(self, request: SimRequest, *, is_returned: bool) -> None:
        arrival_s = request.arrival_s

        def submit() -> None:
            shared = range(request.num_shared_blocks)
            prompt = request.system_prompt
            self._tell(
                Submitted(
                    RouteRequest(
                        request_id=str(request.number),
                        num_prompt_tokens=request.num_prompt_tokens,
                        max_tokens=request.max_tokens,
                        tokens_per_step=request.tokens_per_step,
                        prefix_keys=() if prompt is None else tuple(key_of(prompt, block) for block in shared),
                        age_s=self.world.now_s - arrival_s,
                        is_returned=is_returned,
                    )
                )
            )

        self.world.schedule(self.world.now_s + HOP_S, submit)

    def _tell(self, event: RouterEvent | None) -> None:
        for decision in self.policy.handle(event, self.world.now_s):
            self._follow(decision)
        wake_s = self.policy.next_wake_s()
        if wake_s is not None and wake_s < self._woken_s:
            self._woken_s = wake_s
            self.world.schedule(wake_s, self._wake)

    def _wake(self) -> None:
        if self.world.now_s >= self._woken_s:
            self._woken_s = float("inf")
            self._tell(None)

    def _follow(self, decision: Decision) -> None:
        match decision:
            case Assigned(lease, reason, _):
                index = int(lease.replica_id)
                request = self._requests[lease.request_id]
                self.num_by_prefix += reason.value == "prefix"
                self._leases[request] = lease.lease_id
                # Back to the ingress, and from there to the replica.
                self.world.send(request, index, 2 * HOP_S)
                late_s = self.world.now_s + lease.expected_start_s + PATIENCE_S
                self.world.schedule(late_s, lambda: self._refuse(request, index, lease.lease_id))
            case Rejected():
                self.num_rejected += 1
            case PrefixesWanted(replica_id):
                self._wants_all.add(int(replica_id))

    def _refuse(self, request: SimRequest, index: int, lease_id: str) -> None:
        """The replica has had no lane for it in time."""
        if self._leases.get(request) != lease_id or not self.world.take_back(request, index):
            return
        request.num_refusals += 1
        self.world.schedule(self.world.now_s + HOP_S, lambda: self._tell(LeaseRefused(lease_id)))
        self._submit(request, is_returned=True)

    def _report(self, replica: SimReplica) -> ReplicaReport:
        index = replica.index
        self._numbers[index] += 1
        running = [self._block(entry[2], replica) for entry in replica.decoding]
        running += [self._block(prefilling, replica) for prefilling in replica.prefilling]
        settled, self._settled[index] = tuple(self._settled[index]), []
        has_all = index in self._wants_all
        self._wants_all.discard(index)
        added, removed = self._prefix_news(replica, has_all)
        return ReplicaReport(
            replica_id=str(index),
            number=self._numbers[index],
            num_lanes=replica.num_lanes,
            num_pages=replica.cache.num_pages,
            num_lanes_free=replica.num_lanes - replica.num_running,
            num_pages_free=replica.cache.num_available,
            num_waiting=len(replica.waiting),
            num_lanes_waiting=len(replica.waiting),
            running=tuple(running),
            pass_seconds=PASS_SECONDS,
            prefixes_added=added,
            prefixes_removed=removed,
            has_all_prefixes=has_all,
            settled_leases=settled,
        )

    def _block(self, running: Running, replica: SimReplica) -> RunningBlock:
        request = running.request
        num_left = running.end_pass - replica.pass_at(self.world.now_s) if running.end_pass else request.num_passes(0)
        num_after = request.max_blocks - 1 - running.block
        return RunningBlock(
            request_id=str(request.number),
            num_steps_left=num_left,
            num_blocks_left=num_after,
            num_pages=request.num_prompt_blocks + running.block + 1,
        )

    def _prefix_news(self, replica: SimReplica, has_all: bool) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Keys that came and went since the report before, or all that there are."""
        told, cache = self._told[replica.index], replica.cache
        if has_all:
            told.clear()
        added: list[bytes] = []
        removed: list[bytes] = []
        for group in sorted(cache.groups if has_all else cache.changed):
            before, size = told.get(group, 0), cache.num_found(group)
            added += [key_of(group, block) for block in range(before, size)]
            removed += [key_of(group, block) for block in range(size, before)]
            told[group] = size
        cache.changed.clear()
        return tuple(added), tuple(removed)
