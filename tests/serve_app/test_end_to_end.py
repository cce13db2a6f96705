"""The shipped demo model behind a real `serve run`, as a user starts it: one server for all tests of this file."""

from __future__ import annotations

import json
import lzma
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import yaml

from deploy.grafana.build import DASHBOARDS, alert_rules, metrics_in
from engine import ModelConfig
from serve_app.config import DEMO_CHECKPOINT
from serve_app.run import cluster_processes
from tests.processes import free_port
from tests.prometheus import Prometheus, is_installed

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 240.0
TIMEOUT_S = 120.0
PROMPT = "a person who"


class Server:
    """`python -m serve_app.run` as a process of its own, and what it said."""

    def __init__(self, config: Path, log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.log = log
        self.marker = f"GLASSBLOCK_TEST={uuid.uuid4().hex}"
        name, _, value = self.marker.partition("=")
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "serve_app.run", str(config)],
                cwd=ROOT,
                env={**os.environ, **(environment or {}), name: value},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def wait_for(self, pattern: str) -> str:
        """What `pattern` caught in the log; fails with the log if it never comes."""
        end = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end and self.process.poll() is None:
            if found := re.search(pattern, self.log.read_text(errors="replace")):
                return found.group(1)
            time.sleep(0.2)
        pytest.fail(f"the server did not start:\n{self.log.read_text(errors='replace')[-4000:]}")

    def stop(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(TIMEOUT_S)

    def processes(self) -> list[int]:
        return list(cluster_processes(self.marker))


def start(folder: Path, environment: Mapping[str, str] | None = None, **args: object) -> Server:
    """The deployment that ships, on a port of its own."""
    config = yaml.safe_load((ROOT / "deploy" / "config.yaml").read_text())
    config["http_options"]["port"] = free_port()
    config["applications"][0]["args"]["engine"]["device"] = "cpu"
    # So few that requests at once wait for a lane, and have to give their pages back: whatever these tests ask for has
    # to survive that.
    config["applications"][0]["args"]["engine"] |= {"num_pages": 8, "max_lanes": 4}
    config["applications"][0]["args"] |= args
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return Server(file, folder / "log.txt", environment)


@pytest.fixture(scope="module")
def ray_folder() -> Iterator[Path]:
    """Where Ray keeps the list of the server's metrics ports; other clusters of this machine have another one."""
    # Not pytest's own folder: the paths of sockets in it would be too long.
    with tempfile.TemporaryDirectory(prefix="gb", ignore_cleanup_errors=True) as folder:
        yield Path(folder) / "ray"


@pytest.fixture(scope="module")
def trace_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server's processes write their spans."""
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, ray_folder: Path, trace_folder: Path) -> Iterator[str]:
    # Reports ten times as often as by default, so that measurements are there when they are looked for.
    environment = {"RAY_TMPDIR": str(ray_folder.parent), "RAY_metrics_report_interval_ms": "1000"}
    telemetry = {"trace_dir": str(trace_folder)}
    server = start(tmp_path_factory.mktemp("server"), environment, telemetry=telemetry)
    try:
        address = server.wait_for(r"Ready: (\S+)")
        # The engine's memory table comes through the replica's log, which may lag behind.
        server.wait_for(r"(weights .* GiB)")
        yield address
        assert server.stop() == 0
        assert not server.processes(), "Ctrl-C left something running"
    finally:
        server.process.kill()
        for pid in server.processes():
            os.kill(pid, signal.SIGKILL)


def complete(url: str, **fields) -> dict:
    response = httpx.post(f"{url}/v1/completions", json={"prompt": PROMPT, **fields}, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    return response.json()


def stream(url: str, **fields) -> list[dict]:
    events = []
    body = {"prompt": PROMPT, "stream": True, **fields}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=TIMEOUT_S) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line:
                events.append(line.removeprefix("data: "))
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def test_the_text_can_be_read(url):
    with lzma.open(ROOT / "demo_model" / "definitions.tsv.xz", "rt") as definitions:
        vocabulary = set(re.findall(r"[a-z]+", definitions.read().lower()))
    words = []
    for seed in range(3):
        answer = complete(url, max_tokens=64, seed=seed)
        assert answer["usage"]["completion_tokens"] == 64
        # The cut at max_tokens may split the last word.
        words += re.findall(r"[a-z]+", answer["choices"][0]["text"].lower())[:-1]
    assert len(words) > 60
    assert sum(word in vocabulary for word in words) / len(words) > 0.75, " ".join(words)


