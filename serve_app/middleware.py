"""ASGI middleware: plain functions around `receive` and `send`, so that a broken stream stays broken.

Starlette's function middleware would turn an exception in a stream into a clean end.
"""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


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
