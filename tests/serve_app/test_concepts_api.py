"""What is near a concept, and which are active in a text, over HTTP."""

from __future__ import annotations

import pytest

from engine import InspectTokens

pytestmark = pytest.mark.anyio
PATH = "/v1/concepts/inspect"


async def test_neighbors_are_named_with_their_cosine(server):
    answer = (await server().get("/v1/concepts/1/neighbors", k=2)).json()
    assert answer["concept"] == {"id": 1, "name": "Animal husbandry"}
    assert answer["data"] == [
        {"id": 2, "name": "Music", "head": "known", "cosine": 1.0},
        {"id": 3, "name": "Plants", "head": "known", "cosine": 0.9375},
    ]


async def test_neighbors_of_a_discovered_concept_are_discovered_ones(server):
    answer = (await server().get("/v1/concepts/57/neighbors", k=1)).json()
    assert answer["data"] == [{"id": 58, "name": None, "head": "discovered", "cosine": 1.0}]
    assert len((await server().get("/v1/concepts/57/neighbors", k=1000)).json()["data"]) == 69


@pytest.mark.parametrize(
    ("path", "status", "param"),
    [
        ("/v1/concepts/120/neighbors", 404, "concept_id"),
        ("/v1/concepts/1/neighbors?k=0", 400, "k"),
        ("/v1/concepts/1/neighbors?k=1001", 400, "k"),
    ],
)
async def test_bad_questions_for_neighbors_are_refused_by_name(server, path, status, param):
    response = await server().get(path)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


async def test_a_text_is_inspected_token_by_token(server, served):
    target = server()
    answer = (await target.post({"input": "an animal", "top_k": 1}, PATH)).json()
    token_ids = served.tokenizer.encode("an animal")
    assert target.engine.analyses == [InspectTokens(token_ids=token_ids, top_k=1)]
    assert b"".join(bytes(token["bytes"]) for token in answer["tokens"]) == b"an animal"
    first = answer["tokens"][0]
    assert (first["position"], first["token_id"]) == (0, token_ids[0])
    assert first["known"] == [{"id": 0, "name": "Animals", "weight": 0.5, "contribution": 1.0}]
    assert first["discovered"] == [{"id": 50, "name": "Found thing", "weight": 0.5, "contribution": 1.0}]
    assert answer["usage"]["total_tokens"] == len(token_ids)


async def test_ids_and_messages_are_inspected_too(server, served):
    target = server()
    await target.post({"input": [5, 6]}, PATH)
    await target.post({"input": [{"role": "user", "content": "sing"}]}, PATH)
    ids, messages = target.engine.analyses
    assert ids == InspectTokens(token_ids=(5, 6), top_k=8)
    sing = tuple(served.tokenizer.encode("sing"))
    assert messages.token_ids[0] == served.config.start_header_id and sing[0] in messages.token_ids


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "invalid_value", "input"),
        ({"input": ""}, "invalid_value", "input"),
        ({"input": []}, "invalid_value", "input"),
        ({"input": ["a"]}, "invalid_value", "input"),
        ({"input": [1, True]}, "invalid_value", "input"),
        ({"input": [1, 280]}, "invalid_value", "input[1]"),
        ({"input": [{"role": "user"}]}, "invalid_value", "input[0].content"),
        ({"input": "a", "top_k": 1025}, "invalid_value", "top_k"),
        ({"input": "a", "top_k": -1}, "invalid_value", "top_k"),
        ({"input": "a", "steering": {}}, "invalid_value", "steering"),
        ({"input": "a" * 20_000}, "context_length_exceeded", "input"),
        ({"input": [1] * 513}, "context_length_exceeded", "input"),
        ({"input": "a", "model": "other"}, "model_not_found", "model"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_what_cannot_be_inspected_is_refused_by_name_before_any_work(server, body, code, param):
    target = server()
    error = (await target.post(body, PATH)).json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert not target.engine.analyses


async def test_messages_that_cannot_be_encoded_are_refused_as_the_input_that_they_are(server):
    """The error named `messages`, a field that this body has not."""
    target = server()
    target.without_chat_template()
    response = await target.post({"input": [{"role": "user", "content": "sing"}]}, PATH)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "chat_template_missing", "input")


async def test_the_largest_top_k_and_none_are_taken(server):
    for top_k in (0, 1024):
        assert (await server().post({"input": "a", "top_k": top_k}, PATH)).status_code == 200
