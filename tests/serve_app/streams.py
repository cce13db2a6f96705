"""Reading streams of server-sent events."""

from __future__ import annotations

import json

import httpx


def events_of(response: httpx.Response) -> list[dict]:
    """The JSON events of a stream that ended well."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, end = response.text.split("\n\n")
    assert end == ""
    assert all(event.startswith("data: ") and "\n" not in event and "\r" not in event for event in events)
    assert events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def streamed_text(events: list[dict], index: int = 0) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"] if choice["index"] == index)


def diffusion_of(events: list[dict], kind: str | None = None) -> list[dict]:
    found = [event["diffusion"] for event in events if "diffusion" in event]
    return [event for event in found if kind is None or event["type"] == kind]
