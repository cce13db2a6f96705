"""One streaming request over HTTP, as its client sees it.

Each piece of the body is kept with the moment at which it arrived and is read when the stream is over.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from .events import Stream, read_stream

COMPLETIONS = "/v1/completions"


@dataclass(slots=True)
class Answer:
    """What came back. Moments are seconds of `time.monotonic`."""

    due: float
    """When it should have been sent; later than that is a delay that counts."""
    sent: float
    status: int | None = None
    """None: no answer came at all."""
    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    failure: str | None = None
    """How the connection broke."""
    ended: float = 0.0

    def read(self) -> Outcome:
        """Read it and drop the bytes."""
        body = b"".join(chunk for _, chunk in self.chunks)
        is_stream = self.status == 200
        stream = read_stream(self.chunks) if is_stream else Stream()
        self.chunks = []
        if is_stream:
            code = stream.error_code
        else:
            code = _error_code(self.status, body, self.failure)
        return Outcome(self.due, self.sent, self.ended, stream, code=code, is_cut=is_stream and not stream.is_done)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request, read."""

    due: float
    sent: float
    ended: float
    stream: Stream
    code: str | None
    """The error's code, `http_<status>` where the body names none, or the name of what broke the connection."""
    is_cut: bool
    """The stream began and ended without its end marker, with an error event or without."""

    @property
    def is_ok(self) -> bool:
        """All of it came."""
        return self.code is None and not self.is_cut


def _error_code(status: int | None, body: bytes, failure: str | None) -> str:
    if status is None:
        return failure or "no_answer"
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return f"http_{status}"


class Client:
    """Sends requests to one server, as many at once as it is asked for."""

    def __init__(self, url: str, *, timeout_s: float = 600.0) -> None:
        self._url = url.rstrip("/") + COMPLETIONS
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        # Twice the largest chunk that a server here sends, so that one read takes all there is.
        self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout, read_bufsize=2**20)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def send(self, body: dict[str, Any], due: float | None = None) -> Answer:
        """Send one request; never raises for what the server or the network does."""
        assert self._session is not None, "use the client in an `async with`"
        now = time.monotonic()
        answer = Answer(due=now if due is None else due, sent=now)
        try:
            async with self._session.post(self._url, json=body) as response:
                answer.status = response.status
                async for chunk in response.content.iter_any():
                    answer.chunks.append((time.monotonic(), chunk))
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            # A stream that broke keeps its status and what had come.
            answer.failure = type(error).__name__
        answer.ended = time.monotonic()
        return answer


async def wait_ready(url: str, timeout_s: float) -> None:
    """Return once the server says that an engine is ready; raises TimeoutError."""
    end = time.monotonic() + timeout_s
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
        while time.monotonic() < end:
            try:
                async with session.get(url.rstrip("/") + "/ready") as response:
                    if response.status == 200:
                        return
            except (TimeoutError, aiohttp.ClientError, OSError):
                pass
            await asyncio.sleep(0.2)
    raise TimeoutError(f"{url}/ready did not answer 200 within {timeout_s:.0f} s")