def test_more_strength_brings_more_of_the_concept(url):
    (concept,) = httpx.get(f"{url}/v1/concepts", params={"query": "animal", "limit": 1}, timeout=TIMEOUT_S).json()[
        "data"
    ]
    assert concept["name"] == "animal"
    top = httpx.get(f"{url}/v1/concepts/{concept['id']}/top_tokens", params={"k": 100}, timeout=TIMEOUT_S).json()[
        "data"
    ]
    promoted = {item["token_id"] for item in top}

    def share(strength: float) -> float:
        steering = {"interventions": [{"concepts": ["Animal"], "strength": strength}]}
        token_ids = []
        for seed in range(2):
            answer = complete(
                url, prompt="", max_tokens=96, seed=seed, steering=steering, attribution={"level": "token", "top_k": 0}
            )
            assert answer["steering"]["resolved"][0]["concepts"][0]["id"] == concept["id"]
            token_ids += [token["token_id"] for token in answer["attribution"][0]["tokens"]]
        return sum(token_id in promoted for token_id in token_ids) / len(token_ids)

    none, some, much = share(0), share(2), share(8)
    assert none < some < much
    assert much > none + 0.08


def test_attribution_sums_to_the_logit_and_spells_the_text(url):
    answer = complete(url, max_tokens=70, seed=1, attribution={"level": "both", "top_k": 4})
    (entry,) = answer["attribution"]
    assert len(entry["tokens"]) == 70
    for token in entry["tokens"]:
        parts = token["known_total"] + token["discovered_total"] + token["epsilon"]
        assert parts == pytest.approx(token["logit"], abs=1e-4)
        assert len(token["known"]) == len(token["discovered"]) == 4
    spelled = b"".join(bytes(token["bytes"]) for token in entry["tokens"])
    assert spelled.decode("utf-8", "replace") == answer["choices"][0]["text"]
    assert all(concept["name"] for token in entry["tokens"] for concept in token["known"])
    assert all(chunk["text"] in answer["choices"][0]["text"] and chunk["concepts"] for chunk in entry["chunks"])


@pytest.mark.parametrize("detail", ["off", "steps"])
def test_a_stream_equals_the_plain_answer(url, detail):
    body = {"max_tokens": 90, "seed": 4, "steering": {"concepts": ["food"], "strength": 4}}
    plain = complete(url, **body)
    events = stream(url, **body, stream_options={"include_usage": True, "include_diffusion": detail})
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    assert text == plain["choices"][0]["text"]
    assert events[-1]["usage"] == {
        **plain["usage"],
        "prompt_tokens_details": events[-1]["usage"]["prompt_tokens_details"],
    }
    if detail == "steps":
        commits = [c for e in events if e.get("diffusion", {}).get("type") == "step" for c in e["diffusion"]["commits"]]
        assert sorted(commit["position"] for commit in commits) == list(range(90))


def test_lossless_gives_the_same_text_in_fewer_passes(url):
    body = {"max_tokens": 64, "seed": 2, "steering": {"concepts": ["animal"], "strength": 4}}
    plain = complete(url, **body)
    lossless = complete(url, **body, diffusion={"policy": "lossless"})
    assert lossless["choices"] == plain["choices"]
    assert lossless["diffusion"]["policy"] == "lossless"
    assert lossless["diffusion"]["denoising_steps"] == plain["diffusion"]["denoising_steps"] == 64
    # At least a few of the drafts are right: on this model about four in ten are.
    assert lossless["diffusion"]["forward_passes"] < plain["diffusion"]["forward_passes"] - 5
    body = {"prompt": PROMPT, "diffusion": {"policy": "lossless", "tokens_per_step": 2}}
    refused = httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "diffusion.tokens_per_step")
    assert "lossless commits one token a step" in refused.json()["error"]["message"]


