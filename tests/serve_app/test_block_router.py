"""The router's shell as a plain class, around the real policy and without Ray."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from serve_app.block_router import GONE_S, BlockRouter
from serve_app.lease_messages import Queued, RefusalReason, ReplicaLoad, Returned, RouteCall
from serve_app.metrics_table import ROUTER_METRICS
from serve_app.routing.messages import Lease, Rejected, RejectionReason, ReplicaReport, RouteRequest, RunningBlock
from serve_app.routing.policy import RoutingSettings
from tests.records import Clock, Records

pytestmark = pytest.mark.anyio
Plain = BlockRouter.func_or_class


def report(number: int = 1, *, replica_id: str = "one", free: int = 1, running: tuple[str, ...] = ()) -> ReplicaReport:
    blocks = [RunningBlock(request_id=id_, num_steps_left=9, num_blocks_left=1, num_pages=1) for id_ in running]
    return ReplicaReport(
        replica_id=replica_id,
        number=number,
        num_lanes=2,
        num_pages=50,
        num_lanes_free=free,
        num_pages_free=50,
        num_waiting=0,
        num_lanes_waiting=0,
        running=tuple(blocks),
        pass_seconds=((1, 0.01),),
        has_all_prefixes=number == 1,
    )


def route(request_id: str, **fields) -> RouteRequest:
    return RouteRequest(**{"request_id": request_id, "num_prompt_tokens": 5, "max_tokens": 20, **fields})


class Router:
    """A router, what it records, and its clock."""

    def __init__(self, **settings) -> None:
        self.clock, self.records = Clock(100.0), Records()
        self.shell = Plain(RoutingSettings(**settings), recorder_factory=lambda: self.records, clock=self.clock)

    async def report(self, *args, block_size: int = 64, **kwargs):
        return await self.shell.report(report(*args, **kwargs), block_size)

    async def ask(self, request: RouteRequest, returned: Returned | None = None) -> list:
        """All that the router answers."""
        async with asyncio.timeout(30):
            return [answer async for answer in self.shell.assign(RouteCall(request, returned))]

    async def queue(self, request: RouteRequest) -> asyncio.Task[list]:
        """Ask, and go on once it waits."""
        before = self.shell._policy.num_waiting
        task = asyncio.ensure_future(self.ask(request))
        while self.shell._policy.num_waiting == before:
            assert not task.done(), task.result()
            await asyncio.sleep(0)
        return task


@pytest.fixture
def router() -> Router:
    return Router(max_queue=2, prefix_wait_s=0)


async def test_where_a_lane_is_free_the_first_answer_is_the_lease(router):
    await router.report()
    (lease,) = await router.ask(route("a"))
    assert isinstance(lease, Lease) and (lease.replica_id, lease.request_id) == ("one", "a")
    assert router.records.counts[("router_assignments", "soonest")] == 1
    assert router.records.observed["router_group_requests"] == [1]


async def test_the_load_is_what_replicas_said_last_and_what_waits(router):
    await router.report(free=0)
    await router.report(free=1, replica_id="two")
    await router.report(2, free=0, replica_id="two")
    waiting = await router.queue(route("a"))
    router.clock.now += 0.25
    await router.report(2, free=0)
    load = await router.shell.load()
    one = ReplicaLoad(replica_id="one", num_lanes=2, num_lanes_free=0, num_pages=50, num_pages_free=50, num_waiting=0)
    assert load.replicas == (one, replace(one, replica_id="two"))
    assert (load.num_queued, load.oldest_wait_s, load.is_complete) == (1, 0.25, True)
    await router.shell.gone("one")
    assert [each.replica_id for each in (await router.shell.load()).replicas] == ["two"]
    waiting.cancel()


async def test_where_none_is_free_the_caller_hears_so_at_once_and_later_where_to_go(router):
    await router.report(free=0)
    waiting = await router.queue(route("a"))
    assert router.records.gauges["router_queue_requests"] == 1
    await router.report(2)
    queued, lease = await waiting
    assert queued == Queued() and lease.replica_id == "one"
    assert router.records.gauges["router_queue_requests"] == 0
    assert len(router.records.observed[("router_queue_seconds", "assigned")]) == 1


async def test_a_full_queue_refuses_and_says_when_to_come_again(router):
    waiting = [await router.queue(route(name)) for name in "ab"]
    (refused,) = await router.ask(route("c"))
    assert isinstance(refused, Rejected) and refused.reason is RejectionReason.QUEUE_FULL
    assert refused.retry_after_s >= 1
    assert router.records.counts[("router_rejections", "queue_full")] == 1
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_who_leaves_the_queue_makes_room_at_once(router):
    waiting = [await router.queue(route(name)) for name in "ab"]
    waiting[0].cancel()
    await asyncio.gather(waiting[0], return_exceptions=True)
    assert router.records.gauges["router_queue_requests"] == 1
    assert len(router.records.observed[("router_queue_seconds", "cancelled")]) == 1
    waiting[0] = await router.queue(route("c"))
    await router.report()
    assert (await waiting[1])[-1].request_id == "b"
    waiting[0].cancel()
    await asyncio.gather(waiting[0], return_exceptions=True)


async def test_a_lease_that_reached_nobody_is_given_on_at_once(router):
    """It used to keep its lane until the replica's next report, as if the replica had refused it."""
    await router.report(free=1)
    async with aclosing(router.shell.assign(RouteCall(route("a")))) as answers:
        assert isinstance(await anext(answers), Lease)
        other = await router.queue(route("b"))
    assert (await other)[-1].request_id == "b"
    assert router.records.counts[("router_refused_leases", "unused")] == 1


