"""API keys and CORS, through the real application."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError

from serve_app.api import create_api
from serve_app.api_keys import OPEN_PATHS, ApiKeys, open_paths
from serve_app.config import ApiKeySettings, CorsSettings
from tests.records import Clock

pytestmark = pytest.mark.anyio
KEYS = "# of the team\nsk-one\n\n  sk-two  \nclé\n"


def client_of(server, **service_fields):
    app = create_api(replace(server().app.state.service, **service_fields))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(KEYS, encoding="utf-8")
    return file


async def status_of(server, keys, authorization: str | bytes | None, path="/v1/models", **fields) -> int:
    headers = [] if authorization is None else [("authorization", authorization)]
    async with client_of(server, api_keys=keys, **fields) as client:
        return (await client.get(path, headers=headers)).status_code


@pytest.mark.parametrize(
    "authorization",
    ["Bearer sk-one", "bearer sk-two", "BEARER  sk-one ", "Bearer clé".encode()],
    ids=repr,
)
async def test_a_key_of_the_file_opens(server, file, authorization):
    assert await status_of(server, ApiKeys(ApiKeySettings(file=str(file))), authorization) == 200


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "sk-one",
        "Basic sk-one",
        "Bearer sk-on",
        "Bearer sk-onee",
        "Bearer # of the team",
        "Bearer SK-ONE",
    ],
    ids=repr,
)
async def test_anything_else_does_not(server, file, authorization):
    keys = ApiKeys(ApiKeySettings(file=str(file)))
    headers = {} if authorization is None else {"authorization": authorization}
    async with client_of(server, api_keys=keys) as client:
        response = await client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (401, "invalid_api_key", "invalid_request_error")
    assert response.headers["www-authenticate"] == "Bearer"
    assert "sk-" not in response.text


async def test_without_keys_everybody_may_come_in(server):
    assert await status_of(server, None, None) == 200


async def test_keys_may_come_from_the_environment_and_add_to_the_files(server, file, monkeypatch):
    monkeypatch.setenv("KEYS_OF_THE_TEST", "sk-three\n#sk-four\n")
    both = ApiKeys(ApiKeySettings(file=str(file), environment="KEYS_OF_THE_TEST"))
    assert [both.has(key) for key in (b"sk-one", b"sk-three", b"sk-four", b"#sk-four")] == [True, True, False, False]
    alone = ApiKeys(ApiKeySettings(environment="KEYS_OF_THE_TEST"))
    assert [alone.has(key) for key in (b"sk-one", b"sk-three")] == [False, True]


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/metrics", "/", "/playground/app.js"])
async def test_probes_and_the_page_need_no_key(server, file, path):
    settings = ApiKeySettings(file=str(file))
    assert await status_of(server, ApiKeys(settings), None, path, open_paths=open_paths(settings)) == 200


@pytest.mark.parametrize(
    "path", ["/load", "/docs", "/openapi.json", "/tokenizer_info", "/nothing", "/health/", "/Health", "/playground"]
)
async def test_all_other_paths_do(server, file, path):
    assert await status_of(server, ApiKeys(ApiKeySettings(file=str(file))), None, path) == 401


async def test_a_prefix_of_the_whole_application_is_no_part_of_the_path(server, file):
    app = create_api(replace(server().app.state.service, api_keys=ApiKeys(ApiKeySettings(file=str(file)))))
    transport = httpx.ASGITransport(app=app, root_path="/models")
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.get("/models/health")).status_code == 200
        assert (await client.get("/models/load")).status_code == 401


async def test_metrics_can_be_closed(server, file):
    settings = ApiKeySettings(file=str(file), open_metrics=False)
    keys = ApiKeys(settings)
    assert open_paths(settings) == OPEN_PATHS
    assert await status_of(server, keys, None, "/metrics", open_paths=open_paths(settings)) == 401
    assert await status_of(server, keys, "Bearer sk-one", "/metrics", open_paths=open_paths(settings)) == 200


def test_a_changed_file_is_read_again_within_a_second(file):
    clock = Clock()
    keys = ApiKeys(ApiKeySettings(file=str(file)), clock=clock)
    file.write_text("sk-new\n")
    clock.now += 0.5
    assert keys.has(b"sk-one"), "not looked at for each request"
    clock.now += 1.0
    assert [keys.has(key) for key in (b"sk-one", b"sk-new")] == [False, True]
    file.write_text("")
    clock.now += 1.0
    assert not keys.has(b"sk-new"), "an empty file takes all keys back"


def test_a_file_may_begin_with_a_byte_order_mark(file):
    """Some editors write one: it became a part of the first key, which then opened nothing."""
    file.write_text("sk-marked\n", encoding="utf-8-sig")
    assert ApiKeys(ApiKeySettings(file=str(file))).has(b"sk-marked")


def test_a_file_that_cannot_be_read_leaves_the_keys_as_they_were(file):
    clock = Clock()
    keys = ApiKeys(ApiKeySettings(file=str(file)), clock=clock)
    file.unlink()
    clock.now += 2.0
    assert keys.has(b"sk-one")
    replacement = file.with_name("next")
    replacement.write_text("sk-new\n")
    os.replace(replacement, file)
    clock.now += 2.0
    assert keys.has(b"sk-new") and not keys.has(b"sk-one")


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n"])
def test_a_place_without_any_key_is_an_error_at_the_start(tmp_path, text):
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ValueError, match="no key is given"):
        ApiKeys(ApiKeySettings(file=str(file)))


def test_a_place_that_is_missing_is_an_error_at_the_start(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="cannot be read"):
        ApiKeys(ApiKeySettings(file=str(tmp_path / "nothing")))
    monkeypatch.delenv("KEYS_OF_THE_TEST", raising=False)
    with pytest.raises(ValueError, match="KEYS_OF_THE_TEST, which is not set"):
        ApiKeys(ApiKeySettings(environment="KEYS_OF_THE_TEST"))
    with pytest.raises(ValidationError, match="neither a file nor an environment variable"):
        ApiKeySettings()


async def test_no_key_is_logged_or_kept(server, file, caplog):
    keys = ApiKeys(ApiKeySettings(file=str(file)))
    log = logging.getLogger("ray.serve")
    log.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.DEBUG):
            assert await status_of(server, keys, "Bearer sk-wrong") == 401
            assert await status_of(server, keys, "Bearer sk-one") == 200
            ApiKeys(ApiKeySettings(file=str(file)))
    finally:
        log.removeHandler(caplog.handler)
    # Messages of the test's own HTTP client hold no headers.
    assert "sk-" not in caplog.text
    assert not any(b"sk-" in digest for digest in keys._from_file)


async def test_a_refusal_is_counted(server, file):
    async with client_of(server, api_keys=ApiKeys(ApiKeySettings(file=str(file)))) as client:
        await client.get("/v1/models")
        text = (await client.get("/metrics", headers={"authorization": "Bearer sk-one"})).text
    assert 'glassblock_ingress_errors_total{code="invalid_api_key"} 1.0' in text
    assert 'glassblock_ingress_requests_total{code="401",route="other"} 1.0' in text


PREFLIGHT = {
    "origin": "https://example.org",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-queue-timeout-seconds",
}


async def test_a_page_of_an_allowed_origin_may_ask_without_a_key_whether_it_may(server, file):
    cors = CorsSettings(allowed_origins=("https://example.org",))
    async with client_of(server, cors=cors, api_keys=ApiKeys(ApiKeySettings(file=str(file)))) as client:
        preflight = await client.options("/v1/completions", headers=PREFLIGHT)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://example.org"
        assert "x-queue-timeout-seconds" in preflight.headers["access-control-allow-headers"]
        refused = await client.get("/v1/models", headers={"origin": "https://example.org"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://example.org", "the page can read why"
        other = await client.options("/v1/completions", headers={**PREFLIGHT, "origin": "https://other.org"})
        assert other.status_code == 400 and "access-control-allow-origin" not in other.headers


async def test_no_other_origin_is_allowed_unless_it_is_named(server):
    async with client_of(server) as client:
        preflight = await client.options("/v1/completions", headers=PREFLIGHT)
        plain = await client.get("/v1/models", headers={"origin": "https://example.org"})
    assert preflight.status_code == 405
    assert "access-control-allow-origin" not in preflight.headers and "access-control-allow-origin" not in plain.headers


async def test_a_stream_of_an_allowed_origin_is_sent_as_it_comes(server):
    cors = CorsSettings(allowed_origins=("*",))
    async with client_of(server, cors=cors) as client:
        headers = {"origin": "https://example.org"}
        body = {"prompt": "a", "max_tokens": 3, "stream": True}
        response = await client.post("/v1/completions", json=body, headers=headers)
    assert response.headers["access-control-allow-origin"] == "*"
    assert response.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("origin", ["https://example.org", "http://localhost:3000", "http://[::1]:80", "*"])
def test_an_origin_is_taken_as_browsers_send_it(origin):
    assert CorsSettings(allowed_origins=(origin,)).allowed_origins == (origin,)


@pytest.mark.parametrize(
    "origin", ["example.org", "https://example.org/", "https://Example.org", "", "ftp://a", "null"]
)
def test_what_no_browser_sends_as_an_origin_is_refused(origin):
    with pytest.raises(ValidationError, match="an origin is a scheme"):
        CorsSettings(allowed_origins=(origin,))
