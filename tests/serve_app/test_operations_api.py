"""Probes, measurements, load and capabilities over HTTP."""

from __future__ import annotations

import asyncio
from typing import get_args

import pytest

from engine import EngineStopped, Policy
from serve_app.metrics_table import INGRESS_METRICS, PREFIX

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/metrics"])
async def test_a_probe_may_ask_with_head(server, path):
    target = server()
    async with target.client() as client:
        full, head = await client.get(path), await client.head(path)
    assert (head.status_code, head.headers["content-type"]) == (200, full.headers["content-type"])


async def test_ready_with_head_is_a_503_once_the_engine_is_gone(server):
    target = server()
    target.engine.failure = EngineStopped("the thread ended")
    async with target.client() as client:
        assert (await client.head("/ready")).status_code == 503
        assert (await client.head("/health")).status_code == 200


async def test_what_was_measured_is_told_as_prometheus_text(server):
    target = server()
    await target.post({"prompt": "a", "max_tokens": 2})
    await target.post({"prompt": "a", "max_tokens": -1})
    response = await target.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = response.text.splitlines()
    route = 'route="/v1/completions"'
    assert f'glassblock_ingress_requests_total{{code="200",{route}}} 1.0' in lines
    assert f'glassblock_ingress_requests_total{{code="400",{route}}} 1.0' in lines
    assert 'glassblock_ingress_errors_total{code="invalid_value"} 1.0' in lines
    assert "glassblock_ingress_request_seconds_count 1.0" in lines
    assert "glassblock_ingress_open_requests 1.0" in lines, "this very request"
    assert "process_start_time_seconds" in response.text


async def test_the_text_has_every_measurement_of_an_ingress(server):
    text = (await server().get("/metrics")).text
    for name, metric in INGRESS_METRICS.items():
        ending = "_total" if metric.kind == "counter" else ""
        assert f"# TYPE {PREFIX}{name}{ending} {metric.kind}" in text


async def test_openmetrics_comes_to_who_asks_for_it(server):
    async with server().client() as client:
        response = await client.get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")


async def test_load_tells_what_is_in_use(server):
    begun = asyncio.Event()
    end = asyncio.Event()

    async def wait(request, number):
        begun.set()
        await end.wait()

    target = server(before=wait)
    running = asyncio.create_task(target.post({"prompt": "a", "max_tokens": 1}))
    await begun.wait()
    busy = (await target.get("/load")).json()
    end.set()
    await running
    idle = (await target.get("/load")).json()
    assert (busy["server_load"], busy["lanes_in_use"], busy["lanes"]) == (1, 1, 64)
    assert (idle["server_load"], idle["lanes_in_use"]) == (0, 0)
    assert busy["replicas"] == [
        {"id": "local", "lanes": 64, "lanes_in_use": 1, "pages": 64, "pages_free": 63, "num_waiting": 0}
    ]
    assert busy["is_complete"] and busy["num_queued"] == 0


async def test_capabilities_are_those_of_the_checkpoint(server, served):
    told = (await server().get("/v1/capabilities")).json()
    assert told["model"] == {
        "id": "tiny",
        "context_length": 512,
        "block_length": 16,
        "n_layers": 2,
        "width": 32,
        "vocab_size": 280,
    }
    assert told["heads"]["known"] == {"num_concepts": 50, "num_steerable": 49, "first_id": 0, "reported": 6}
    assert told["heads"]["discovered"] == {"num_concepts": 70, "num_steerable": 0, "first_id": 50, "reported": 9}
    assert (told["limits"]["max_prompts"], told["limits"]["max_tokens"]) == (4, 512)
    assert set(told["policies"]) == set(get_args(Policy))
    assert told["policies"]["threshold"] == {"parameter": "threshold", "default": 0.9, "tokens_per_step": None}
    assert told["policies"]["confidence"] == {"parameter": None, "default": None, "tokens_per_step": 1}
    assert not told["has_presets"]


async def test_capabilities_say_of_guidance_what_a_request_with_it_is_answered(server):
    told = (await server().get("/v1/capabilities")).json()
    tried = await server().post({"prompt": "a", "max_tokens": 1, "diffusion": {"cfg_scale": 1.0}})
    assert told["has_guidance"] == (tried.status_code == 200)
    steering = {"overrides": [{"concept": 0, "weight": 1.0}]}
    tried = await server().post({"prompt": "a", "max_tokens": 1, "steering": steering})
    assert told["has_overrides"] == (tried.status_code == 200)


async def test_capabilities_name_analyses_that_exist(server):
    target = server()
    paths = (await target.get("/openapi.json")).json()["paths"]
    for path in (await target.get("/v1/capabilities")).json()["analyses"]:
        assert path in paths
