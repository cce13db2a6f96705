"""Ingress, router and replicas as they are, on one event loop of virtual time, while everything between them fails."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from engine import (
    EngineLoad,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    InvalidValue,
    ModelConfig,
    NullRecorder,
    Output,
    PrefixChanges,
    RunningLoad,
    SamplingParams,
    Started,
)
from serve_app.block_router import BlockRouter
from serve_app.completions import Caller
from serve_app.config import EngineServerSettings, IngressSettings
from serve_app.engine_server import EngineServer
from serve_app.errors import ApiError
from serve_app.lease_desk import LeaseDesk
from serve_app.router_client import RoutedEngineClient
from serve_app.routing.policy import RoutingSettings
from tests.records import Records

NUM_LANES = 3
PASS_S = 0.01


class _NoWait(selectors.SelectSelector):
    """Instead of waiting, lets the time pass."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everybody waits for somebody else, for ever")
        self.loop.now += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock goes on only when nobody has anything to do: the same seed, the same run."""

    def __init__(self) -> None:
        selector = _NoWait()
        super().__init__(selector)
        selector.loop = self
        self.now = 1000.0

    def time(self) -> float:
        return self.now


class LaneEngine:
    """An AsyncEngine without a model: a first come, first served queue for its lanes, a block each 16 passes.

    A guided request has two lanes, and nobody passes it while it waits for the second one.
    """

    def __init__(self, model_config: ModelConfig) -> None:
        self.model_config = model_config
        self.waiting: deque[tuple[str, asyncio.Future[None]]] = deque()
        self.running: dict[str, int] = {}
        self.lanes: dict[str, int] = {}
        self._on_load: Callable[[EngineLoad], None] | None = None

    async def generate(self, request: GenerateRequest) -> AsyncIterator[tuple[Event, ...]]:
        id_ = str(request.request_id)
        if id_ in self.running or any(id_ == other for other, _ in self.waiting):
            raise InvalidValue(f"{id_} is here already", param="request_id")
        entry = (id_, asyncio.get_running_loop().create_future())
        self.waiting.append(entry)
        self.lanes[id_] = request.num_lanes
        self._admit()
        try:
            await entry[1]
            yield (Started(id_, 0, 16, 0, 0, 0, ()),)
            while self.running[id_] > 0:
                await asyncio.sleep(PASS_S)
                self.running[id_] -= 1
                if self.running[id_] % 16 == 0:
                    self.ask_load()
            yield (Finished(id_, finished_output(id_)),)
        finally:
            self.running.pop(id_, None)
            with suppress(ValueError):
                self.waiting.remove(entry)
            self.lanes.pop(id_)
            self._admit()

    @property
    def num_lanes_free(self) -> int:
        return NUM_LANES - sum(self.lanes[id_] for id_ in self.running)

    def _admit(self) -> None:
        while self.waiting and self.lanes.get(self.waiting[0][0], 0) <= self.num_lanes_free:
            id_, future = self.waiting.popleft()
            if not future.done():
                self.running[id_] = 16 + 16 * (len(id_) % 3)
                future.set_result(None)
        self.ask_load()

    def watch_load(self, callback: Callable[[EngineLoad], None], *, interval_s: float = 0.02) -> None:
        self._on_load = callback
        self.ask_load(with_all_prefixes=True)

    def ask_load(self, *, with_all_prefixes: bool = False) -> None:
        if self._on_load is not None:
            running = tuple(
                RunningLoad(
                    request_id=id_,
                    num_steps_left=left % 16 or 16,
                    num_blocks_left=max(left - 1, 0) // 16,
                    num_pages=1,
                    num_lanes=self.lanes[id_],
                )
                for id_, left in self.running.items()
            )
            self._on_load(
                EngineLoad(
                    num_lanes=NUM_LANES,
                    num_lanes_free=self.num_lanes_free,
                    num_pages=64,
                    num_pages_free=64 - len(running),
                    num_waiting=len(self.waiting),
                    num_lanes_waiting=sum(self.lanes[id_] for id_, _ in self.waiting),
                    running=running,
                    pass_seconds=((1, PASS_S),),
                    prefixes=PrefixChanges(is_everything=with_all_prefixes),
                )
            )

    def check_health(self) -> None: ...

    async def stats(self) -> Any:
        raise NotImplementedError

    def stop(self) -> None: ...


def finished_output(id_: str) -> Output:
    return Output(
        request_id=id_,
        token_ids=(),
        finish_reason=FinishReason.LENGTH,
        commits=(),
        num_forward_passes=1,
        num_denoising_steps=1,
        num_blocks=1,
        num_prompt_tokens=0,
        num_cached_tokens=0,
        num_preemptions=0,
        seed=0,
        steering=(),
        error=None,
    )


class Node:
    """A process: what runs in it ends with it."""

    def __init__(self, content: Any) -> None:
        self.content = content
        self.is_alive = True
        self.calls: dict[Call, None] = {}

    def die(self) -> None:
        self.is_alive = False
        for call in list(self.calls):
            call.lose()


class Call:
    """A call to a node, as a DeploymentResponse or its generator: in order, late, and broken where the node dies."""

    def __init__(self, world: World, node: Node | None, method: str, args: tuple[Any, ...]) -> None:
        self._world, self._node, self.method, self._args = world, node, method, args
        self._items: asyncio.Queue[Any] = asyncio.Queue()
        self._is_over = False
        self._work = asyncio.ensure_future(self._run())
        if node is not None:
            node.calls[self] = None
            self._work.add_done_callback(lambda _: node.calls.pop(self, None))

    async def _run(self) -> None:
        world, node = self._world, self._node
        await world.delay()
        if node is None or not node.is_alive:
            await self._items.put(ActorDiedError())
            return
        if world.chance(world.trouble.silent_call):
            return
        try:
            result = getattr(node.content, self.method)(*self._args)
            if isinstance(result, Coroutine):
                value = await result
                await world.delay()
                await self._items.put(value)
                return
            try:
                async for item in result:
                    await self._items.put((item,))
            finally:
                await result.aclose()
            await self._items.put(StopAsyncIteration())
        except Exception as error:
            await self._items.put(error)

    def lose(self) -> None:
        self._work.cancel()
        self._items.put_nowait(ActorDiedError())

    def cancel(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._world.spawn(self._cancel_late())

    async def _cancel_late(self) -> None:
        await self._world.delay()
        self._work.cancel()

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> Any:
        item = await self._items.get()
        await self._world.delay()
        if isinstance(item, BaseException):
            raise item
        return item[0]

    def __await__(self) -> Any:
        return self._value().__await__()

    async def _value(self) -> Any:
        try:
            item = await self._items.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if isinstance(item, BaseException):
            raise item
        return item


class Handle:
    """A DeploymentHandle: the node is chosen when the call is made."""

    def __init__(self, world: World, choose: Callable[[str], Node | None], session_id: str = "") -> None:
        self._world, self._choose, self._session_id = world, choose, session_id

    def options(self, *, session_id: str = "", **options: Any) -> Handle:
        return Handle(self._world, self._choose, session_id or self._session_id)

    def __getattr__(self, name: str) -> Any:
        world, choose, session_id = self._world, self._choose, self._session_id

        class Method:
            def remote(self, *args: Any) -> Call:
                return Call(world, choose(session_id), name, args)

        return Method()


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """Chances in percent: of each call, each request, or each tenth of a second."""

    silent_call: int = 0
    client_leaves: int = 0
    is_guided: int = 0
    replica_dies: int = 0
    router_dies: int = 0
    longest_delay_s: float = 0.005


class World:
    """One ingress, one router, some replicas, and what happens to them."""

    def __init__(self, seed: int, folder: Any, trouble: Trouble, num_replicas: int = 3) -> None:
        self.rng, self.trouble, self.folder = random.Random(seed), trouble, folder
        self.loop = asyncio.get_running_loop()
        self.side_tasks: set[asyncio.Task[Any]] = set()
        self.records = Records()
        self.router: Node | None = self.new_router()
        self.replicas = {f"r{i}": self.new_replica(f"r{i}") for i in range(num_replicas)}
        self.client = RoutedEngineClient(
            Handle(self, self.choose_replica),
            Handle(self, lambda _: self.router),
            block_size=16,
            settings=IngressSettings(),
            recorder=NullRecorder(),
            clock=self.loop.time,
        )
        self.client._is_ready = True
        self.outcomes: Counter[str] = Counter()
        self.num_lanes_seen = self.num_idle_seen = 0

    def chance(self, percent: int) -> bool:
        return self.rng.random() * 100 < percent

    async def delay(self) -> None:
        await asyncio.sleep(self.rng.random() * self.trouble.longest_delay_s)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        self.side_tasks.add(task)
        task.add_done_callback(self.side_tasks.discard)

    def new_router(self) -> Node:
        shell = BlockRouter.func_or_class(
            RoutingSettings(max_queue=40), recorder_factory=lambda: self.records, clock=self.loop.time
        )
        return Node(shell)

    def new_replica(self, name: str) -> Node:
        server = EngineServer.func_or_class.__new__(EngineServer.func_or_class)
        server.__init__(
            str(self.folder),
            settings=EngineServerSettings(coalesce_interval_s=0, warm_up_tokens=0),
            engine_factory=lambda path, config, *, recorder: LaneEngine(ModelConfig.from_json(path)),
            recorder_factory=NullRecorder,
            router=Handle(self, lambda _: self.router),
        )
        server._desk = server._reporter._desk = LeaseDesk(name, grace_s=0.1, clock=self.loop.time)
        return Node(server)

    def choose_replica(self, session_id: str) -> Node | None:
        """As ReplicaChoice: the named one, else any."""
        pinned = self.replicas.get(session_id)
        if pinned is not None:
            return pinned
        return self.rng.choice(list(self.replicas.values())) if self.replicas else None

    async def request(self, id_: str) -> None:
        caller = Caller(tenant=f"t{self.rng.randrange(3)}", deadline_s=self.rng.choice([None, None, 0.5, 30.0]))
        request = GenerateRequest(
            prompt_token_ids=tuple(range(self.rng.randrange(60))),
            max_tokens=20,
            sampling=SamplingParams(cfg_scale=float(self.trouble.is_guided and self.chance(self.trouble.is_guided))),
            request_id=id_,
            priority=self.rng.randrange(-2, 3),
        )
        work = asyncio.ensure_future(self._read(request, caller))
        if self.chance(self.trouble.client_leaves):
            await asyncio.wait({work}, timeout=self.rng.random() ** 2 * 2)
            work.cancel()
        try:
            await work
            self.outcomes["served"] += 1
        except asyncio.CancelledError:
            self.outcomes["left"] += 1
        except ApiError as error:
            self.outcomes[error.code] += 1

    async def _read(self, request: GenerateRequest, caller: Caller) -> None:
        last: Event | None = None
        async for events in self.client.generate(request, caller):
            assert not isinstance(last, Finished)
            last = events[-1]
        assert isinstance(last, Finished)

    async def storm(self) -> None:
        """Every tenth of a second something may die; it comes back, the replica under its name or another one's."""
        while True:
            await asyncio.sleep(0.1)
            if self.chance(self.trouble.router_dies) and self.router is not None:
                self.router.die()
                self.router = None
                self.spawn(self._revive_router())
            if self.chance(self.trouble.replica_dies) and self.replicas:
                name = self.rng.choice(list(self.replicas))
                node = self.replicas.pop(name)
                node.die()
                node.content._reporting.cancel()
                self.spawn(self._revive_replica(self.rng.choice([name, f"{name}x"])))

    async def _revive_router(self) -> None:
        await asyncio.sleep(self.rng.random() * 3)
        self.router = self.new_router()

    async def _revive_replica(self, name: str) -> None:
        await asyncio.sleep(self.rng.random() * 3)
        self.replicas[name] = self.new_replica(name)

    async def watch(self) -> None:
        """Count lanes, at moments when the router has a queue: all of them, and those that nobody is on the way to."""
        while True:
            await asyncio.sleep(0.01)
            if self.router is not None and self.router.content._policy.num_waiting > 0:
                for node in self.replicas.values():
                    num_taken = sum(call.method == "take" for call in node.calls)
                    self.num_lanes_seen += NUM_LANES
                    self.num_idle_seen += max(NUM_LANES - num_taken, 0)

    async def settle(self) -> None:
        """Ten quiet seconds: more than any timeout."""
        self.trouble = Trouble()
        await asyncio.sleep(10)
        assert not self.side_tasks

    def check_idle(self) -> None:
        """Nothing is held for anybody."""
        assert self.router is not None and len(self.replicas) > 0
        shell = self.router.content
        policy = shell._policy
        assert not shell._waiting and policy.num_waiting == 0 and not policy._claims
        policy.handle(None, self.loop.time())
        policy._open_replicas()
        known = {id_: replica for id_, replica in policy._replicas.items() if id_ in self.replicas}
        assert set(known) == set(self.replicas)
        for name, replica in known.items():
            assert not replica._leases and not replica._taken, (name, replica._leases, replica._taken)
        for name, node in self.replicas.items():
            server = node.content
            assert not server._desk._taken and not server._desk._settled, (name, server._desk._taken)
            assert not server._engine.running and not server._engine.waiting and not server._engine.lanes, name
            assert len(node.calls) == 0, (name, [c._method for c in node.calls])
        assert not self.client._notes._tasks
        assert len(shell._gone) <= 8 and not shell._boundaries.keys() - self.replicas.keys()