async def test_the_unused_lease_of_a_call_takes_nothing_from_the_same_requests_next_call(router):
    await router.report(free=1)
    async with aclosing(router.shell.assign(RouteCall(route("a")))) as answers:
        assert isinstance(await anext(answers), Lease)
        # Its ingress gave up waiting and asks again, before the call that it has cancelled ends.
        again = await router.queue(route("a"))
    assert (await again)[-1].request_id == "a"
    other = await router.queue(route("b"))
    assert not other.done(), "the second lease counts"
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)


async def test_who_has_left_frees_its_place_and_a_lease_on_the_way_to_it(router):
    await router.report(free=1)
    await router.ask(route("leased"))
    queued = await router.queue(route("queued"))
    other = await router.queue(route("other"))
    await router.shell.withdraw(("queued", "leased", "unknown"))
    assert (await other)[-1].request_id == "other"
    await asyncio.wait({queued})
    assert queued.cancelled() and router.shell._policy.num_waiting == 0 and not router.shell._waiting
    assert len(router.records.observed[("router_queue_seconds", "cancelled")]) == 1


async def test_a_refused_lease_comes_back_with_its_request_and_goes_before_others(router):
    await router.report(free=1)
    (lease,) = await router.ask(route("a"))
    other = await router.queue(route("b"))
    returned = Returned(lease.lease_id, "one", RefusalReason.NO_ROOM)
    again = asyncio.ensure_future(router.ask(route("a", is_returned=True, age_s=1.0), returned))
    while router.shell._policy.num_waiting < 2:
        await asyncio.sleep(0)
    assert router.records.counts[("router_refused_leases", "no_room")] == 1
    await router.report(2, free=1)
    assert (await again)[-1].request_id == "a"
    assert not other.done()
    await router.report(3, free=1, running=("a",))
    assert (await other)[-1].request_id == "b"


async def test_a_replica_that_was_found_gone_gets_nothing_and_is_not_heard_for_a_while(router):
    await router.report(free=2)
    await router.shell.gone("one")
    waiting = await router.queue(route("a"))
    await router.report(2, free=2)
    assert not waiting.done()
    router.clock.now += GONE_S
    await router.report(3, free=2)
    assert (await waiting)[-1].replica_id == "one"


async def test_the_lease_of_a_lost_replica_means_that_it_is_gone(router):
    await router.report(free=2)
    (lease,) = await router.ask(route("a"))
    await router.report(1, replica_id="two", free=2)
    returned = Returned(lease.lease_id, "one", RefusalReason.LOST)
    (again,) = await router.ask(route("a", is_returned=True), returned)
    assert again.replica_id == "two"


async def test_a_deadline_is_kept_though_nothing_happens():
    router = Router()
    waiting = await router.queue(route("a", deadline_s=5.0))
    router.clock.now += 5.1
    await router.shell.check_health()
    _, refused = await waiting
    assert refused.reason is RejectionReason.DEADLINE
    assert len(router.records.observed[("router_queue_seconds", "deadline")]) == 1


async def test_the_timer_wakes_the_policy_when_it_asks_for_it():
    router = Router()
    router.shell._clock = asyncio.get_running_loop().time
    answers = await router.ask(route("a", deadline_s=0.02))
    assert answers[-1].reason is RejectionReason.DEADLINE


async def test_who_asks_again_takes_the_place_of_the_call_before(router):
    first = await router.queue(route("a"))
    second = asyncio.ensure_future(router.ask(route("a")))
    await asyncio.wait({first})
    assert first.cancelled()
    await router.report()
    assert (await second)[-1].request_id == "a"


