"""What HTTP counts and times, through the real API on a FakeEngine and a clock that the tests move."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from engine import NonFiniteLogits
from serve_app.api import create_api
from serve_app.config import Limits
from serve_app.middleware import MeterMiddleware
from serve_app.service import Service
from tests.fakes import FakeEngine
from tests.records import Clock, Records
from tests.serve_app.conftest import DirectClient

pytestmark = pytest.mark.anyio
ROUTE = "/v1/completions"


class Metered:
    """The API, its records, and a clock that goes on by a second with each batch of the engine's events."""

    def __init__(self, served, **options) -> None:
        self.clock, self.records = Clock(), Records()
        before = options.pop("before", None)

        async def tick(request, number):
            self.clock.now += 1
            if before is not None:
                await before(request, number)

        engine = FakeEngine(served.config, before=tick, **options)
        limits = Limits(max_body_bytes=10_000, max_prompts=4)
        service = Service(
            client=DirectClient(engine), checkpoint=served, limits=limits, created=1, recorder=self.records
        )
        self.app = create_api(service)
        self.app.user_middleware = [
            type(m)(m.cls, *m.args, **m.kwargs, **({"clock": self.clock} if m.cls is MeterMiddleware else {}))
            for m in self.app.user_middleware
        ]

    def client(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://test")

    async def post(self, **body) -> httpx.Response:
        async with self.client() as client:
            return await client.post(ROUTE, json=body)


@pytest.fixture
def metered(served):
    return lambda **options: Metered(served, **options)


async def test_a_plain_completion_is_counted_and_timed(metered):
    run = metered()
    # Started, three commits, and the beginning and end of a block: each comes with a second.
    response = await run.post(prompt="a", max_tokens=3)
    assert response.status_code == 200
    assert run.records.counts == {("ingress_requests", ROUTE, "200"): 1}
    (seconds,) = run.records.observed["ingress_request_seconds"]
    assert seconds == run.clock.now > 3
    assert not run.records.observed["ingress_first_token_seconds"]


async def test_a_stream_is_timed_to_its_first_and_to_its_last_byte(metered):
    run = metered()
    await run.post(prompt="a", max_tokens=3, stream=True)
    assert run.records.counts == {("ingress_requests", ROUTE, "200"): 1}
    (first,) = run.records.observed["ingress_first_token_seconds"]
    (last,) = run.records.observed["ingress_request_seconds"]
    assert 0 < first < last == run.clock.now


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"prompt": "a", "max_tokens": -1}, "400", "invalid_value"),
        ({"prompt": "a", "max_tokens": 5000}, "400", "context_length_exceeded"),
        ({"prompt": "a" * 20_000}, "413", "body_too_large"),
        ({"prompt": "a", "steering": {"concepts": ["nobody"], "strength": 1}}, "400", "concept_not_found"),
    ],
)
async def test_an_error_is_counted_by_its_code_and_not_timed(metered, body, status, code):
    run = metered()
    response = await run.post(**body)
    assert response.json()["error"]["code"] == code
    assert run.records.counts == {("ingress_requests", ROUTE, status): 1, ("ingress_errors", code): 1}
    assert not any(run.records.observed.values())


async def test_what_nobody_foresaw_is_an_internal_error_counted_once(metered):
    async def fail(request, number):
        raise RuntimeError("a bug")

    run = metered(before=fail)
    response = await run.post(prompt="a", max_tokens=3)
    assert response.status_code == 500
    assert run.records.counts == {
        ("ingress_requests", ROUTE, "500"): 1,
        ("ingress_errors", "internal_error"): 1,
    }


async def test_a_stream_that_breaks_counts_as_cut_with_its_code(metered):
    async def fail(request, number):
        if number == 3:
            raise NonFiniteLogits("the model gave none")

    run = metered(before=fail)
    await run.post(prompt="a", max_tokens=3, stream=True)
    assert run.records.counts == {
        ("ingress_requests", ROUTE, "200"): 1,
        ("ingress_errors", "non_finite_logits"): 1,
        "ingress_cut_streams": 1,
    }
    assert not run.records.observed["ingress_request_seconds"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_counts_as_that(metered, stream):
    begun = asyncio.Event()

    async def hang(request, number):
        if number == 3:
            begun.set()
            await asyncio.Event().wait()

    run = metered(before=hang)
    sent = [
        {
            "type": "http.request",
            "body": b'{"prompt": "a", "max_tokens": 3, "stream": %s}' % str(stream).lower().encode(),
        }
    ]

    async def receive():
        if sent:
            return sent.pop()
        await begun.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        return None

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": ROUTE, "headers": headers, "query_string": b"", "asgi": {}}
    await run.app(scope, receive, send)
    assert run.records.counts == {("ingress_requests", ROUTE, "499"): 1}
    assert not run.records.observed["ingress_request_seconds"]


async def test_routes_are_patterns_so_that_their_number_is_known(metered):
    run = metered()
    async with run.client() as client:
        for path in ("/v1/concepts/1", "/v1/concepts/2", "/v1/concepts/9999", "/x1", "/x2", "/health"):
            await client.get(path)
    assert run.records.counts == {
        ("ingress_requests", "/v1/concepts/{concept_id}", "200"): 2,
        ("ingress_requests", "/v1/concepts/{concept_id}", "404"): 1,
        ("ingress_requests", "other", "404"): 2,
        ("ingress_requests", "/health", "200"): 1,
        ("ingress_errors", "concept_not_found"): 1,
        ("ingress_errors", "not_found"): 2,
    }
    assert not any(run.records.observed.values())
