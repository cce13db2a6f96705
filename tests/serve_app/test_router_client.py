"""What the ingress does when the router or a replica fails, with handles that do what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from engine import (
    AttributionParams,
    Embedding,
    EmbedTokens,
    EngineStopped,
    Finished,
    GenerateRequest,
    QueueFull,
    SamplingParams,
    Started,
    prefix_keys,
)
from serve_app.completions import Caller
from serve_app.config import IngressSettings
from serve_app.errors import ApiError
from serve_app.lease_messages import (
    Queued,
    Refusal,
    RefusalReason,
    ReplicaLoad,
    Returned,
    RouteCall,
    ServiceLoad,
    Welcome,
)
from serve_app.router_client import RoutedEngineClient
from serve_app.routing.messages import PREFIX_KEY_BYTES, Lease, Rejected, RejectionReason, RouteRequest
from tests.records import Records

pytestmark = pytest.mark.anyio

DIED = ActorDiedError()
GONE = ActorUnavailableError("gone", None)
FIRST, SECOND = (Started("r", 0, 16, 40, 8, 0, ()),), (Finished("r", None),)
HANG = object()
"""Never comes."""


class Response:
    """Yields items, raises those that are exceptions, and knows that it was cancelled."""

    def __init__(self, items: list[Any]) -> None:
        self.items, self.is_cancelled = items, False
        self._iterator = self._run()

    async def _run(self) -> AsyncIterator[Any]:
        for item in self.items:
            if item is HANG:
                await asyncio.Event().wait()
            if isinstance(item, Exception):
                raise item
            yield item

    def __aiter__(self) -> Response:
        return self

    async def __anext__(self) -> Any:
        return await anext(self._iterator)

    def __await__(self):
        return self.__anext__().__await__()

    def cancel(self) -> None:
        self.is_cancelled = True


class Method:
    def __init__(self, handle: Handle, name: str) -> None:
        self.handle, self.name = handle, name

    def remote(self, *args: Any) -> Response:
        response = Response(self.handle.script(self.name, args, self.handle.session_id))
        self.handle.calls.append((self.name, args, self.handle.session_id))
        self.handle.responses.append(response)
        return response


class Handle:
    """A DeploymentHandle. `script` (method, arguments, session id) -> what the call brings."""

    def __init__(
        self, script: Callable[[str, tuple, str], list[Any]], parent: Handle | None = None, session_id=""
    ) -> None:
        self.script, self.session_id = script, session_id
        self.calls: list[Any] = parent.calls if parent else []
        self.responses: list[Response] = parent.responses if parent else []

    def options(self, *, session_id: str = "", **options: Any) -> Handle:
        return Handle(self.script, self, session_id or self.session_id)

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)

    def of(self, name: str) -> list[Any]:
        return [(args, session_id) for method, args, session_id in self.calls if method == name]


class Scene:
    """A client between an engine and a router that play their parts: one list of items a call, in turn."""

    def __init__(self, takes: list[list[Any]], decisions: list[list[Any]] | None = None, **settings: Any) -> None:
        takes = list(takes)
        self.records = Records()
        self.now = 0.0
        decisions = None if decisions is None else list(decisions)
        self.engine = Handle(lambda name, args, session: takes.pop(0) if name == "take" else [{}])
        self.pings: list[list[Any]] = []
        self.router = Handle(self._answer(decisions))
        self.client = RoutedEngineClient(
            self.engine,
            None if decisions is None else self.router,
            block_size=16,
            settings=IngressSettings(**{"connect_timeout_s": 0.05, "router_timeout_s": 0.05, **settings}),
            recorder=self.records,
            clock=lambda: self.now,
        )

    def _answer(self, decisions: list[list[Any]] | None) -> Callable[[str, tuple, str], list[Any]]:
        def answer(name: str, args: tuple, session_id: str) -> list[Any]:
            if name == "assign":
                return decisions.pop(0)
            return self.pings.pop(0) if name == "ping" and self.pings else [None]

        return answer

    async def run(self, caller: Caller | None = None, **fields: Any) -> list[Any]:
        async with asyncio.timeout(30):
            return [batch async for batch in self.client.generate(request(**fields), caller)]

    def route(self, call: int = 0) -> RouteRequest:
        return self.engine.of("take")[call][0][1]

    def asked(self, call: int) -> RouteCall:
        return self.router.of("assign")[call][0][0]


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"prompt_token_ids": tuple(range(40)), "max_tokens": 9, "request_id": "r", **fields})


def lease(replica: str, number: int = 1) -> Lease:
    return Lease(lease_id=f"l{number}", request_id="r", replica_id=replica, expected_start_s=0.0, group="g")


async def test_a_request_goes_where_its_lease_says():
    scene = Scene([[Welcome("a"), FIRST, SECOND]], [[lease("a")]])
    assert await scene.run() == [FIRST, SECOND]
    ((args, session_id),) = scene.engine.of("take")
    assert (session_id, args[2]) == ("a", lease("a"))
    assert all(response.is_cancelled for response in scene.router.responses), "a finished call is let go"
    assert not scene.records.counts


async def test_a_wait_in_the_queue_is_no_failure_of_the_router():
    scene = Scene([[Welcome("a"), SECOND]], [[Queued(), lease("a")]], router_timeout_s=0.05)
    assert await scene.run() == [SECOND]
    assert not scene.records.counts


async def test_the_router_learns_what_it_needs_and_nothing_of_the_text():
    scene = Scene([[Welcome("a"), SECOND]], [[lease("a")]])
    sampling = SamplingParams(tokens_per_step=3)
    caller = Caller(tenant="t", deadline_s=7.0)
    await scene.run(caller, sampling=sampling, priority=-2, attribution=AttributionParams())
    route = scene.asked(0).request
    assert (route.tenant, route.priority, route.tokens_per_step, route.deadline_s) == ("t", -2, 3.0, 7.0)
    assert (route.num_prompt_tokens, route.max_tokens, route.age_s, route.is_returned) == (40, 9, 0.0, False)
    assert route.prefix_keys == tuple(key[:PREFIX_KEY_BYTES] for key in prefix_keys(tuple(range(40)), 16))
    assert len(route.prefix_keys) == 2 and route.num_lanes == 1


async def test_the_router_learns_that_a_guided_request_takes_two_lanes():
    scene = Scene([[Welcome("a"), SECOND]], [[lease("a")]])
    await scene.run(sampling=SamplingParams(cfg_scale=1.5))
    assert scene.asked(0).request.num_lanes == 2


async def test_a_refused_lease_goes_back_with_its_request():
    refusal = Refusal("a", RefusalReason.NO_ROOM)
    scene = Scene([[refusal], [Welcome("b"), SECOND]], [[lease("a")], [lease("b", 2)]])
    assert await scene.run(Caller(deadline_s=5.0)) == [SECOND]
    assert scene.asked(0).returned is None
    assert scene.asked(1).returned == Returned("l1", "a", RefusalReason.NO_ROOM)
    assert scene.asked(1).request.is_returned
    assert [session for _, session in scene.engine.of("take")] == ["a", "b"]


async def test_a_request_that_is_refused_again_and_again_waits_at_some_replica():
    refusal = Refusal("a", RefusalReason.NO_ROOM)
    scene = Scene([[refusal], [refusal], [Welcome("b"), SECOND]], [[lease("a")], [lease("a", 2)]], max_tries=3)
    assert await scene.run() == [SECOND]
    assert [args[2] for args, _ in scene.engine.of("take")] == [lease("a"), lease("a", 2), None]


@pytest.mark.parametrize("failure", [DIED, GONE, EngineStopped("its thread ended"), HANG], ids=repr)
async def test_a_replica_lost_before_anything_was_sent_is_replaced(failure):
    scene = Scene([[failure], [Welcome("b"), FIRST, SECOND]], [[lease("a")], [lease("b", 2)]])
    assert await scene.run() == [FIRST, SECOND]
    assert scene.records.counts == {"ingress_retries": 1}
    returned = scene.asked(1).returned
    assert returned == Returned("l1", "a", RefusalReason.LOST) and returned.is_replica_gone
    assert all(response.is_cancelled for response in scene.engine.responses if response.items[0] is failure)


async def test_a_replica_lost_after_its_welcome_and_before_its_first_event_is_replaced_too():
    scene = Scene([[Welcome("a"), DIED], [Welcome("b"), SECOND]], [[lease("a")], [lease("b", 2)]])
    assert await scene.run() == [SECOND]


@pytest.mark.parametrize("failure", [DIED, GONE, EngineStopped("its thread ended")], ids=repr)
async def test_a_replica_lost_later_is_the_clients_to_know(failure):
    scene = Scene([[Welcome("a"), FIRST, failure]], [[lease("a")]])
    batches = []
    with pytest.raises(ApiError) as raised:
        async for batch in scene.client.generate(request()):
            batches.append(batch)
    assert batches == [FIRST]
    assert (raised.value.status, raised.value.code) == (503, "engine_unavailable")
    await asyncio.sleep(0)
    # The router is told at once, which would find out only later.
    assert scene.router.of("give_back")[0][0] == (Returned("l1", "a", RefusalReason.LOST),)


@pytest.mark.parametrize(("items", "num_tries"), [([], 2), ([Welcome("a")], 2), ([Welcome("a"), FIRST], 1)], ids=str)
async def test_a_stream_that_ends_before_its_last_event_has_not_ended_well(items, num_tries):
    scene = Scene([items, [Welcome("b"), SECOND]], [[lease("a")], [lease("b", 2)]])
    if num_tries == 2:
        assert await scene.run() == [SECOND]
    else:
        with pytest.raises(ApiError) as raised:
            await scene.run()
        assert raised.value.code == "engine_unavailable"
    assert len(scene.engine.of("take")) == num_tries


async def test_no_more_than_so_many_replicas_are_tried():
    scene = Scene([[DIED]] * 3, [[lease("a")], [lease("b", 2)]], max_tries=3)
    with pytest.raises(ApiError) as raised:
        await scene.run()
    assert raised.value.status == 503
    assert scene.records.counts["ingress_retries"] == 2


async def test_an_error_of_the_request_is_not_tried_elsewhere():
    scene = Scene([[Welcome("a"), QueueFull("full")]], [[lease("a")]])
    with pytest.raises(ApiError) as raised:
        await scene.run()
    assert (raised.value.status, raised.value.code) == (429, "queue_full")
    assert len(scene.engine.of("take")) == 1


@pytest.mark.parametrize(
    "failure", [[DIED], [GONE], [HANG], [Queued(), DIED], []], ids=["died", "gone", "silent", "died later", "ended"]
)
async def test_a_router_that_fails_is_done_without_until_it_answers_again(failure):
    scene = Scene([[Welcome("b"), SECOND]] * 4, [failure, [lease("a")]], router_retry_s=0.01)
    scene.pings = [[DIED], [HANG]]
    assert await scene.run() == [SECOND]
    assert scene.engine.of("take")[0][1] == "", "Serve's choice, not a lease's"
    # While somebody looks for it no request waits for it.
    assert await scene.run() == [SECOND]
    assert scene.records.counts == {"ingress_router_fallbacks": 2}
    assert len(scene.router.of("assign")) == 1
    async with asyncio.timeout(30):
        await scene.client._notes._search
    assert len(scene.router.of("ping")) == 3
    assert await scene.run() == [SECOND]
    assert scene.engine.of("take")[2][1] == "a"


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        (RejectionReason.QUEUE_FULL, 429, "queue_full"),
        (RejectionReason.TENANT_LIMIT, 429, "tenant_limit"),
        (RejectionReason.DEADLINE, 408, "deadline_exceeded"),
    ],
)
async def test_a_rejection_is_an_error_that_says_when_to_come_again(reason, status, code):
    rejected = Rejected(request_id="r", reason=reason, retry_after_s=2.1, waited_s=4.0)
    scene = Scene([], [[Queued(), rejected]])
    with pytest.raises(ApiError) as raised:
        await scene.run()
    assert (raised.value.status, raised.value.code, raised.value.retry_after_s) == (status, code, 3)
    assert not scene.engine.of("take")


async def test_who_leaves_the_queue_takes_the_request_back():
    scene = Scene([], [[Queued(), HANG]])
    waiting = asyncio.ensure_future(scene.run())
    while not scene.router.responses:
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert scene.router.responses[0].is_cancelled
    assert not scene.engine.of("take")


@pytest.mark.parametrize(
    ("decision", "takes", "is_known"),
    [([HANG], [], True), ([Queued(), HANG], [], True), ([lease("a")], [[HANG]], True),
     ([lease("a")], [[Welcome("a"), HANG]], False)],
    ids=["asking", "queued", "leased", "taken"],
)  # fmt: skip
async def test_who_leaves_before_a_replica_has_answered_is_withdrawn_from_the_router(decision, takes, is_known):
    """Closing the call to the router was all: a lease on its way, or not yet taken, kept its lane until its timeout."""
    scene = Scene(takes, [decision], connect_timeout_s=30, router_timeout_s=30)
    waiting = asyncio.ensure_future(scene.run())
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await scene.client._notes.settled()
    assert scene.router.responses[0].is_cancelled and scene.engine.responses[-1].is_cancelled is bool(takes)
    assert [args for args, _ in scene.router.of("withdraw")] == ([(("r",),)] if is_known else [])


REQUEST: ContextVar[str] = ContextVar("REQUEST")


@pytest.mark.parametrize("call", ["withdraw", "ping"])
async def test_what_the_router_is_asked_beside_a_request_is_not_cancelled_with_it(call):
    """Serve cancels all calls that were made in the name of a request together with it, and finds them by context."""
    scene = Scene([[Welcome("a"), SECOND]], [[Queued(), HANG] if call == "withdraw" else [DIED]], router_retry_s=0.001)
    callers: list[tuple[str, str | None]] = []
    calls = scene.client._notes._router
    answer = calls.script

    def note_caller(name: str, args: tuple, session_id: str) -> list[Any]:
        callers.append((name, REQUEST.get(None)))
        return answer(name, args, session_id)

    calls.script = note_caller
    REQUEST.set("r")
    waiting = asyncio.ensure_future(scene.run())
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    async with asyncio.timeout(30):
        while not callers:
            await asyncio.sleep(0.001)
    assert callers[0] == (call, None)


async def test_of_many_that_leave_together_the_router_is_told_in_one_message():
    scene = Scene([], [[Queued(), HANG] for _ in range(50)])
    waiting = [asyncio.ensure_future(scene.run(request_id=f"r{i}")) for i in range(50)]
    await asyncio.sleep(0.02)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await scene.client._notes.settled()
    withdrawn = [id_ for (ids,), _ in scene.router.of("withdraw") for id_ in ids]
    assert sorted(withdrawn) == sorted(f"r{i}" for i in range(50))
    assert len(scene.router.of("withdraw")) < 5


async def test_closing_a_stream_cancels_the_call_to_its_replica():
    scene = Scene([[Welcome("a"), FIRST, HANG]], [[lease("a")]])
    async with aclosing(scene.client.generate(request())) as batches:
        assert await anext(batches) == FIRST
    assert scene.engine.responses[-1].is_cancelled


@pytest.mark.parametrize("decisions", [None, [[DIED]]], ids=["no router", "router lost"])
async def test_without_the_router_a_request_that_has_waited_its_time_at_a_replica_is_given_up(decisions):
    """Only the router looked at the time, so whoever asked for two seconds waited for as long as it took."""
    scene = Scene([[Welcome("a"), HANG]], decisions)
    with pytest.raises(ApiError) as raised:
        await scene.run(Caller(deadline_s=0.02))
    assert (raised.value.status, raised.value.code, raised.value.retry_after_s) == (408, "deadline_exceeded", 1)
    assert scene.engine.responses[-1].is_cancelled
    assert len(scene.engine.of("take")) == 1
    assert "ingress_retries" not in scene.records.counts


async def test_the_time_that_a_request_may_wait_ends_with_its_first_event():
    scene = Scene([[Welcome("a"), FIRST, HANG]])
    async with aclosing(scene.client.generate(request(), Caller(deadline_s=0.02))) as batches:
        assert await anext(batches) == FIRST
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(batches), 0.1)


async def test_the_time_that_a_lost_replica_took_counts_as_waited():
    scene = Scene([[Welcome("a"), TimeoutError("its own")], [Welcome("b"), HANG]])
    takes = scene.client._streams.script

    def take(name: str, args: tuple, session_id: str) -> list[Any]:
        scene.now = 60.0 * len(scene.engine.of("take"))
        return takes(name, args, session_id)

    scene.client._streams.script = take
    with pytest.raises(ApiError, match=r"waited 60\.0 s"):
        await scene.run(Caller(deadline_s=30.0))


async def test_without_a_router_replicas_are_chosen_here():
    scene = Scene([[Welcome("a"), SECOND]])
    assert await scene.run() == [SECOND]
    assert not scene.records.counts and not scene.router.calls
    assert scene.route().num_prompt_tokens == 40


class Asked:
    """A client whose replicas answer questions as a list of items says, in turn."""

    def __init__(self, answers: list[list[Any]], **settings: Any) -> None:
        answers = list(answers)
        self.records = Records()
        self.engine = Handle(lambda name, args, session: [{}] if name == "stats" else answers.pop(0))
        self.client = RoutedEngineClient(
            self.engine, None, block_size=16, settings=IngressSettings(**settings), recorder=self.records
        )


EMBED = EmbedTokens(token_ids=(1, 2))
VECTOR = Embedding(vector=(1.0, 2.0))


@pytest.mark.parametrize("lost", [DIED, GONE, EngineStopped("it was stopped")], ids=repr)
async def test_an_analysis_goes_to_another_replica_where_one_is_lost(lost):
    asked = Asked([[lost], [lost], [VECTOR]])
    assert await asked.client.analyze(EMBED) == VECTOR
    assert [args for args, _ in asked.engine.of("analyze")] == [(EMBED,)] * 3
    assert asked.records.counts == {"ingress_retries": 2}


async def test_an_analysis_that_finds_no_replica_is_given_up_after_its_tries():
    asked = Asked([[DIED], [DIED]], max_tries=2)
    with pytest.raises(ActorDiedError):
        await asked.client.analyze(EMBED)
    assert not asked.engine.responses[-1].items[1:]


@pytest.mark.parametrize("refusal", [QueueFull("256 analyses are under way"), ValueError("a defect")], ids=repr)
async def test_what_a_replica_refuses_is_not_asked_of_another(refusal):
    asked = Asked([[refusal]])
    with pytest.raises(type(refusal)):
        await asked.client.analyze(EMBED)
    assert len(asked.engine.of("analyze")) == 1


async def test_an_analysis_that_takes_too_long_is_ended_and_says_so():
    asked = Asked([[HANG]], analysis_timeout_s=0.02)
    with pytest.raises(ApiError) as caught:
        await asked.client.analyze(EMBED)
    assert (caught.value.status, caught.value.code) == (504, "analysis_timeout")
    assert asked.engine.responses[-1].is_cancelled


async def test_leaving_ends_the_call_of_an_analysis():
    asked = Asked([[HANG]])
    asking = asyncio.ensure_future(asked.client.analyze(EMBED))
    while not asked.engine.of("analyze"):
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert asked.engine.responses[-1].is_cancelled


async def test_a_call_that_is_answered_is_not_cancelled():
    asked = Asked([[VECTOR]])
    await asked.client.analyze(EMBED)
    assert not asked.engine.responses[-1].is_cancelled


async def test_concepts_are_asked_of_another_replica_too():
    asked = Asked([[DIED], [[(1, 0.5)]], [DIED], [[(2, 0.25)]]])
    assert await asked.client.concept_neighbors(3, 1, "known") == [(1, 0.5)]
    assert await asked.client.concept_top_tokens(3, 1, "known") == [(2, 0.25)]
    assert asked.engine.of("concept_neighbors")[0][0] == (3, 1, "known")


STATS = {
    "num_waiting": 1,
    "num_running": 2,
    "num_lanes": 8,
    "num_lanes_in_use": 3,
    "num_pages": 64,
    "pages_free": 40,
    "pages_cached": 20,
    "pages_held": 4,
}
OWN = ReplicaLoad(replica_id="", num_lanes=8, num_lanes_free=5, num_pages=64, num_pages_free=60, num_waiting=1)


def loaded(router_answer: list[Any] | None, stats: list[Any]) -> RoutedEngineClient:
    engine = Handle(lambda name, args, session: list(stats))
    router = None if router_answer is None else Handle(lambda name, args, session: list(router_answer))
    settings = IngressSettings(router_timeout_s=0.05, ready_timeout_s=0.05)
    return RoutedEngineClient(engine, router, block_size=16, settings=settings, recorder=Records())


async def test_the_router_tells_the_load_of_all():
    told = ServiceLoad(replicas=(OWN, OWN), num_queued=3)
    assert await loaded([told], [HANG]).load() == told


@pytest.mark.parametrize("router", [None, [HANG], [DIED], [GONE]], ids=repr)
async def test_without_the_router_one_replica_tells_its_own(router):
    """Lanes were once counted by requests that run, though a guided one has two: `/load` promised lanes nobody had."""
    assert await loaded(router, [STATS]).load() == ServiceLoad(replicas=(OWN,), is_complete=False)


async def test_without_anybody_the_load_is_a_503():
    with pytest.raises(ApiError) as caught:
        await loaded([DIED], [HANG]).load()
    assert (caught.value.status, caught.value.code) == (503, "not_ready")
