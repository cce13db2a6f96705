"""/openapi.json says what is: every field of a request has a description, and answers are as described."""

from __future__ import annotations

import json

import pytest
from jsonschema import Draft202012Validator

from tests.serve_app.streams import events_of

pytestmark = pytest.mark.anyio

PATHS = {
    "/v1/completions": {"prompt": "a sea"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}

EVERYTHING = {
    "max_tokens": 40,
    "seed": 1,
    "n": 2,
    "return_token_ids": True,
    "steering": {
        "concepts": ["music"],
        "strength": 2,
        "interventions": [{"concepts": [0, 2], "strength": 1}],
        "suppress": [{"concept": 1, "strength": 3}],
    },
    "attribution": {"level": "both"},
    "diffusion": {"policy": "threshold"},
}


async def description_of(server) -> dict:
    return (await server().get("/openapi.json")).json()


def validator(schema: dict, document: dict) -> Draft202012Validator:
    """References count from the document's root."""
    return Draft202012Validator({**schema, "components": document["components"]})


def content_of(document: dict, path: str, media_type: str) -> dict:
    content = document["paths"][path]["post"]["responses"]["200"]["content"][media_type]
    return content["itemSchema"] if media_type == "text/event-stream" else content["schema"]


@pytest.mark.parametrize("name", ["CompletionRequest", "ChatRequest"])
async def test_every_field_of_a_request_is_described(server, name):
    schemas = (await description_of(server))["components"]["schemas"]
    inner = ["SteeringSpec", "InterventionSpec", "SuppressionSpec", "OverrideSpec", "ConceptItem", "AttributionSpec"]
    for model in (name, *inner, "DiffusionSpec", "StreamOptions"):
        without = [field for field, schema in schemas[model]["properties"].items() if not schema.get("description")]
        assert not without, model


def fields_of(path: str) -> list[dict]:
    if path != "/v1/completions":
        return [{}, {"stop": ["q", "e"]}, {"logprobs": True, "top_logprobs": 2}]
    alone = {"echo": True, "steering": None, "attribution": None}
    return [{}, {"stop": ["q", "e"]}, {"logprobs": 2}, {**alone, "logprobs": 1}, {**alone, "max_tokens": 0}]


@pytest.mark.parametrize(("path", "fields"), [(path, fields) for path in PATHS for fields in fields_of(path)])
async def test_plain_answers_and_events_are_as_described(server, path, fields):
    document = await description_of(server)
    body = {**PATHS[path], **EVERYTHING, **fields}
    answer = (await server().post(body, path)).json()
    validator(content_of(document, path, "application/json"), document).validate(answer)
    stream = content_of(document, path, "text/event-stream")
    for options in (None, {"include_usage": True, "include_diffusion": "steps"}):
        response = await server().post({**body, "stream": True, "stream_options": options}, path)
        for event in events_of(response):
            Draft202012Validator(stream["properties"]["data"]["anyOf"][1]["contentSchema"]).validate(event)


@pytest.mark.parametrize("path", PATHS)
async def test_an_answer_with_a_field_too_many_is_not_as_described(server, path):
    document = await description_of(server)
    answer = (await server().post({**PATHS[path], "max_tokens": 2}, path)).json()
    answer["choices"][0]["surprise"] = 1
    assert not validator(content_of(document, path, "application/json"), document).is_valid(answer)


@pytest.mark.parametrize("path", PATHS)
async def test_what_is_described_is_accepted(server, path):
    """The schema of a request takes the requests that the server takes."""
    document = await description_of(server)
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    body = json.loads(json.dumps({**PATHS[path], **EVERYTHING, "stop": "x", "stream_options": None}))
    body |= {"logit_bias": None, "max_tokens": None, "diffusion": {"policy": None}}
    validator(schema, document).validate(body)
    assert (await server().post(body, path)).status_code == 200


async def test_a_no_to_logprobs_is_described_where_it_is_taken(server):
    """The server took `false` in place of a number, and its description did not."""
    document = await description_of(server)
    path = "/v1/completions"
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    for value, is_taken in ((False, True), (None, True), (2, True), (True, False), ("2", False)):
        body = {"prompt": "a", "max_tokens": 1, "logprobs": value}
        assert validator(schema, document).is_valid(body) == is_taken, value
        assert ((await server().post(body, path)).status_code == 200) == is_taken, value


async def test_a_concept_s_name_is_text_or_null_as_described(server):
    """Beside an id anything was taken for a name."""
    document = await description_of(server)
    path = "/v1/completions"
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    for name, is_taken in (("Music", True), (None, True), ({}, False), (7, False)):
        overrides = [{"concept": {"id": 2, "name": name}, "weight": 0}]
        body = {"prompt": "a", "max_tokens": 1, "steering": {"overrides": overrides}}
        assert validator(schema, document).is_valid(body) == is_taken, name
        assert ((await server().post(body, path)).status_code == 200) == is_taken, name
