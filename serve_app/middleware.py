"""ASGI middleware: plain functions around `receive` and `send`, so that a broken stream stays broken.

Starlette's function middleware would turn an exception in a stream into a clean end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine import Recorder

from .errors import ApiError, to_api_error

CLIENT_CLOSED_REQUEST = 499
"""Counted as the status of an answer whose client left before its end."""
_NOTES = "glassblock.notes"


class BodyLimitMiddleware:
    """Refuses a body beyond `max_bytes` with a 413, while it is being read."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count what is received."""
        num_bytes = 0

        async def receive_counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.max_bytes:
                raise HTTPException(413, f"the body is larger than the limit of {self.max_bytes} bytes")
            return message

        await self.app(scope, receive_counted, send)


@dataclass(slots=True)
class _Answer:
    """What is known of one request's answer so far."""

    status: int | None = None
    is_stream: bool = False
    first_byte_at: float | None = None
    is_complete: bool = False
    error_codes: list[str] = field(default_factory=list)


def note_error(scope: Scope, error: ApiError) -> None:
    """Tell the meter, if there is one, which error a request is answered with."""
    answer = scope.get(_NOTES)
    if answer is not None:
        answer.error_codes.append(error.code)


class MeterMiddleware:
    """Counts requests by route and status and errors by code, and takes the times of completions.

    A generation is a POST with status 200; other requests are counted and not timed.
    """

    def __init__(self, app: ASGIApp, recorder: Recorder, clock: Callable[[], float] = time.monotonic) -> None:
        self.app = app
        self._recorder = recorder
        self._clock = clock
        self._num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Watch what is sent."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, answer = self._clock(), _Answer()
        scope[_NOTES] = answer
        self._count_open(1)

        async def send_watched(message: Message) -> None:
            self._watch(answer, message)
            await send(message)
            # Not before: a body that could not be sent did not arrive.
            answer.is_complete = answer.is_complete or is_last(message)

        is_broken = False
        try:
            await self.app(scope, receive, send_watched)
        except Exception as error:
            is_broken = True
            if answer.status is None:
                # Whoever stands outside answers it, and with this.
                unforeseen = to_api_error(error)
                answer.status, answer.is_complete = unforeseen.status, True
                note_error(scope, unforeseen)
            raise
        finally:
            self._count_open(-1)
            self._record(scope, answer, started, is_broken=is_broken)

    def _count_open(self, change: int) -> None:
        self._num_open += change
        self._recorder.gauge("ingress_open_requests", self._num_open)

    def _watch(self, answer: _Answer, message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            content_type = dict(message.get("headers", ())).get(b"content-type", b"")
            answer.is_stream = content_type.startswith(b"text/event-stream")
        elif message.get("body") and answer.first_byte_at is None:
            answer.first_byte_at = self._clock()

    def _record(self, scope: Scope, answer: _Answer, started: float, *, is_broken: bool) -> None:
        recorder = self._recorder
        has_left = not answer.is_complete and not is_broken
        status = CLIENT_CLOSED_REQUEST if has_left or answer.status is None else answer.status
        route = route_pattern(scope)
        recorder.count("ingress_requests", route=route, code=str(status))
        for code in answer.error_codes:
            recorder.count("ingress_errors", code=code)
        if is_broken and answer.is_stream:
            recorder.count("ingress_cut_streams")
        if scope["method"] == "POST" and answer.status == 200:
            if answer.is_stream and answer.first_byte_at is not None:
                recorder.observe("ingress_first_token_seconds", answer.first_byte_at - started)
            if answer.is_complete:
                recorder.observe("ingress_request_seconds", self._clock() - started)


def is_last(message: Message) -> bool:
    """True of the message that ends an answer."""
    return message["type"] == "http.response.body" and not message.get("more_body", False)


def route_pattern(scope: Scope) -> str:
    """The route that the request was answered by, once it has been: `other` if none was found.

    The pattern, not the path: whoever scans for pages must not make a series of each.
    """
    return getattr(scope.get("route"), "path", "other")
