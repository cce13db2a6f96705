"""The playground's files over HTTP."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI

from serve_app import playground_api


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    app.include_router(playground_api.router)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


pytestmark = pytest.mark.anyio


async def test_the_page_may_load_and_reach_nothing_but_its_own_host(client):
    response = await client.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(item.split(" ", 1) for item in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in response.headers["content-security-policy"]
    assert response.headers["x-content-type-options"] == "nosniff"


async def test_the_page_holds_no_inline_script_style_or_handler(client):
    page = (await client.get("/")).text
    assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", page))
    assert "<style" not in page
    assert not re.search(r"\son\w+=|\sstyle=", page)


async def test_everything_that_a_file_refers_to_is_served_with_its_type(client):
    todo, seen = ["/"], set()
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        response = await client.get(path)
        assert response.status_code == 200, path
        base = httpx.URL(f"http://test{path}")
        kind = response.headers["content-type"]
        if kind.startswith("text/html"):
            found = re.findall(r'(?:src|href)="([^"]+)"', response.text)
        elif kind.startswith("text/javascript"):
            found = re.findall(r'(?:from|import)\s*"(\.[^"]+)"', response.text)
        else:
            found = []
        todo += [base.join(item).path for item in found]
    assert {"/playground/app.js", "/playground/styles.css", "/playground/vendor/preact.mjs"} <= seen
    unused = {
        name
        for name in playground_api.read_files(playground_api.FOLDER)
        if name.endswith((".js", ".mjs", ".css")) and f"/playground/{name}" not in seen
    }
    assert unused == set()


async def test_an_unchanged_file_is_not_sent_again(client):
    first = await client.get("/playground/app.js")
    tag = first.headers["etag"]
    assert first.headers["cache-control"] == "no-cache"
    for sent in (tag, f'"other", W/{tag}', "*"):
        again = await client.get("/playground/app.js", headers={"if-none-match": sent})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag), sent
    changed = await client.get("/playground/app.js", headers={"if-none-match": '"other"'})
    assert changed.status_code == 200


async def test_head_says_what_get_would(client):
    get, head = await client.get("/"), await client.head("/")
    assert head.status_code == 200
    assert head.headers["content-length"] == str(len(get.content))


@pytest.mark.parametrize(
    "path",
    [
        "/playground/",
        "/playground/../playground_api.py",
        "/playground/%2e%2e/playground_api.py",
        "/playground/..%2fplayground_api.py",
        "/playground/%2fetc%2fpasswd",
        "/playground//etc/passwd",
        "/playground/vendor",
        "/playground/app.js%00",
        "/playground/APP.JS",
    ],
)
async def test_a_path_that_is_no_file_of_the_page_is_not_found(client, path):
    assert (await client.get(path)).status_code == 404


def test_a_changed_file_has_another_tag_and_strange_files_are_left_out(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.js").write_text("one")
    (tmp_path / "b.exe").write_text("not served")
    before = playground_api.read_files(tmp_path)
    (tmp_path / "deep" / "a.js").write_text("two")
    after = playground_api.read_files(tmp_path)
    assert list(before) == ["deep/a.js"]
    assert before["deep/a.js"].etag != after["deep/a.js"].etag


def test_vendored_modules_are_listed_with_versions_and_licences():
    vendor = playground_api.FOLDER / "vendor"
    listed = (vendor / "README.md").read_text(encoding="utf-8")
    for module in vendor.glob("*.mjs"):
        (row,) = [line for line in listed.splitlines() if f"`{module.name}`" in line]
        licence = re.search(r"`(\S+\.LICENSE\.txt)`", row)
        assert licence is not None and (vendor / licence[1]).is_file(), row
        assert re.search(r"\d+\.\d+\.\d+", row), row
