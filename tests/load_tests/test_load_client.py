"""Streams as their clients see them: cut into events, read, and told apart from those that broke."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import pytest
import uvicorn

from load_tests.serving_sections.client import Client, Outcome, wait_ready
from load_tests.serving_sections.cost import process_name
from load_tests.serving_sections.events import BlockSpan, EventSplitter, read_stream, tokens_between


def event(**fields) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
TEXT = event(choices=[{"index": 0, "text": "a"}])
BLOCK = {"index": 0, "block": 0, "start": 0, "end": 8}


def test_events_come_out_whole_however_they_are_cut():
    stream = TEXT + event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 2}) + DONE
    whole = EventSplitter().feed(stream)
    assert len(whole) == 3 and whole[-1] == b"[DONE]"
    for size in (1, 2, 7, 50):
        splitter = EventSplitter()
        assert [e for at in range(0, len(stream), size) for e in splitter.feed(stream[at : at + size])] == whole


def test_an_event_that_never_ended_is_none():
    assert EventSplitter().feed(TEXT + b"data: {") == [TEXT[6:-2]]


def test_a_stream_tells_when_each_thing_came():
    stream = read_stream(
        [
            (1.0, event(choices=[], diffusion={"type": "generation.started", "index": 0})),
            (1.5, event(choices=[], diffusion={"type": "block.started", **BLOCK})[:20]),
            (2.0, event(choices=[], diffusion={"type": "block.started", **BLOCK})[20:]),
            (2.5, event(choices=[], diffusion={"type": "step", "index": 0, "block": 0, "commits": []})),
            (3.0, event(choices=[{"index": 0, "text": ""}])),
            (4.0, TEXT + event(choices=[], diffusion={"type": "block.sealed", **BLOCK, "text": "a"})),
            (5.0, event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 8}) + DONE),
        ]
    )
    assert (stream.first_byte, stream.first_commit, stream.first_token) == (1.0, 2.5, 4.0)
    assert stream.blocks == [BlockSpan(started=2.0, ended=4.0, num_tokens=8)]
    assert (stream.num_prompt_tokens, stream.num_tokens, stream.num_events) == (3, 8, 8)
    assert stream.is_done and stream.error_code is None


def test_tokens_are_spread_over_the_time_that_their_block_took():
    blocks = [BlockSpan(0.0, 4.0, 8), BlockSpan(4.0, 6.0, 8), BlockSpan(6.0, 6.0, 3)]
    assert tokens_between(blocks, 0.0, 7.0) == 19
    assert tokens_between(blocks, 1.0, 5.0) == 6 + 4
    assert tokens_between(blocks, 6.0, 7.0) == 3
    assert tokens_between(blocks, 7.0, 9.0) == 0


async def app(scope, receive, send):
    """Answers by what the prompt says."""
    if scope["type"] == "lifespan":
        return
    if scope["path"] == "/ready":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})
        return
    body = b""
    while (message := await receive()).get("more_body"):
        body += message["body"]
    kind = json.loads(body + message["body"])["prompt"]
    status = {"refused": 429, "broken": 502}.get(kind, 200)
    await send({"type": "http.response.start", "status": status, "headers": []})
    if kind == "refused":
        await send({"type": "http.response.body", "body": json.dumps({"error": {"code": "queue_full"}}).encode()})
        return
    await send({"type": "http.response.body", "body": TEXT, "more_body": True})
    if kind == "cut":
        raise ConnectionError("the server has gone")
    if kind == "error":
        await send({"type": "http.response.body", "body": event(error={"code": "internal_error"}), "more_body": True})
        raise ConnectionError("after it said why")
    await send({"type": "http.response.body", "body": b"" if kind == "silent" else DONE, "more_body": False})


@contextmanager
def serving() -> Iterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
        thread = Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as address:
        asyncio.run(wait_ready(address, 30.0))
        yield address


def send(url: str, kind: str) -> Outcome:
    async def one() -> Outcome:
        async with Client(url) as client:
            return (await client.send({"prompt": kind})).read()

    return asyncio.run(one())


def test_a_stream_with_its_end_marker_is_whole(url):
    outcome = send(url, "good")
    assert outcome.is_ok and not outcome.is_cut and outcome.code is None
    assert outcome.stream.first_token is not None and outcome.due <= outcome.sent <= outcome.ended


@pytest.mark.parametrize(("kind", "code"), [("cut", None), ("silent", None), ("error", "internal_error")])
def test_a_stream_that_ends_without_its_end_marker_is_cut(url, kind, code):
    """Also one that ends as HTTP bodies should: only the marker says that all of it came."""
    outcome = send(url, kind)
    assert outcome.is_cut and not outcome.is_ok
    assert outcome.code == code
    assert outcome.stream.first_token is not None


@pytest.mark.parametrize(("kind", "code"), [("refused", "queue_full"), ("broken", "http_502")])
def test_a_refusal_is_no_cut_stream(url, kind, code):
    outcome = send(url, kind)
    assert (outcome.code, outcome.is_cut, outcome.is_ok) == (code, False, False)


def test_nobody_there_is_an_outcome_too():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        outcome = send(f"http://127.0.0.1:{taken.getsockname()[1]}", "good")
    assert outcome.code == "ClientConnectorError" and not outcome.is_cut


def test_processes_are_named_by_what_they_do():
    assert process_name(["ray::ServeReplica:app:Ingress.handle_request"]) == "ServeReplica:app:Ingress"
    assert process_name(["ray::ProxyActor"]) == "ProxyActor"
    assert process_name(["/usr/bin/python3", "-u", "/x/log_monitor.py", "--a=b"]) == "log_monitor.py"
    assert process_name(["/opt/ray/gcs_server", "--port=1"]) == "gcs_server"
    assert process_name([]) == "unnamed"
