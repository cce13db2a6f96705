"""Work that stops when the client leaves, and streams that end as HTTP can tell."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import ClientDisconnected, is_expected, to_api_error
from .middleware import note_error
from .streaming import sse

logger = logging.getLogger("ray.serve")
T = TypeVar("T")


class StreamBroken(Exception):
    """Raised after an error was sent in a stream, so that the connection does not end as a success would."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, cancelled and ClientDisconnected raised when the client leaves first.

    The request's body must have been read before.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events.

    Closes `events` whatever happens. An error in them is sent as a last event, without the end marker, and the
    connection is cut.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all, or stop when the client leaves."""
        with suppress(ClientDisconnected):
            await until_disconnect(receive, self._send(scope, send))

    async def _send(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:
            # A stream ends here like a thread: what went wrong has nowhere else to go.
            if not is_expected(error):
                logger.exception("a stream failed")
            api_error = to_api_error(error)
            note_error(scope, api_error)
            body = sse(api_error.body())
            await send({"type": "http.response.body", "body": body, "more_body": True})
            raise StreamBroken("the stream ended with an error; its cause was sent as an event") from error
        await send({"type": "http.response.body", "body": b"", "more_body": False})
