"""What holds whatever happens: a small world of replicas that lose, delay, refuse and restart, and a router in it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.routing.choice import Work, cheapest, cheapest_of_all
from serve_app.routing.messages import (
    Assigned,
    Decision,
    LeaseRefused,
    PrefixesWanted,
    Rejected,
    ReplicaGone,
    ReplicaReport,
    Reported,
    RouteRequest,
    RouterEvent,
    RunningBlock,
    Submitted,
    Withdrawn,
)
from serve_app.routing.policy import _MAX_PASSED_OVER, RoutingPolicy, RoutingSettings
from serve_app.routing.replica import Replica
from tests.serve_app.routing.helpers import PASS_SECONDS, block, report_of, request_of

STEP_S = 0.01


@dataclass
class FakeReplica:
    """Takes leases while it has lanes, runs each for some steps of time on its lanes, and reports."""

    id: str
    num_lanes: int
    rng: random.Random
    number: int = 0
    running: dict[str, int] = field(default_factory=dict)
    lanes: dict[str, int] = field(default_factory=dict)
    """Of each request that it has taken ever."""
    settled: list[str] = field(default_factory=list)
    num_served: int = 0

    def take(self, decision: Assigned, num_lanes: int) -> bool:
        self.settled.append(decision.lease.lease_id)
        # It may be a little early: its boundary is about to come.
        if self.lanes_of(self.running) > self.num_lanes:
            return False
        # What wants more lanes than there are is refused by the engine at once, and waits for nothing.
        self.running[decision.lease.request_id] = 1 if num_lanes > self.num_lanes else self.rng.randrange(1, 20)
        self.lanes[decision.lease.request_id] = min(num_lanes, self.num_lanes)
        return True

    def lanes_of(self, ids: Iterable[str]) -> int:
        return sum(self.lanes[id] for id in ids)

    def with_lanes(self) -> list[str]:
        """Those that run; the others wait. Nobody passes one that waits."""
        found: list[str] = []
        for id in self.running:
            if self.lanes_of([*found, id]) > self.num_lanes:
                break
            found.append(id)
        return found

    def step(self) -> list[str]:
        self.running = {id: left - 1 for id, left in self.running.items()}
        done = [id for id, left in self.running.items() if left <= 0]
        for id in done:
            del self.running[id]
        self.num_served += len(done)
        return done

    def report(self, has_all: bool) -> ReplicaReport:
        self.number += 1
        settled, self.settled = tuple(self.settled), []
        with_lanes = self.with_lanes()
        in_use = self.lanes_of(with_lanes)
        return ReplicaReport(
            replica_id=self.id,
            number=self.number,
            num_lanes=self.num_lanes,
            num_pages=100,
            num_lanes_free=self.num_lanes - in_use,
            num_pages_free=100 - in_use,
            num_waiting=len(self.running) - len(with_lanes),
            num_lanes_waiting=self.lanes_of(self.running) - in_use,
            running=tuple(
                RunningBlock(
                    request_id=id,
                    num_steps_left=self.running[id] * 2,
                    num_blocks_left=0,
                    num_pages=self.lanes[id],
                    num_lanes=self.lanes[id],
                )
                for id in with_lanes
            ),
            pass_seconds=PASS_SECONDS,
            has_all_prefixes=has_all,
            settled_leases=settled,
        )


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """Chances, in percent, of what may go wrong in each step or message."""

    lost_report: int = 0
    lost_lease: int = 0
    refusal: int = 0
    restart: int = 0
    withdrawal: int = 0


TROUBLES = st.builds(
    Trouble,
    lost_report=st.sampled_from([0, 20, 50]),
    lost_lease=st.sampled_from([0, 20]),
    refusal=st.sampled_from([0, 20]),
    restart=st.sampled_from([0, 2]),
    withdrawal=st.sampled_from([0, 20]),
)


class World:
    """Everything around the router, in steps of 10 ms. Requests that are lost on the way come again."""

    def __init__(self, seed: int, num_replicas: int, num_lanes: int, trouble: Trouble, **changes: object) -> None:
        self.rng = random.Random(seed)
        self.trouble = trouble
        self.policy = RoutingPolicy(RoutingSettings(lease_timeout_s=0.3, **changes))  # type: ignore[arg-type]
        self.now_s = 0.0
        self.num_lanes = num_lanes
        self.replicas = {f"a{i}": FakeReplica(f"a{i}", num_lanes, self.rng) for i in range(num_replicas)}
        self.num_born = num_replicas
        self.wants_all = set(self.replicas)
        self.requests: dict[str, RouteRequest] = {}
        self.arrived_s: dict[str, float] = {}
        self.outcomes: Counter[str] = Counter()
        self.num_submissions: Counter[str] = Counter()
        self.withdrawn: set[str] = set()
        self.done: list[str] = []
        self.rejected: list[str] = []
        self.waits: list[float] = []
        self.pending: list[Callable[[], None]] = []
        self.log: list[Decision] = []

    def chance(self, percent: int) -> bool:
        return self.rng.randrange(100) < percent

    def submit(self, request: RouteRequest, *, is_returned: bool = False) -> None:
        id = request.request_id
        if not is_returned:
            self.requests[id], self.arrived_s[id] = request, self.now_s
        self.num_submissions[id] += 1
        changes = {name: getattr(request, name) for name in RouteRequest.__slots__}
        changes |= {"age_s": self.now_s - self.arrived_s[id], "is_returned": is_returned}
        self.tell(Submitted(RouteRequest(**changes)))

    def tell(self, event: RouterEvent | None) -> None:
        for decision in self.policy.handle(event, self.now_s):
            self.log.append(decision)
            self.follow(decision)
        wake_s = self.policy.next_wake_s()
        assert wake_s is None or wake_s > self.now_s, "it would be woken for ever"

    def follow(self, decision: Decision) -> None:
        if isinstance(decision, PrefixesWanted):
            self.wants_all.add(decision.replica_id)
            return
        id = decision.request_id if isinstance(decision, Rejected) else decision.lease.request_id
        self.outcomes[id] += 1
        assert self.outcomes[id] <= self.num_submissions[id], f"{id} has two outcomes"
        assert id not in self.withdrawn, f"{id} was withdrawn"
        if isinstance(decision, Rejected):
            assert 1 <= decision.retry_after_s <= 60
            self.rejected.append(id)
        else:
            self.waits.append(decision.waited_s)
            self.pending.append(lambda: self.deliver(decision))

    def deliver(self, decision: Assigned) -> None:
        """The ingress brings the request to the replica; what fails is submitted again."""
        request = self.requests[decision.lease.request_id]
        replica = self.replicas.get(decision.lease.replica_id)
        if self.chance(self.trouble.lost_lease):
            self.submit(request, is_returned=True)
        elif replica is None or self.chance(self.trouble.refusal) or not replica.take(decision, request.num_lanes):
            self.tell(LeaseRefused(decision.lease.lease_id))
            self.submit(request, is_returned=True)

    def step(self) -> None:
        self.now_s += STEP_S
        pending, self.pending = self.pending, []
        for action in pending:
            action()
        for replica in list(self.replicas.values()):
            self.done += replica.step()
            if self.chance(self.trouble.restart):
                self.restart(replica)
                continue
            report = replica.report(replica.id in self.wants_all)
            if not self.chance(self.trouble.lost_report):
                self.wants_all.discard(replica.id)
                self.tell(Reported(report))
        waiting = [id for id in self.requests if self.outcomes[id] < self.num_submissions[id]]
        if waiting and self.chance(self.trouble.withdrawal):
            id = self.rng.choice([i for i in waiting if i not in self.withdrawn] or waiting)
            self.withdrawn.add(id)
            self.tell(Withdrawn(id))
        self.tell(None)

    def restart(self, replica: FakeReplica) -> None:
        """Sometimes under its old name, counting from the start, and sometimes nobody says that it is gone."""
        id = replica.id
        if self.chance(50):
            self.num_born += 1
            id = f"a{self.num_born}"
            if self.chance(50):
                self.tell(ReplicaGone(replica.id))
        del self.replicas[replica.id]
        self.replicas[id] = FakeReplica(id, self.num_lanes, self.rng)
        self.wants_all.add(id)
        for lost in replica.running:
            if lost not in self.withdrawn:
                self.submit(self.requests[lost], is_returned=True)

    def run(self, workload: list[tuple[int, RouteRequest]]) -> None:
        for delay, request in workload:
            for _ in range(delay):
                self.step()
            self.submit(request)

    def finish(self) -> None:
        """Until nothing waits; whatever goes wrong ends here."""
        self.trouble = Trouble()
        for _ in range(3000):
            if not self.policy.num_waiting and not self.pending and not any(r.running for r in self.replicas.values()):
                return
            self.step()
        raise AssertionError(f"{self.policy.num_waiting} requests wait for ever")


@st.composite
def workloads(draw: st.DrawFn, max_size: int = 60) -> list[tuple[int, RouteRequest]]:
    sizes = st.tuples(
        st.sampled_from([0, 0, 0, 1, 5]),  # steps before it
        st.integers(-1, 1),  # priority
        st.integers(0, 2),  # tenant
        st.sampled_from([0, 100, 64 * 70]),  # prompt
        st.integers(1, 300),  # tokens
        st.sampled_from([None, None, None, 0.05, 0.5]),  # deadline
        st.sampled_from([1, 1, 2]),  # lanes
    )
    drawn = draw(st.lists(sizes, min_size=1, max_size=max_size))
    return [
        (
            delay,
            request_of(
                f"r{i}",
                priority=priority,
                tenant=f"t{tenant}",
                num_prompt_tokens=prompt,
                max_tokens=tokens,
                deadline_s=deadline_s,
                num_lanes=num_lanes,
                prefix_keys=tuple(bytes([tenant, b]) for b in range(prompt // 64)),
            ),
        )
        for i, (delay, priority, tenant, prompt, tokens, deadline_s, num_lanes) in enumerate(drawn)
    ]


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 4), TROUBLES, workloads(), st.sampled_from([5, 1000]))
def test_every_request_has_exactly_one_outcome_whatever_goes_wrong(
    seed, num_replicas, num_lanes, trouble, workload, max_queue
):
    """Refused, lost, gaps, restarts under the old and a new name, withdrawn: each is served, rejected or withdrawn."""
    world = World(seed, num_replicas, num_lanes, trouble, max_queue=max_queue)
    world.run(workload)
    world.finish()
    for id, num in world.num_submissions.items():
        is_withdrawn_unanswered = id in world.withdrawn and world.outcomes[id] == num - 1
        assert world.outcomes[id] == num or is_withdrawn_unanswered, id
        # Those whose lease was withdrawn on the way may have run too.
        assert (id in world.done) + (id in world.rejected) + (id in world.withdrawn) >= 1, f"{id} is lost"
        assert not (id in world.done and id in world.rejected), id


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32), TROUBLES, workloads())
def test_the_same_events_give_the_same_decisions(seed, trouble, workload):
    def decisions() -> list[Decision]:
        world = World(seed, 3, 2, trouble)
        world.run(workload)
        world.finish()
        return world.log

    assert decisions() == decisions()


LANES = st.sampled_from([1, 1, 2])


@settings(deadline=None, max_examples=150)
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.lists(st.tuples(st.integers(1, 40), LANES), max_size=4)), min_size=1, max_size=4
    ),
    st.lists(LANES, max_size=30),
    st.lists(st.floats(0.001, 0.3), max_size=5),
)
def test_a_replica_never_has_more_leases_than_free_lanes_and_boundaries_that_came(replicas, requests, waits):
    """No report comes after the first ones, no lease times out."""
    policy = RoutingPolicy(RoutingSettings(lease_timeout_s=1e6, replica_timeout_s=1e6, release_ahead_s=0.02))
    ends_s: dict[str, list[float]] = {}
    free: dict[str, int] = {}
    in_all: dict[str, int] = {}
    for i, (num_free, running) in enumerate(replicas):
        id = f"a{i}"
        blocks = [block(f"{id}-{k}", steps, lanes=num_lanes) for k, (steps, num_lanes) in enumerate(running)]
        in_use = sum(num_lanes for _, num_lanes in running)
        report = report_of(id, 1, blocks, num_lanes=num_free + in_use)
        policy.handle(Reported(report), 0.0)
        pass_s = Replica(report, 0.0, policy.settings).pass_times(in_use)
        free[id], in_all[id] = num_free, report.num_lanes
        ends_s[id] = [steps * pass_s for steps, num_lanes in running for _ in range(num_lanes)]
    waiting = {f"r{i}": num_lanes for i, num_lanes in enumerate(requests)}
    leased: Counter[str] = Counter()  # lanes
    now_s = 0.0
    events: list[RouterEvent | None] = [Submitted(request_of(id, num_lanes=n)) for id, n in waiting.items()]
    for wait_s in [0.0, *waits]:
        now_s += wait_s
        for event in [*events, None]:
            for decision in policy.handle(event, now_s):
                assert isinstance(decision, Assigned)
                id = decision.lease.replica_id
                # One that wants more lanes than there are takes all there are, and is refused.
                leased[id] += min(waiting.pop(decision.lease.request_id), max(in_all[id], 1))
        events = []
        room = {id: free[id] + sum(end_s - 0.02 <= now_s for end_s in ends_s[id]) - leased[id] for id in free}
        assert all(lanes >= 0 for lanes in room.values())
        # And nobody waits while there is room, unless behind too many that want more.
        num_guided = sum(num_lanes == 2 for num_lanes in waiting.values())
        if num_guided:
            assert all(lanes < min(2, in_all[id]) for id, lanes in room.items() if in_all[id])
        if len(waiting) > num_guided and num_guided < _MAX_PASSED_OVER:
            assert not any(room.values())


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2))
def test_no_load_makes_anybody_wait_much_longer_than_the_limit(seed, num_replicas, num_lanes, victims_lanes):
    """Twice as much as can be served comes from others, of better priority, without end, and the victim is served.

    Though it wants two lanes, and each one that comes free would be taken by others.
    """
    world = World(seed, num_replicas, num_lanes, Trouble(), max_wait_s=0.5, max_queue=10_000)
    for i in range(num_lanes * num_replicas):
        world.submit(request_of(f"first-{i}", priority=-1))
    victims_lanes = min(victims_lanes, num_lanes)
    world.submit(request_of("victim", priority=5, tenant="small", max_tokens=3000, num_lanes=victims_lanes))
    for step in range(400):
        for i in range(1 + num_replicas * num_lanes // 5):
            world.submit(request_of(f"s{step}-{i}", priority=-1, tenant=f"t{i % 2}", max_tokens=1))
        world.step()
        if "victim" in world.done:
            break
    num_tenants = len({request.tenant for request in world.requests.values()})
    # One of each tenant may go before it; a lane serves one within 20 steps.
    bound_s = 0.5 + 0.2 * (2 + num_tenants / (num_replicas * num_lanes))
    victims = [d for d in world.log if isinstance(d, Assigned) and d.lease.request_id == "victim"]
    assert victims and victims[0].waited_s <= bound_s


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32), workloads())
def test_once_a_request_is_overdue_none_of_its_tenant_that_arrived_later_is_assigned_before_it(seed, workload):
    """Nor any of another tenant that is not overdue. Among requests of one size, so that nobody lacks pages."""
    world = World(seed, 2, 1, Trouble(), max_wait_s=0.2, max_queue=1000)
    small = [
        (delay, request_of(r.request_id, priority=r.priority, tenant=r.tenant, max_tokens=r.max_tokens))
        for delay, r in workload
    ]
    waiting: dict[str, float] = {}
    follow = world.follow

    def watch(decision: Decision) -> None:
        if isinstance(decision, Assigned):
            id = decision.lease.request_id
            waiting.pop(id, None)
            arrived_s, tenant = world.arrived_s[id], world.requests[id].tenant
            is_overdue = arrived_s + 0.2 <= world.now_s
            for other, time_s in waiting.items():
                if time_s < arrived_s and time_s + 0.2 <= world.now_s:
                    assert is_overdue and world.requests[other].tenant != tenant, f"{id} passed {other}"
        follow(decision)

    world.follow = watch  # type: ignore[method-assign]
    for delay, request in small:
        for _ in range(delay):
            world.step()
        waiting[request.request_id] = world.now_s
        world.submit(request)
    world.finish()
    assert not waiting


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 2**32))
def test_large_prompts_are_served_while_small_ones_keep_coming(seed):
    """Small requests fill every page that comes free; an overdue large one claims a replica."""
    rng = random.Random(seed)
    policy = RoutingPolicy(RoutingSettings(max_wait_s=1.0, lease_timeout_s=100.0))
    running: dict[str, tuple[float, int]] = {"first": (0.3, 60)}
    settled: list[str] = []
    now_s, served_s = 0.0, None
    events: list[RouterEvent] = [Submitted(request_of("large", num_prompt_tokens=64 * 80))]
    for step in range(200):
        now_s += STEP_S
        running = {id: (end_s, pages) for id, (end_s, pages) in running.items() if end_s > now_s}
        blocks = [
            RunningBlock(request_id=id, num_steps_left=60, num_blocks_left=1, num_pages=pages)
            for id, (_, pages) in running.items()
        ]
        events += [
            Reported(report_of("a", step + 1, blocks, num_lanes=16, settled_leases=tuple(settled))),
            Submitted(request_of(f"s{step}", num_prompt_tokens=64 * 9, priority=-1)),
        ]
        settled = []
        for event in events:
            for decision in policy.handle(event, now_s):
                if isinstance(decision, Assigned):
                    settled.append(decision.lease.lease_id)
                    id = decision.lease.request_id
                    running[id] = (now_s + rng.uniform(0.1, 0.4), 81 if id == "large" else 10)
                    served_s = now_s if id == "large" else served_s
        events = []
        assert sum(pages for _, pages in running.values()) <= 100
    assert served_s is not None and served_s <= 1.0 + 0.5


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), min_size=1, max_size=6), st.integers(0, 20), LANES)
def test_the_short_list_holds_the_best_of_few_replicas(replicas, num_blocks, num_lanes):
    """With so few replicas everybody is weighed, so the quick choice is the slow one."""
    made = [
        Replica(
            report_of(
                f"a{i}",
                1,
                [
                    RunningBlock(request_id=f"x{k}", num_steps_left=9 * k + 1, num_blocks_left=0, num_pages=1)
                    for k in range(rows)
                ],
                prefixes_added=tuple(bytes([b]) for b in range(cached)),
            ),
            0.0,
            RoutingSettings(),
        )
        for i, (rows, cached) in enumerate(replicas)
    ]
    keys = tuple(bytes([b]) for b in range(num_blocks))
    request = request_of("r", num_prompt_tokens=num_blocks * 64, prefix_keys=keys, num_lanes=num_lanes)
    work = Work.of(request, 64)
    assert cheapest(made, work, 0.1) == cheapest_of_all(made, work, 0.1)


def test_the_short_list_loses_little_among_many_replicas():
    """Its choice costs hardly more than the best of all 64, and is mostly the same."""
    rng = random.Random(0)
    ratios = []
    for _ in range(200):
        made = [
            Replica(
                report_of(
                    f"a{i}",
                    1,
                    [
                        RunningBlock(
                            request_id=f"x{k}",
                            num_steps_left=rng.randrange(1, 65),
                            num_blocks_left=rng.randrange(3),
                            num_pages=1,
                        )
                        for k in range(rng.randrange(2, 6))
                    ],
                    num_lanes=16,
                    prefixes_added=tuple(bytes([b]) for b in range(16)) if rng.random() < 0.2 else (),
                ),
                0.0,
                RoutingSettings(),
            )
            for i in range(64)
        ]
        request = request_of(
            "r", num_prompt_tokens=1024, max_tokens=256, prefix_keys=tuple(bytes([b]) for b in range(16))
        )
        work = Work.of(request, 64)
        quick, slow = cheapest(made, work, 0.0)[0], cheapest_of_all(made, work, 0.0)[0]
        assert quick is not None and slow is not None
        ratios.append(quick.cost_s / slow.cost_s)
    assert min(ratios) >= 1
    assert sum(ratios) / len(ratios) < 1.03


@given(st.lists(st.booleans(), max_size=30))
def test_the_longest_cached_prefix_is_found_by_halving(cached):
    keys = tuple(bytes([i]) for i in range(len(cached)))
    num_cached = next((i for i, is_cached in enumerate(cached) if not is_cached), len(cached))
    replica = Replica(report_of("a", prefixes_added=keys[:num_cached]), 0.0, RoutingSettings())
    assert replica.num_cached(keys) == num_cached


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(-1, 1))
def test_a_light_tenant_waits_no_longer_for_a_flood_than_the_limit_and_its_turn(seed, num_lanes, priority):
    """Overdue requests went by age alone: whoever had sent hundreds kept all others waiting until those were served."""
    world = World(seed, 1, num_lanes, Trouble(), max_wait_s=0.5, max_queue=10_000)
    for step in range(400):
        for i in range(2):
            world.submit(request_of(f"flood-{step}-{i}", tenant="flood", priority=-1))
        if step >= 100 and step % 50 == 0:
            world.submit(request_of(f"light-{step}", tenant="light", priority=priority))
        world.step()
    for _ in range(100):
        world.step()
    waited_s = {
        d.lease.request_id: d.waited_s
        for d in world.log
        if isinstance(d, Assigned) and d.lease.request_id.startswith("light")
    }
    assert len(waited_s) == 6
    # Until a lane comes free for one of the flood, and then for it: a lane serves one within 20 steps. One of its own
    # may stand before it.
    assert max(waited_s.values()) <= 0.5 + 4 * 20 * STEP_S
    served_flood = [d for d in world.log if isinstance(d, Assigned) and d.lease.request_id.startswith("flood")]
    assert max(d.waited_s for d in served_flood) > 1.5, "there was no flood"


def test_tenants_share_a_deployment_by_tokens():
    """One tenant floods it, the other always has a little: while both wait, each gets half."""
    world = World(1, 2, 2, Trouble(), max_queue=10_000, max_wait_s=1e6)
    for i in range(600):
        world.submit(request_of(f"flood-{i}", tenant="flood"))
    for i in range(60):
        world.submit(request_of(f"few-{i}", tenant="few"))
    while world.policy._queue.num_of_tenant("few"):
        world.step()
    served = {d.lease.request_id for d in world.log if isinstance(d, Assigned)}
    num_flood = sum(id.startswith("flood") for id in served)
    # The flood came first and had all lanes of the first moment.
    assert len(served) - num_flood == 60
    assert num_flood == pytest.approx(60, abs=6)