def in_virtual_time(main: Callable[[], Awaitable[Any]]) -> None:
    loop = VirtualLoop()
    try:
        loop.run_until_complete(main())
        left = list(asyncio.all_tasks(loop))
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    finally:
        loop.close()


TROUBLES = {
    "calm": Trouble(),
    "clients leave": Trouble(client_leaves=60),
    "calls get lost": Trouble(silent_call=3, client_leaves=10),
    "replicas die": Trouble(replica_dies=5),
    "routers die": Trouble(router_dies=4, client_leaves=10),
    "many are guided": Trouble(is_guided=40, client_leaves=20),
    "slow": Trouble(longest_delay_s=0.3, client_leaves=30),
    "guided ones in all of it": Trouble(
        is_guided=40, silent_call=2, client_leaves=20, replica_dies=4, router_dies=3, longest_delay_s=0.1
    ),
    "all of it": Trouble(silent_call=2, client_leaves=20, replica_dies=4, router_dies=3, longest_delay_s=0.1),
}


async def run_storm(seed: int, folder: Any, trouble: Trouble, num_requests: int = 150) -> World:
    world = World(seed, folder, trouble)
    await asyncio.sleep(0.3)
    storm, watch = asyncio.ensure_future(world.storm()), asyncio.ensure_future(world.watch())
    requests = []
    for number in range(num_requests):
        requests.append(asyncio.ensure_future(world.request(f"q{number}" + "." * world.rng.randrange(3))))
        await asyncio.sleep(world.rng.expovariate(1 / 0.04))
    _, late = await asyncio.wait(requests, timeout=200)
    assert not late, f"{len(late)} requests never ended"
    for task in requests:
        task.result()
    storm.cancel()
    watch.cancel()
    await world.settle()
    world.check_idle()
    assert sum(world.outcomes.values()) == num_requests
    return world


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", TROUBLES)
def test_every_request_ends_once_and_nothing_is_left_over(folder, name, seed):
    in_virtual_time(lambda: run_storm(seed, folder, TROUBLES[name]))


@pytest.mark.parametrize("seed", range(2))
def test_no_lease_is_refused_as_long_as_nothing_goes_wrong(folder, seed):
    """Guided requests counted as one lane until they were seen to run: one lease in eight was refused."""

    async def main() -> None:
        world = await run_storm(seed, folder, Trouble(is_guided=40))
        assert world.records.counts["router_assignments", "soonest"] == world.outcomes["served"] > 100
        assert not world.records.counts["router_refused_leases", "no_room"]

    in_virtual_time(main)


@pytest.mark.parametrize("seed", [0, 4])
def test_those_who_leave_keep_no_lane_from_those_who_wait(folder, seed):
    """Leases on the way to clients that had left kept their lanes until they timed out."""

    async def main() -> None:
        world = await run_storm(seed, folder, Trouble(longest_delay_s=0.1, client_leaves=60))
        share = world.num_idle_seen / world.num_lanes_seen
        # 0.29 and 0.28; it was 0.46 and 0.49. The rest is messages under way.
        assert share < 0.38

    in_virtual_time(main)
