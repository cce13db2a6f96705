"""Two engine replicas, two ingresses and the router on a real Ray cluster, while parts of it are killed."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from engine import AsyncEngine, EngineConfig
from serve_app.api import create_api
from serve_app.checkpoint import describe
from serve_app.config import Limits
from serve_app.service import Service
from tests.paced import HOLD_FILE
from tests.processes import DEADLINE_S, eventually
from tests.serve_app.cluster import local_serve
from tests.serve_app.conftest import DirectClient

pytestmark = pytest.mark.anyio

NUM_LANES = 2
"""Of each of the two replicas."""
MAX_QUEUE = 6
ENGINE = {"device": "cpu", "num_pages": 64, "max_rows": 4, "max_lanes": NUM_LANES}


@dataclass
class Cluster:
    """The running application, and what tests do to it."""

    url: str
    checkpoint: Path
    args: dict[str, Any]

    def deploy(self, **user_configs: dict[str, Any]) -> None:
        """Deploy, or change nothing but `user_config` of the named deployments; waits until it is done."""
        application = {
            "name": "app",
            "route_prefix": "/",
            "import_path": "tests.paced:build_paced_app",
            "args": self.args,
            "deployments": [{"name": name, "user_config": config} for name, config in user_configs.items()],
        }
        client = _get_global_client()
        client.deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))
        assert eventually(lambda: serve.status().applications["app"].status == "RUNNING"), serve.status()

    def replicas(self, deployment: str) -> list[str]:
        """Names of the actors that are alive."""
        names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
        return sorted(name for name in names if name.startswith(f"SERVE_REPLICA::app#{deployment}#"))

    def kill(self, deployment: str) -> str:
        """Kill the process of one replica, and say which."""
        details = _get_global_client().get_serve_details()["applications"]["app"]["deployments"][deployment]
        replica = details["replicas"][0]
        # Ray's own way would let it go on for a moment.
        os.kill(replica["pid"], signal.SIGKILL)
        return str(replica["actor_name"])

    def num_running(self) -> int:
        """Replicas of all deployments that Serve believes to run."""
        deployments = serve.status().applications["app"].deployments.values()
        return sum(deployment.replica_states.get("RUNNING", 0) for deployment in deployments)

    def recover(self, killed: str, since: float) -> None:
        """Wait until everything runs again, and say how long it took."""
        deployment = killed.split("#")[1]
        assert eventually(lambda: killed not in self.replicas(deployment) and self.num_running() == 5), serve.status()
        assert serve.status().applications["app"].status == "RUNNING"
        print(f"{deployment}: whole again {time.monotonic() - since:.1f} s after its replica was killed")

    @property
    def hold(self) -> Path:
        """While this file exists no engine makes a pass."""
        return self.checkpoint / HOLD_FILE

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        self.hold.touch()
        try:
            yield
        finally:
            self.hold.unlink(missing_ok=True)

    def client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        return httpx.AsyncClient(base_url=self.url, timeout=DEADLINE_S, limits=limits)


@pytest.fixture(scope="module")
def cluster(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    checkpoint = tmp_path_factory.mktemp("faults") / "checkpoint"
    shutil.copytree(folder, checkpoint)
    no_cpu = {"ray_actor_options": {"num_cpus": 0, "num_gpus": 0}}
    args = {
        "model": str(checkpoint),
        "model_id": "tiny",
        "engine": ENGINE,
        "engine_server": {"num_replicas": 2, "warm_up_tokens": 2, "lease_grace_s": 0.3, **no_cpu},
        "router": {"routing": {"max_queue": MAX_QUEUE, "replica_timeout_s": 60, "lease_timeout_s": 60}, **no_cpu},
        "ingress": {
            "num_replicas": 2,
            "ready_timeout_s": 30.0,
            "connect_timeout_s": 10.0,
            "router_timeout_s": 3.0,
            **no_cpu,
        },
    }
    with local_serve() as url:
        try:
            running = Cluster(url, checkpoint, args)
            running.deploy()
            yield running
        finally:
            (checkpoint / HOLD_FILE).unlink(missing_ok=True)


@dataclass
class Outcome:
    """How one request went, as its client saw it."""

    status: int = 0
    text: str = ""
    error: str | None = None
    is_cut: bool = False
    is_done: bool = False
    first_at: float | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def is_ok(self) -> bool:
        return self.status == 200 and self.is_done and self.error is None and not self.is_cut

    @property
    def is_error(self) -> bool:
        """Its client was told: by a status, or by an error event and an abnormal end."""
        return self.error is not None or (self.is_cut and not self.is_done)


def body(seed: int, max_tokens: int = 40, **fields: Any) -> dict[str, Any]:
    return {"prompt": "a small animal", "max_tokens": max_tokens, "seed": seed, "ignore_eos": True, **fields}


async def stream(
    client: httpx.AsyncClient,
    payload: dict[str, Any],
    *,
    key: str | None = None,
    on_first: Callable[[], None] | None = None,
    outcome: Outcome | None = None,
) -> Outcome:
    """A streamed completion to its end, whatever that is."""
    outcome = outcome or Outcome()
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        async with client.stream("POST", "/v1/completions", json={**payload, "stream": True}, headers=headers) as got:
            outcome.status, outcome.headers = got.status_code, dict(got.headers)
            if got.status_code != 200:
                outcome.error = json.loads(await got.aread())["error"]["code"]
                return outcome
            async for line in got.aiter_lines():
                if not line:
                    continue
                if outcome.first_at is None:
                    outcome.first_at = time.monotonic()
                    if on_first is not None:
                        on_first()
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    outcome.is_done = True
                    continue
                event = json.loads(data)
                outcome.error = event["error"]["code"] if "error" in event else outcome.error
                outcome.text += "".join(choice["text"] for choice in event.get("choices", ()))
    except httpx.TransportError:
        outcome.is_cut = True
    return outcome


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Callable[[dict[str, Any]], Any]]:
    """Answers of one engine in this process, without Ray."""
    served = describe(folder, "tiny")
    engine = AsyncEngine.from_checkpoint(folder, EngineConfig(**ENGINE))
    service = Service(client=DirectClient(engine), checkpoint=served, limits=Limits(), created=1)

    async def ask(payload: dict[str, Any]) -> Any:
        transport = httpx.ASGITransport(app=create_api(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            response = await client.post("/v1/completions", json=payload)
            assert response.status_code == 200, response.text
            return response.json()

    yield ask
    engine.stop()


async def text_alone(alone: Callable[..., Any], payload: dict[str, Any]) -> str:
    return str((await alone(payload))["choices"][0]["text"])


def assert_alike(got: Any, expected: Any) -> None:
    """Equal but for the last digits, which depend on how many tokens were explained together."""
    if isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for key in expected:
            assert_alike(got[key], expected[key])
    elif isinstance(expected, list):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_alike(one, other)
    else:
        assert got == (pytest.approx(expected, abs=1e-3) if isinstance(expected, float) else expected)


async def test_two_replicas_answer_as_one_engine_does(cluster, alone):
    payloads = [
        body(1, attribution={"level": "both", "top_k": 3}),
        body(2, 70, steering={"concepts": ["Music"], "strength": 4}),
        body(3, 33, prompt="the act of singing in the sea and of living there with four legs"),
        body(4, 20, prompt=["an animal", "a small", "the sea"], temperature=0),
        body(5, 50, diffusion={"policy": "threshold", "threshold": 0.2}, attribution={"level": "token"}),
        body(6, 48, steering={"suppress": [{"concept": "Animals", "strength": 2}]}),
    ]
    async with cluster.client() as client:
        answers = await asyncio.gather(*(client.post("/v1/completions", json=payload) for payload in payloads))
    for payload, answer in zip(payloads, answers, strict=True):
        assert answer.status_code == 200, answer.text
        expected, got = await alone(payload), answer.json()
        for name in ("choices", "steering", "attribution"):
            assert_alike(got.get(name), expected.get(name))


async def test_a_replica_that_dies_cuts_its_streams_and_no_others(cluster, alone):
    payloads = [body(seed, 150) for seed in range(4)]
    outcomes = [Outcome() for _ in payloads]
    killed: list[str] = []

    def kill_when_all_stream() -> None:
        if all(outcome.first_at for outcome in outcomes) and not killed:
            killed.append(cluster.kill("EngineServer"))

    async with cluster.client() as client:
        await asyncio.gather(
            *(
                stream(client, payload, on_first=kill_when_all_stream, outcome=outcome)
                for payload, outcome in zip(payloads, outcomes, strict=True)
            )
        )
        killed_at = time.monotonic()
        cut = [outcome for outcome in outcomes if not outcome.is_ok]
        assert len(cut) == NUM_LANES
        assert all(outcome.error == "engine_unavailable" and outcome.is_cut for outcome in cut)
        for payload, outcome in zip(payloads, outcomes, strict=True):
            expected = await text_alone(alone, payload)
            assert outcome.text == expected if outcome.is_ok else expected.startswith(outcome.text)
        # The other replica serves on.
        assert (await stream(client, body(9))).is_ok
        cluster.recover(killed[0], killed_at)
        assert (await stream(client, body(9))).is_ok


async def test_a_request_of_which_nothing_was_sent_outlives_its_replica(cluster, alone):
    payloads = [body(seed, 30) for seed in range(2 * NUM_LANES)]
    async with cluster.client() as client:
        async with cluster.held():
            waiting = [asyncio.create_task(stream(client, payload)) for payload in payloads]
            # Until the requests have reached the replicas; should some not have, they are harmed even less.
            await asyncio.sleep(1)
            killed, killed_at = cluster.kill("EngineServer"), time.monotonic()
        outcomes = await asyncio.gather(*waiting)
        print(f"requests of the dead replica were served by {time.monotonic() - killed_at:.1f} s after its death")
    for payload, outcome in zip(payloads, outcomes, strict=True):
        assert outcome.is_ok, outcome
        assert outcome.text == await text_alone(alone, payload)
    cluster.recover(killed, killed_at)


async def test_a_router_that_dies_harms_nobody_and_requests_go_without_it(cluster, alone):
    payloads = [body(seed, 150) for seed in range(2 * NUM_LANES)]
    late = [body(seed, 20) for seed in range(10, 13)]
    async with cluster.client() as client:
        streams = [asyncio.create_task(stream(client, payload)) for payload in payloads]
        await asyncio.sleep(0.5)
        queued = asyncio.create_task(stream(client, body(20, 20)))
        await asyncio.sleep(0.2)
        killed, killed_at = cluster.kill("BlockRouter"), time.monotonic()
        outcomes = await asyncio.gather(*(stream(client, payload) for payload in late))
        print(f"three requests were served by {time.monotonic() - killed_at:.1f} s after the router's death")
        outcomes += await asyncio.gather(*streams, queued)
        for payload, outcome in zip([*late, *payloads, body(20, 20)], outcomes, strict=True):
            assert outcome.is_ok, outcome
            assert outcome.text == await text_alone(alone, payload)
        cluster.recover(killed, killed_at)
        # With its successor, the queue is back: what does not fit into lanes and queue is refused.
        async with cluster.held():
            flood = [
                asyncio.create_task(stream(client, body(seed, 5))) for seed in range(2 * NUM_LANES + MAX_QUEUE + 8)
            ]
            await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
        assert {outcome.status for outcome in await asyncio.gather(*flood)} == {200, 429}


async def test_an_ingress_that_dies_cuts_its_streams_and_no_others(cluster, alone):
    payloads = [body(seed, 150) for seed in range(2 * NUM_LANES)]
    outcomes = [Outcome() for _ in payloads]
    killed: list[str] = []

    def kill_when_all_stream() -> None:
        if all(outcome.first_at for outcome in outcomes) and not killed:
            killed.append(cluster.kill("Ingress"))

    async with cluster.client() as client:
        await asyncio.gather(
            *(
                stream(client, payload, on_first=kill_when_all_stream, outcome=outcome)
                for payload, outcome in zip(payloads, outcomes, strict=True)
            )
        )
        killed_at = time.monotonic()
        for payload, outcome in zip(payloads, outcomes, strict=True):
            expected = await text_alone(alone, payload)
            assert outcome.text == expected if outcome.is_ok else outcome.is_error and expected.startswith(outcome.text)
        cluster.recover(killed[0], killed_at)
        # What the dead ingress had begun holds no lane for ever.
        answers = await asyncio.gather(*(stream(client, body(seed, 20)) for seed in range(2 * NUM_LANES)))
        assert all(answer.is_ok for answer in answers)


async def test_a_full_queue_is_a_429_and_a_client_that_leaves_it_makes_room(cluster):
    async with cluster.client() as client:
        async with cluster.held():
            running = [asyncio.create_task(stream(client, body(seed, 20))) for seed in range(2 * NUM_LANES)]
            await asyncio.sleep(1)
            queued = [asyncio.create_task(stream(client, body(seed, 20))) for seed in range(MAX_QUEUE)]
            await asyncio.sleep(1)
            refused = await stream(client, body(50, 20))
            assert (refused.status, refused.error) == (429, "queue_full")
            assert int(refused.headers["retry-after"]) >= 1
            left = queued.pop()
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
            for seed in range(60, 200):
                late = asyncio.create_task(stream(client, body(seed, 20)))
                done, _ = await asyncio.wait({late}, timeout=1)
                if not done:
                    break
                assert late.result().status == 429
            else:
                pytest.fail("the place of the client that left never came free")
        outcomes = await asyncio.gather(*running, *queued, late)
    assert all(outcome.is_ok for outcome in outcomes), outcomes


async def test_keys_take_turns_and_the_more_important_request_goes_first(cluster):
    first: list[str] = []
    async with cluster.client() as client:
        async with cluster.held():
            # They end one after the other, so that lanes come free one by one.
            running = [
                asyncio.create_task(stream(client, body(i, 30 * (i + 1)), key="running")) for i in range(2 * NUM_LANES)
            ]
            await asyncio.sleep(1)
            queued = []
            for name, key, priority in (
                ("a1", "a", 0), ("a2", "a", 0), ("a3", "a", 0), ("b1", "b", 0), ("urgent", "a", -1),
            ):  # fmt: skip
                payload = body(7, 100, priority=priority)
                on_first = lambda name=name: first.append(name)  # noqa: E731
                queued.append(asyncio.create_task(stream(client, payload, key=key, on_first=on_first)))
                await asyncio.sleep(0.3)
        outcomes = await asyncio.gather(*running, *queued)
    assert all(outcome.is_ok for outcome in outcomes), outcomes
    assert first[0] == "urgent"
    # Those that begin one right after the other, on two replicas, may be seen in any order. Without turns the other key
    # would be the last.
    assert first.index("b1") < max(map(first.index, ("a1", "a2", "a3"))), first


async def test_limits_change_while_streams_go_on(cluster, alone):
    replicas = {name: cluster.replicas(name) for name in ("EngineServer", "BlockRouter", "Ingress")}
    async with cluster.client() as client:
        payloads = [body(seed, 200) for seed in range(2)]
        streams = [asyncio.create_task(stream(client, payload)) for payload in payloads]
        await asyncio.sleep(0.3)
        live = {"max_queue": 1, "max_queue_per_tenant": None}
        await asyncio.to_thread(cluster.deploy, BlockRouter=live, EngineServer={"coalesce_interval_s": 0.0})
        for payload, outcome in zip(payloads, await asyncio.gather(*streams), strict=True):
            assert outcome.is_ok
            assert outcome.text == await text_alone(alone, payload)
        assert {name: cluster.replicas(name) for name in replicas} == replicas
        async with cluster.held():
            flood = [asyncio.create_task(stream(client, body(seed, 5))) for seed in range(2 * NUM_LANES + 1 + 3)]
            # What is refused ends while nothing moves; what is not waits for the hold to end.
            refused: set[asyncio.Task[Outcome]] = set()
            while len(refused) < 3:
                done, _ = await asyncio.wait(
                    {*flood} - refused, timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED
                )
                assert done, "nobody was refused"
                refused |= done
        statuses = [outcome.status for outcome in await asyncio.gather(*flood)]
        assert sorted(statuses) == [200] * (2 * NUM_LANES + 1) + [429] * 3