def test_clients_at_once_get_the_answers_they_get_alone(url):
    bodies = [
        {"max_tokens": 70, "seed": 1, "attribution": {"level": "chunk"}},
        {"prompt": "the act of", "max_tokens": 50, "seed": 2, "steering": {"concepts": ["music"], "strength": 6}},
        {"prompt": "", "max_tokens": 130, "seed": 3, "temperature": 0},
    ]
    alone = [complete(url, **body)["choices"] for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as clients:
        together = list(clients.map(lambda body: complete(url, **body)["choices"], bodies))
    assert together == alone


def spans_of(folder: Path, request_id: str, only: str | None = None) -> list[tuple[str, str, str, dict[str, str]]]:
    """(kind of process, trace id, name, attributes) of what was written about a request, `only` under that name."""
    found = []
    for file in folder.glob("*.jsonl"):
        # The last line may be half written.
        for line in file.read_text().splitlines(keepends=True):
            resources = json.loads(line)["resourceSpans"] if line.endswith("\n") else []
            for span in (span for resource in resources for span in resource["scopeSpans"][0]["spans"]):
                attributes = {item["key"]: next(iter(item["value"].values())) for item in span["attributes"]}
                if attributes.get("request_id") == request_id and only in (None, span["name"]):
                    found.append((file.name.partition("-")[0], span["traceId"], span["name"], attributes))
    return found


def test_a_request_is_found_in_traces_by_its_id_from_http_to_its_blocks(url, trace_folder):
    headers = {"x-request-id": "find-me"}
    body = {"prompt": PROMPT, "max_tokens": 100, "seed": 1}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=TIMEOUT_S)
    assert answer.headers["x-request-id"] == "find-me"
    wanted = {("ingress", "POST /v1/completions"), ("ingress", "route"), ("engine", "engine"), ("engine", "block")}
    end = time.monotonic() + TIMEOUT_S
    while not {(process, name) for process, _, name, _ in spans_of(trace_folder, "find-me")} >= wanted:
        assert time.monotonic() < end, spans_of(trace_folder, "find-me")
        time.sleep(0.2)
    spans = spans_of(trace_folder, "find-me")
    assert len({trace_id for _, trace_id, _, _ in spans}) == 1
    (engine,) = (attributes for _, _, name, attributes in spans if name == "engine")
    assert engine["engine_request_id"] == f"{answer.json()['id']}-0"
    assert int(engine["tokens"]) == answer.json()["usage"]["completion_tokens"]
    steps = [int(attributes["last_step"]) for _, _, name, attributes in spans if name == "block"]
    assert max(steps) + 1 == answer.json()["diffusion"]["denoising_steps"]


def test_traces_show_which_requests_were_let_go_together(url, trace_folder):
    """Twice as many as there are lanes: those that wait are sent where lanes come free at one boundary."""
    body = {"prompt": PROMPT, "max_tokens": 30, "seed": 1, "diffusion": {"tokens_per_step": 2}}

    def sent(name: str) -> str:
        headers = {"x-request-id": name}
        httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=TIMEOUT_S).raise_for_status()
        return name

    sizes: list[int] = []
    end = time.monotonic() + TIMEOUT_S
    while max(sizes, default=0) < 2:
        assert time.monotonic() < end, sizes
        with ThreadPoolExecutor(8) as clients:
            names = list(clients.map(sent, [f"{time.monotonic_ns()}-{number}" for number in range(8)]))
        groups: list[str] = []
        while len(groups) < len(names):
            assert time.monotonic() < end, groups
            time.sleep(0.2)
            routes = [spans_of(trace_folder, name, "route") for name in names]
            groups = [attributes["group"] for spans in routes for _, _, _, attributes in spans]
        sizes = sorted(groups.count(group) for group in set(groups))


