"""Both deployments on a real Ray cluster with a FakeEngine: what must survive the way between them."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import ray
from ray import serve

from serve_app.block_router import BlockRouter
from serve_app.config import EngineServerSettings, IngressSettings
from serve_app.engine_server import EngineServer
from serve_app.ingress import Ingress
from tests.fakes import scripted_engine, slow_engine
from tests.processes import DEADLINE_S, eventually
from tests.serve_app.cluster import local_serve

NO_CPU = {"num_cpus": 0}


def application(folder: Path, factory: Callable, *, ready_timeout_s: float = 30.0):
    options = {"ray_actor_options": NO_CPU, "max_ongoing_requests": 100}
    router = BlockRouter.options(**options).bind()
    server = EngineServerSettings(warm_up_tokens=0)
    engine = EngineServer.options(**options).bind(str(folder), router=router, engine_factory=factory, settings=server)
    settings = IngressSettings(ready_timeout_s=ready_timeout_s)
    return Ingress.options(**options).bind(
        engine, router=router, model=str(folder), revision=None, model_id="tiny", settings=settings
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The URL of a Serve instance of our own."""
    with local_serve() as url:
        yield url


@pytest.fixture(scope="module")
def url(cluster: str, folder: Path) -> str:
    serve.run(application(folder, scripted_engine), name="app", route_prefix="/")
    return cluster


def complete(url: str, seed: int, **fields) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=body(seed, **fields), timeout=DEADLINE_S)


def body(seed: int, **fields) -> dict:
    return {"prompt": "a small animal", "max_tokens": 40, "seed": seed, **fields}


def num_running() -> int:
    handle = serve.get_deployment_handle("EngineServer", "app")
    return handle.stats.remote().result(timeout_s=DEADLINE_S)["num_running"]


def kill_engine_replica() -> None:
    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    (name,) = [name for name in names if name.startswith("SERVE_REPLICA::app#EngineServer")]
    ray.kill(ray.get_actor(name, namespace="serve"))


@pytest.mark.parametrize(("token_id", "status"), [(7, 200), (100, 429), (102, 400)])
def test_an_analysis_and_what_refuses_it_cross_unchanged(url, token_id, status):
    response = httpx.post(f"{url}/v1/embeddings", json={"input": [token_id]}, timeout=DEADLINE_S)
    assert response.status_code == status
    if status == 200:
        assert len(response.json()["data"][0]["embedding"]) == 32


def test_leaving_in_the_middle_of_an_analysis_ends_it_in_the_engine(url):
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/embeddings", json={"input": [[104], [104], [7]]}, timeout=httpx.Timeout(90, read=5))
    assert eventually(lambda: num_running() == 0)
    load = httpx.get(f"{url}/load", timeout=DEADLINE_S).json()
    assert (load["num_replicas"], load["is_complete"]) == (1, True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("seed", "status", "code", "param"),
    [
        (100, 429, "queue_full", None),
        (101, 500, "internal_error", None),
        (102, 400, "unsupported_field", "steering"),
        (105, 503, "engine_unavailable", None),
    ],
)
def test_an_error_of_the_engine_becomes_its_status_also_for_a_stream(url, seed, status, code, param, stream):
    response = complete(url, seed, stream=stream)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param)


def test_a_refusal_names_its_field(url):
    response = complete(url, 1, prompt=[279])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


def test_a_stream_equals_the_plain_answer(url):
    plain = complete(url, 1, attribution={"level": "both"}).json()
    stream = complete(url, 1, stream=True, stream_options={"include_usage": True, "include_diffusion": "steps"})
    *lines, end = [line for line in stream.text.split("\n\n") if line]
    assert end == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    assert (text, events[-1]["usage"]) == (plain["choices"][0]["text"], plain["usage"])


def test_an_error_on_the_way_is_the_last_event_and_the_connection_breaks(url):
    text = ""
    with (
        pytest.raises(httpx.RemoteProtocolError),
        httpx.stream("POST", f"{url}/v1/completions", json=body(103, stream=True), timeout=DEADLINE_S) as response,
    ):
        assert response.status_code == 200
        for piece in response.iter_text():
            text += piece
    last = json.loads(text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["error"]["code"] == "non_finite_logits"
    assert "[DONE]" not in text


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_the_engine(url, stream):
    payload = json.dumps(body(104, stream=stream)).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(payload)}\r\n\r\n"
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + payload)
        assert eventually(lambda: num_running() == 1)
    assert eventually(lambda: num_running() == 0)


def test_the_request_id_is_returned_once(url):
    given = httpx.get(f"{url}/health", headers={"x-request-id": "mine-1"}, timeout=DEADLINE_S)
    assert given.headers.get_list("x-request-id") == ["mine-1"]
    assert httpx.get(f"{url}/health", timeout=DEADLINE_S).headers["x-request-id"]


def test_a_replica_that_dies_breaks_its_streams_and_is_replaced(url):
    hanging = body(104, stream=True, stream_options={"include_diffusion": "steps"})
    text = ""
    with (
        pytest.raises(httpx.RemoteProtocolError),
        httpx.stream("POST", f"{url}/v1/completions", json=hanging, timeout=DEADLINE_S) as response,
    ):
        for piece in response.iter_text():
            if not text:
                kill_engine_replica()
            text += piece
    assert '"code":"engine_unavailable"' in text
    assert "[DONE]" not in text
    assert eventually(lambda: complete(url, 1).status_code == 200)


def test_until_an_engine_is_loaded_requests_get_a_503(cluster, folder, tmp_path):
    slow = tmp_path / "slow"
    shutil.copytree(folder, slow)
    target = serve.RunTarget(
        target=application(slow, slow_engine, ready_timeout_s=0.3), name="slow", route_prefix="/slow"
    )
    serve.run_many([target], wait_for_applications_running=False)
    url = f"{cluster}/slow"
    assert eventually(lambda: httpx.get(f"{url}/health", timeout=DEADLINE_S).status_code == 200)
    for response in (httpx.get(f"{url}/ready", timeout=DEADLINE_S), complete(url, 1), complete(url, 1, stream=True)):
        assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
        assert response.headers["retry-after"]
    (slow / "go").touch()
    assert eventually(lambda: httpx.get(f"{url}/ready", timeout=DEADLINE_S).status_code == 200)
    assert complete(url, 1).status_code == 200
    serve.delete("slow")