async def test_a_replica_of_another_age_tells_of_a_restart(router):
    await router.report(7)
    await router.report(8)
    assert router.records.counts["router_restarts_seen"] == 1
    young = Router()
    await young.report(1)
    await young.report(7)
    assert young.records.counts["router_restarts_seen"] == 0


async def test_a_replica_whose_report_was_missed_is_asked_for_its_prefixes(router):
    assert not (await router.report(1)).wants_all_prefixes
    assert (await router.report(3)).wants_all_prefixes


async def test_a_report_is_answered_with_the_state_of_the_queue(router):
    waiting = await router.queue(route("a", age_s=2.5))
    answer = await router.report(free=0)
    assert (answer.num_lanes_queued, answer.oldest_wait_s) == (1, pytest.approx(2.5))
    guided = await router.queue(route("b", num_lanes=2))
    assert (await router.report(2, free=0)).num_lanes_queued == 3
    for task in (waiting, guided):
        task.cancel()
    await asyncio.gather(waiting, guided, return_exceptions=True)
    assert (await router.report(3, free=0)).num_lanes_queued == 0


async def test_the_size_of_a_block_is_what_replicas_say(router):
    await router.report(block_size=16)
    assert router.shell._policy.block_size == 16


async def test_boundaries_are_measured_against_what_was_predicted_when_a_block_began(router):
    def running(number: int, steps_left: int, blocks_left: int) -> ReplicaReport:
        base = report(number, running=("x",))
        block = replace(base.running[0], num_steps_left=steps_left, num_blocks_left=blocks_left)
        return replace(base, running=(block,))

    await router.shell.report(running(1, 50, 1), 64)  # Its end is 0.5 s away.
    router.clock.now += 0.3
    await router.shell.report(running(2, 40, 1), 64)
    router.clock.now += 0.4
    await router.shell.report(running(3, 10, 0), 64)  # It came 0.2 s late, and the last one's is 0.1 s away.
    router.clock.now += 0.05
    await router.report(4)
    assert router.records.observed["router_boundary_error_seconds"] == [pytest.approx(0.2), pytest.approx(0.05)]


async def test_new_limits_hold_for_requests_to_come(router):
    await router.shell.reconfigure({"max_queue": 1, "max_queue_per_tenant": None})
    waiting = await router.queue(route("a"))
    (refused,) = await router.ask(route("b"))
    assert refused.reason is RejectionReason.QUEUE_FULL
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_what_user_config_leaves_out_is_what_the_settings_say(router):
    """A limit that was lifted by taking it out of `user_config` stayed until the router started anew."""
    await router.shell.reconfigure({"max_queue": 7, "max_queue_per_tenant": 5})
    await router.shell.reconfigure({"max_queue": 6})
    settings = router.shell._policy.settings
    assert (settings.max_queue, settings.max_queue_per_tenant) == (6, None)
    await router.shell.reconfigure({})
    assert router.shell._policy.settings.max_queue == 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_queu": 1}, "unknown keys max_queu; known are max_queue"),
        ({"max_queue": "many"}, "max_queue 'many'"),
        ({"max_queue": None}, "max_queue None"),
        ({"max_queue": 0}, "max_queue is 0"),
    ],
    ids=str,
)
async def test_limits_that_are_none_change_nothing(router, config, message):
    with pytest.raises(ValueError, match=message):
        await router.shell.reconfigure(config)
    assert router.shell._policy.settings.max_queue == 2


@pytest.mark.parametrize("config", [{"max_queu": 1}, {"max_queue": "many"}, {"max_queue": 0}], ids=str)
async def test_bad_limits_do_not_end_a_router_that_runs(router, config):
    """Serve ends a replica whose `reconfigure` raises, and its successors: a slip of the pen took the queue away."""
    await router.shell.reconfigure({"max_queue": 3})
    await router.shell.reconfigure(config)
    assert router.shell._policy.settings.max_queue == 3
    await router.shell.reconfigure({"max_queue": 4})
    assert router.shell._policy.settings.max_queue == 4


async def test_every_measurement_is_in_the_table(router):
    await router.report(2)
    (lease,) = await router.ask(route("a"))
    await router.shell.give_back(Returned(lease.lease_id, "one", RefusalReason.NO_ROOM))
    for name, kinds in router.records.kinds.items():
        assert kinds == {(ROUTER_METRICS[name].kind, ROUTER_METRICS[name].labels)}
