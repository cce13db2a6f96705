"""Every JSON route's real answers against the model that /openapi.json gives for it.

Several routes write their answer themselves, past the check that FastAPI makes of what a route returns. Here a real
engine answers, and the description is held against it, keys that it does not name included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from engine import Analysis, AnalysisResult, ConceptContribution, Inspection, InspectTokens, TokenConcepts
from serve_app.local import local_server
from tests.fakes import FakeEngine

Ask = Callable[[httpx.Client], httpx.Response]

PROMPT = {"prompt": "a sea", "max_tokens": 5, "seed": 1}
CHAT = {"messages": [{"role": "user", "content": "a sea"}], "max_tokens": 5, "seed": 1}
EVERYTHING: dict[str, Any] = {
    "n": 2,
    "return_token_ids": True,
    "diffusion": {"policy": "threshold", "cfg_scale": 1.5},
    "attribution": {"level": "both", "heads": ["known", "discovered"]},
    "steering": {
        "interventions": [{"concepts": ["music"], "strength": 1, "schedule": "hard_cutoff"}],
        "suppress": [{"concept": 1, "strength": 3}],
        "overrides": [{"concept": 2, "weight": 0.5}],
    },
}
STEERING = {"interventions": [{"concepts": ["music", 0], "strength": 2}], "suppress": [{"concept": 1, "strength": 3}]}
PRESET = {"name": "tune", "steering": {**STEERING, "overrides": [{"concept": 2, "weight": 0}]}}


def post(path: str, body: dict[str, Any]) -> Ask:
    return lambda client: client.post(path, json=body)


def get(path: str, **query: Any) -> Ask:
    return lambda client: client.get(path, params=query)


def with_preset(method: str, path: str) -> Ask:
    """Asked with a preset there that has two versions."""

    def ask(client: httpx.Client) -> httpx.Response:
        for description in ("first", "second"):
            client.post("/v1/steering/presets", json={**PRESET, "description": description}).raise_for_status()
        return client.request(method, path)

    return ask


def replayed(client: httpx.Client) -> httpx.Response:
    attributed = client.post("/v1/attributions/input", json={"request": PROMPT, "n_steps": 2}).raise_for_status()
    return client.post("/v1/traces/replay", json={"trace": attributed.json()["trace"]})


EMBEDDED = ("hidden", "composed", "known", "discovered")

CASES: dict[str, list[Ask]] = {
    "POST /v1/completions": [
        post("/v1/completions", PROMPT),
        post("/v1/completions", PROMPT | EVERYTHING),
        post("/v1/completions", PROMPT | {"logprobs": 2, "echo": True}),
        post("/v1/completions", PROMPT | {"stop": ["a", "e"]}),
    ],
    "POST /v1/chat/completions": [
        post("/v1/chat/completions", CHAT),
        post("/v1/chat/completions", CHAT | EVERYTHING),
        post("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}),
    ],
    "GET /v1/models": [get("/v1/models")],
    "GET /v1/models/{model}": [lambda client: client.get(f"/v1/models/{model_of(client)}")],
    "GET /v1/concepts": [get("/v1/concepts"), get("/v1/concepts", query="animal", limit=2)],
    "GET /v1/concepts/{concept_id}": [get("/v1/concepts/0"), get("/v1/concepts/50"), get("/v1/concepts/60")],
    "GET /v1/concepts/{concept_id}/top_tokens": [get("/v1/concepts/0/top_tokens"), get("/v1/concepts/60/top_tokens")],
    "GET /v1/concepts/{concept_id}/neighbors": [get("/v1/concepts/0/neighbors"), get("/v1/concepts/60/neighbors")],
    "POST /v1/concepts/inspect": [
        post("/v1/concepts/inspect", {"input": "an animal"}),
        post("/v1/concepts/inspect", {"input": CHAT["messages"], "top_k": 0}),
    ],
    "POST /v1/embeddings": [
        *(post("/v1/embeddings", {"input": ["a sea", "été"], "embedding_type": kind}) for kind in EMBEDDED),
        post("/v1/embeddings", {"input": [1, 2, 3], "encoding_format": "base64"}),
    ],
    "POST /v1/likelihoods": [post("/v1/likelihoods", {"prompt": "a", "continuation": " sea", "num_samples": 2})],
    "POST /v1/attributions/input": [
        post("/v1/attributions/input", {"request": PROMPT, "n_steps": 2}),
        post("/v1/attributions/input", {"request": CHAT, "n_steps": 2, "targets": [0], "top_k": 1}),
    ],
    "POST /v1/traces/replay": [replayed],
    "POST /v1/steering/presets": [post("/v1/steering/presets", PRESET)],
    "GET /v1/steering/presets": [with_preset("GET", "/v1/steering/presets")],
    "GET /v1/steering/presets/{preset_id}": [with_preset("GET", "/v1/steering/presets/tune@1")],
    "DELETE /v1/steering/presets/{preset_id}": [with_preset("DELETE", "/v1/steering/presets/tune")],
    "POST /tokenize": [
        post("/tokenize", {"prompt": "a sea", "return_token_strs": True}),
        post("/tokenize", {"messages": CHAT["messages"]}),
    ],
    "POST /detokenize": [post("/detokenize", {"tokens": [1, 2, 3]})],
    "GET /tokenizer_info": [get("/tokenizer_info")],
    "GET /health": [get("/health")],
    "GET /ready": [get("/ready")],
    "GET /version": [get("/version")],
    "GET /load": [get("/load")],
    "GET /v1/capabilities": [get("/v1/capabilities")],
}
NO_JSON = {"GET /metrics"}


def model_of(client: httpx.Client) -> str:
    name: str = client.get("/v1/models").json()["data"][0]["id"]
    return name


@pytest.fixture(scope="module")
def client(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        with local_server(str(folder)) as url, httpx.Client(base_url=url, timeout=60) as client:
            yield client


@pytest.fixture(scope="module")
def document(client: httpx.Client) -> dict[str, Any]:
    described: dict[str, Any] = client.get("/openapi.json").json()
    return described


def schema_of(document: dict[str, Any], operation: str) -> dict[str, Any]:
    """What a plain answer of the operation is said to be."""
    method, path = operation.split(" ")
    content = document["paths"][path][method.lower()]["responses"]["200"]["content"]["application/json"]
    # References count from the document's root.
    return {**content["schema"], "components": document["components"]}


def problems(schema: dict[str, Any], answer: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema).iter_errors(answer)]


@pytest.mark.parametrize(
    ("operation", "ask"),
    [
        pytest.param(operation, ask, id=f"{operation} {number}")
        for operation, asks in CASES.items()
        for number, ask in enumerate(asks)
    ],
)
def test_a_real_answer_is_as_its_model_says(client, document, operation: str, ask: Ask):
    response = ask(client)
    assert response.status_code == 200, response.text
    assert not problems(schema_of(document, operation), response.json())


def test_every_route_of_the_description_has_an_answer_here(document):
    operations = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    assert operations == CASES.keys() | NO_JSON


@pytest.mark.parametrize("operation", CASES)
def test_a_model_refuses_an_answer_with_a_key_too_many_or_one_too_few(document, operation: str):
    """Models that take anything would agree with anything."""
    schema = schema_of(document, operation)
    name = schema["$ref"].rpartition("/")[2]
    assert document["components"]["schemas"][name]["additionalProperties"] is False
    assert any("surprise" in problem for problem in problems(schema, {"surprise": 1}))
    assert any("required" in problem for problem in problems(schema, {}))


class Overflowing(FakeEngine):
    """Finds what JSON has no number for."""

    async def analyze(self, analysis: Analysis) -> AnalysisResult:
        assert isinstance(analysis, InspectTokens)
        concept = ConceptContribution(0, math.nan, math.inf)
        return Inspection(tokens=tuple(TokenConcepts(known=(concept,), discovered=()) for _ in analysis.token_ids))


@pytest.mark.anyio
async def test_an_inspection_that_overflows_is_as_its_model_says(server, document):
    """Its numbers are null then, of which the model knew nothing."""
    answer = await server(engine_class=Overflowing).post({"input": "a"}, "/v1/concepts/inspect")
    assert answer.json()["tokens"][0]["known"][0] == {"id": 0, "name": "Animals", "weight": None, "contribution": None}
    assert not problems(schema_of(document, "POST /v1/concepts/inspect"), answer.json())