def test_bad_input_is_refused_by_name_and_the_server_goes_on(url):
    mask = ModelConfig.from_json(DEMO_CHECKPOINT).mask_token_id
    for body, param in (
        ({"prompt": [mask]}, "prompt"),
        ({"prompt": "a", "max_tokens": 2000}, "max_tokens"),
        ({"prompt": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt": "a", "steering": {"concepts": ["nobody"], "strength": 1}}, "steering.concepts[0]"),
        ({"prompt": "a", "steering": {"interventions": [{"concepts": [5], "strength": 1, "layer": 99}]}},
         "steering.interventions[0].layer"),
    ):  # fmt: skip
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert httpx.get(f"{url}/ready", timeout=TIMEOUT_S).status_code == 200
    assert complete(url, max_tokens=3)["usage"]["completion_tokens"] == 3


def test_analyses_reach_the_engine_through_a_replica(url):
    """A replica's last event holds no commits: input attribution once explained nothing, though not in process."""
    request = {"prompt": "a plant with", "max_tokens": 3, "seed": 1}
    body = {"request": request, "n_steps": 8, "targets": [0, 2]}
    explained = httpx.post(f"{url}/v1/attributions/input", json=body, timeout=TIMEOUT_S).json()
    assert [target["position"] for target in explained["targets"]] == [0, 2]
    replayed = httpx.post(f"{url}/v1/traces/replay", json={"trace": explained["trace"]}, timeout=TIMEOUT_S).json()
    assert len(replayed["commits"]) == 3 and replayed["largest_difference"] < 1e-3
    body = {"input": ["a plant", "an animal"], "embedding_type": "known"}
    embedded = httpx.post(f"{url}/v1/embeddings", json=body, timeout=TIMEOUT_S).json()
    assert len({len(item["embedding"]) for item in embedded["data"]}) == 1 and len(embedded["data"]) == 2


def test_a_literal_mask_token_in_a_prompt_is_ordinary_text(url):
    answer = complete(url, prompt="<|mask|>", max_tokens=3)
    assert answer["usage"]["prompt_tokens"] > 1
    assert answer["usage"]["completion_tokens"] == 3


def test_a_termination_signal_during_the_start_leaves_nothing(tmp_path):
    server = start(tmp_path)
    try:
        server.wait_for(r"(Started a local Ray instance|Submitted deploy config)")
        assert server.stop(signal.SIGTERM) == 0
        assert not server.processes()
    finally:
        for pid in server.processes():
            os.kill(pid, signal.SIGKILL)


def test_a_config_that_cannot_work_ends_at_once_and_says_why(tmp_path):
    file = tmp_path / "config.yaml"
    application = {"name": "x", "import_path": "serve_app.app:build_app", "args": {"modle": "x"}}
    file.write_text(yaml.safe_dump({"applications": [application]}))
    server = Server(file, tmp_path / "log.txt")
    assert server.process.wait(TIMEOUT_S) == 2
    assert "modle" in server.log.read_text()
    assert not server.processes()


def test_a_checkpoint_that_cannot_be_loaded_ends_the_server_with_the_reason(tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(DEMO_CHECKPOINT, broken, ignore=shutil.ignore_patterns("*.safetensors"))
    server = start(tmp_path, model=str(broken))
    try:
        assert server.process.wait(START_TIMEOUT_S) == 1
        assert not server.processes()
        assert re.search(r"The application cannot start: .*EngineServer", server.log.read_text(), re.DOTALL)
    finally:
        server.process.kill()
        for pid in server.processes():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def prometheus(url: str, ray_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    if not is_installed():
        pytest.skip("needs Prometheus: apt-get install prometheus")
    with Prometheus(
        tmp_path_factory.mktemp("prometheus"), ray_folder / "prom_metrics_service_discovery.json"
    ) as running:
        yield running


def put_load_on(url: str) -> None:
    """Requests of every kind at once, among them bad ones and one whose client leaves."""
    quick = {"diffusion": {"tokens_per_step": 16}}
    bodies = [
        # Three that do not fit into the pages at once, and one whose prompt fills a block.
        *({"max_tokens": 200, "seed": seed, **quick} for seed in range(3)),
        {"prompt": "an animal that lives in the sea " * 10, "max_tokens": 8, **quick},
        {"max_tokens": 20, "steering": {"concepts": ["music"], "strength": 4}, **quick},
        {"max_tokens": 20, "attribution": {"level": "token", "top_k": 1}, **quick},
        {"max_tokens": 20, "diffusion": {"policy": "threshold", "threshold": 0.3}},
    ]
    with ThreadPoolExecutor(len(bodies)) as clients:
        list(clients.map(lambda body: complete(url, **body), bodies))
    # Drafts ride in passes of few rows only.
    complete(url, max_tokens=16, diffusion={"policy": "lossless"})
    stream(url, max_tokens=70, **quick)
    # Scores of a complete block, computed and then found.
    for _ in range(2):
        complete(url, prompt="an animal that lives in the sea " * 10, max_tokens=0, echo=True, logprobs=0)
    body = {"prompt": PROMPT, "stream": True, "max_tokens": 400}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=TIMEOUT_S) as leaving:
        next(leaving.iter_lines())
    for path in ("/v1/concepts/0", "/v1/concepts/99999999", "/nowhere"):
        httpx.get(url + path, timeout=TIMEOUT_S)
    httpx.post(f"{url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 0}, timeout=TIMEOUT_S)


SELECTOR = re.compile(r"(?:ray_glassblock_[a-z_]+|\bup)(?:\{[^}]*\})?")
RARE = {"ingress_cut_streams", "router_refused_leases", "router_rejections", "router_restarts_seen"} | {
    "ingress_retries",
    "ingress_router_fallbacks",
}
"""Counters that a server on which nothing goes wrong never counts, and Ray exports none before its first count."""
NOTHING_WRONG = {'code=~"5.."', 'code="429"'}
"""Selections of other counters that are empty for the same reason."""


def expected_queries() -> tuple[dict[str, str], dict[str, str]]:
    """Panels' expressions and the selectors of alerts, by what they belong to: those with data, and those without."""
    with_data, without = {}, {}
    variables = {"$cluster": ".*", "$application": ".*", "$replica": ".*", "$__rate_interval": "5m"}
    for dashboard in DASHBOARDS:
        for panel in dashboard.panels:
            for query in panel.queries:
                expr = query.expr
                for name, value in variables.items():
                    expr = expr.replace(name, value)
                is_rare = bool(metrics_in(expr) & RARE) and "vector(0)" not in expr
                (without if is_rare else with_data)[f"{panel.title}: {query.legend}"] = expr
    for rule in alert_rules():
        without[rule["alert"]] = rule["expr"]
        for selector in SELECTOR.findall(rule["expr"]):
            is_rare = bool(metrics_in(selector) & RARE) or any(labels in selector for labels in NOTHING_WRONG)
            (without if is_rare else with_data)[f"{rule['alert']}: {selector}"] = selector
    return with_data, without


def test_every_panel_and_alert_finds_data_in_a_real_prometheus(url, prometheus):
    """Also what nobody wrote by hand: names as Ray exports them, labels, the place where Ray lists its ports."""
    with_data, without = expected_queries()
    assert len(with_data) > 60
    for what, expr in without.items():
        # It may find nothing, but it is understood.
        assert prometheus.query(expr) is not None, what
    end = time.monotonic() + TIMEOUT_S
    missing = with_data
    while missing and time.monotonic() < end:
        # Rates need two looks at a series with a difference between them.
        put_load_on(url)
        time.sleep(3)
        missing = {what: expr for what, expr in missing.items() if not prometheus.has_number(expr)}
    assert not missing
    assert all(value == 1 for value in prometheus.query("up"))
    assert prometheus.query('count(ray_glassblock_engine_start_seconds{application="glassblock"})') == [1]
    # Nothing of this is an alert.
    assert prometheus.alerts() == set()
