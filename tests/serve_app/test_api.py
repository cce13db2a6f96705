"""The routes beside completions."""

from __future__ import annotations

import pytest

from engine import EngineStopped
from serve_app import __version__

pytestmark = pytest.mark.anyio


async def test_the_one_model_is_listed_and_found_by_its_id(server):
    (model,) = (await server().get("/v1/models")).json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 512)
    assert (await server().get("/v1/models/tiny")).json() == model
    missing = await server().get("/v1/models/other/name")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_concepts_are_searched_page_by_page(server):
    first = (await server().get("/v1/concepts", query="animal", limit=2)).json()
    assert ([c["id"] for c in first["data"]], first["total"], first["has_more"]) == ([1, 0], 3, True)
    second = (await server().get("/v1/concepts", query="animal", limit=2, offset=2)).json()
    assert ([c["id"] for c in second["data"]], second["has_more"]) == ([2], False)
    whole = (await server().get("/v1/concepts", query="animal", limit=3)).json()
    assert (len(whole["data"]), whole["has_more"]) == (3, False)
    beyond = (await server().get("/v1/concepts", query="animal", offset=10**30)).json()
    assert (beyond["data"], beyond["has_more"]) == ([], False)


async def test_concepts_can_be_filtered(server):
    page = (await server().get("/v1/concepts", head="known", steerable="false", limit=1000)).json()
    assert [c["name"] for c in page["data"]] == ["Plants"]
    page = (await server().get("/v1/concepts", group="Nature", steerable="true")).json()
    assert [c["id"] for c in page["data"]] == [0, 1]


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/v1/concepts?limit=0", "limit"),
        ("/v1/concepts?limit=1001", "limit"),
        ("/v1/concepts?offset=-1", "offset"),
        ("/v1/concepts?head=unknown", "head"),
        ("/v1/concepts?steerable=perhaps", "steerable"),
        ("/v1/concepts?query=" + "x" * 501, "query"),
        ("/v1/concepts/one", "concept_id"),
        ("/v1/concepts/" + "9" * 5000, "concept_id"),
        ("/v1/concepts/1/top_tokens?k=0", "k"),
    ],
    ids=lambda value: value[:40],
)
async def test_a_bad_parameter_is_refused_by_name(server, path, param):
    response = await server().get(path)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_one_concept_is_found_by_its_id(server):
    assert (await server().get("/v1/concepts/2")).json()["name"] == "Music"
    missing = await server().get("/v1/concepts/120")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "concept_not_found")


async def test_top_tokens_tell_token_and_alignment(server):
    answer = (await server().get("/v1/concepts/2/top_tokens", k=3)).json()
    assert answer["concept"] == {"id": 2, "name": "Music"}
    assert [item["token_id"] for item in answer["data"]] == [2, 3, 4]
    assert answer["data"][0] == {"token_id": 2, "token": "#", "bytes": [35], "alignment": 3.0}


async def test_top_tokens_of_a_discovered_concept_ask_by_its_local_id(server):
    answer = (await server().get("/v1/concepts/57/top_tokens", k=1)).json()
    assert answer["data"][0]["token_id"] == 7


async def test_ready_is_a_503_once_the_engine_is_gone_while_health_stays(server):
    one = server()
    assert (await one.get("/ready")).status_code == 200
    one.engine.failure = EngineStopped("the thread ended")
    response = await one.get("/ready")
    assert (response.status_code, response.headers["retry-after"]) == (503, "2")
    assert (await one.get("/health")).status_code == 200


async def test_version_is_told(server):
    assert (await server().get("/version")).json() == {"version": __version__, "model": "tiny"}


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [("GET", "/nothing", 404, "not_found"), ("GET", "/v1/completions", 405, "method_not_allowed")],
)
async def test_errors_of_routing_have_the_same_shape(server, method, path, status, code):
    async with server().client() as client:
        response = await client.request(method, path)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)


async def test_the_api_describes_itself(server):
    paths = (await server().get("/openapi.json")).json()["paths"]
    body = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/CompletionRequest"}
    assert [each["name"] for each in paths["/v1/completions"]["post"]["parameters"]] == ["x-queue-timeout-seconds"]
    assert (await server().get("/docs")).status_code == 200


async def test_the_schema_marks_what_is_refused_and_shows_errors_as_they_are(server):
    schema = (await server().get("/openapi.json")).json()
    fields = schema["components"]["schemas"]["CompletionRequest"]["properties"]
    refused = {name for name, field in fields.items() if field.get("description", "").startswith("Not supported")}
    assert {"suffix", "presence_penalty", "tools", "response_format"} <= refused
    assert not {"prompt", "max_tokens", "seed", "top_p", "stop_token_ids", "steering"} & refused
    for name in refused:
        for value in fields[name]["enum"]:
            assert (await server().post({"prompt": "a", "max_tokens": 1, name: value})).status_code == 200
    operations = [operation for path in schema["paths"].values() for operation in path.values()]
    assert all(set(operation["responses"]) == {"200", "default"} for operation in operations)
    shown = operations[0]["responses"]["default"]["content"]["application/json"]["schema"]["properties"]["error"]
    answered = (await server().post({})).json()["error"]
    assert set(shown["properties"]) == set(answered)


async def caller_of(server, **headers: str):
    target = server()
    async with target.client() as client:
        body = {"prompt": "a", "max_tokens": 2, "priority": -3}
        response = await client.post("/v1/completions", json=body, headers=headers)
    return response, target.direct.callers, target.engine.requests


async def test_a_key_is_told_apart_from_others_and_never_told(server):
    tenants = []
    for key in ("sk-one", "sk-one", "sk-two"):
        _, (caller,), (asked,) = await caller_of(server, authorization=f"Bearer {key}")
        assert "sk" not in caller.tenant and caller.deadline_s is None
        assert asked.priority == -3
        tenants.append(caller.tenant)
    assert tenants[0] == tenants[1] != tenants[2]


@pytest.mark.parametrize("headers", [{}, {"authorization": "Basic abc"}, {"authorization": "Bearer "}], ids=str)
async def test_who_sends_no_key_shares_a_name(server, headers):
    _, (caller,), _ = await caller_of(server, **headers)
    assert caller.tenant == ""


async def test_a_callers_timeout_goes_with_its_request(server):
    _, (caller,), _ = await caller_of(server, **{"x-queue-timeout-seconds": "2.5"})
    assert caller.deadline_s == 2.5


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf", ""])
async def test_a_timeout_that_is_none_is_refused_by_name(server, value):
    response, callers, _ = await caller_of(server, **{"x-queue-timeout-seconds": value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "x-queue-timeout-seconds")
    assert not callers


@pytest.mark.parametrize("path", ["/v1/models", "/health"])
async def test_an_id_that_would_fill_the_log_is_refused_with_the_limit(server, path):
    async with server().client() as client:
        answer = await client.get(path, headers={"x-request-id": "x" * 257})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "x-request-id has 257 characters; at most 256 are allowed"
        assert answer.json()["error"]["param"] == "x-request-id"
        assert (await client.get(path, headers={"x-request-id": "x" * 256})).status_code == 200
