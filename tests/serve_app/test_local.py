"""What stands around the API where no proxy of Ray Serve is before it."""

from __future__ import annotations

import httpx
import pytest

from serve_app.api import MAX_REQUEST_ID_LENGTH
from serve_app.local import RequestIds

pytestmark = pytest.mark.anyio


async def answer_to(server, headers):
    transport = httpx.ASGITransport(app=RequestIds(server().app))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers)


async def test_a_request_keeps_its_id_and_gets_one_where_it_has_none(server):
    assert (await answer_to(server, {"x-request-id": "mine"})).headers.get_list("x-request-id") == ["mine"]
    first, second = await answer_to(server, {}), await answer_to(server, {"x-request-id": ""})
    assert first.status_code == second.status_code == 200
    assert first.headers["x-request-id"] and first.headers["x-request-id"] != second.headers["x-request-id"]


async def test_an_id_that_is_refused_is_returned_too(server):
    long = "x" * (MAX_REQUEST_ID_LENGTH + 1)
    answer = await answer_to(server, {"x-request-id": long})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-request-id")
    assert answer.headers["x-request-id"] == long
