"""Which API keys are valid, and the middleware that asks for one. Keys are kept as digests and never shown."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from .config import ApiKeySettings, keys_in_environment
from .errors import ApiError
from .middleware import note_error

logger = logging.getLogger("ray.serve")

_LOOK_EVERY_S = 1.0
"""How old what is known of the file may be."""
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/version"})
"""What needs no key: probes, and the page, which asks its user for one."""
OPEN_FOLDER = "/playground/"


def open_paths(settings: ApiKeySettings | None) -> frozenset[str]:
    """Paths that need no key with these settings."""
    return OPEN_PATHS | {"/metrics"} if settings is not None and settings.open_metrics else OPEN_PATHS


def _read(text: str) -> frozenset[bytes]:
    lines = (line.strip() for line in text.splitlines())
    return frozenset(hashlib.sha256(line.encode()).digest() for line in lines if line and not line.startswith("#"))


class ApiKeys:
    """The keys of a file and of an environment variable."""

    def __init__(self, settings: ApiKeySettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ValueError if the file or variable is missing, or no key is in either."""
        self._file = None if settings.file is None else Path(settings.file).expanduser()
        self._fixed = _read(keys_in_environment(settings))
        self._clock = clock
        self._state: tuple[int, int, int] | None = None
        self._from_file: frozenset[bytes] = frozenset()
        self._looked_at = clock()
        if self._file is not None:
            try:
                self._load(self._file)
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"api_keys.file {self._file} cannot be read: {error}") from None
        if not self._fixed | self._from_file:
            raise ValueError("api_keys is set and no key is given, so that nobody could come in; add one, a line each")

    def has(self, key: bytes) -> bool:
        """Whether the key is one of them. Takes the same time for all that are not."""
        self._look()
        digest, found = hashlib.sha256(key).digest(), False
        for known in self._fixed | self._from_file:
            found = hmac.compare_digest(known, digest) or found
        return found

    def _look(self) -> None:
        """Read the file again if it is another one; what cannot be read changes nothing."""
        now = self._clock()
        if self._file is None or now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        try:
            self._load(self._file)
        except (OSError, UnicodeDecodeError) as error:
            # Perhaps it is just being replaced. Whoever wants all keys gone leaves an empty file.
            logger.error("the file of API keys cannot be read, and the keys stay as they were: %s", error)

    def _load(self, file: Path) -> None:
        found = os.stat(file)
        state = (found.st_ino, found.st_mtime_ns, found.st_size)
        if state != self._state:
            self._from_file = _read(file.read_text(encoding="utf-8-sig"))
            self._state = state
            logger.info("%d API keys were read from %s", len(self._from_file), file)


class ApiKeyMiddleware:
    """Answers 401 unless a request has a valid key, or asks for what is open to all."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_paths: Iterable[str] = OPEN_PATHS) -> None:
        self.app = app
        self._keys = keys
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Look at the `authorization` header."""
        if scope["type"] != "http" or self._is_open(scope["path"].removeprefix(scope.get("root_path", ""))):
            await self.app(scope, receive, send)
            return
        error = self._refusal(dict(scope["headers"]).get(b"authorization", b""))
        if error is None:
            await self.app(scope, receive, send)
            return
        note_error(scope, error)
        body = json.dumps(error.body()).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"www-authenticate", b"Bearer"),
        ]
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    def _is_open(self, path: str) -> bool:
        return path in self._open_paths or path.startswith(OPEN_FOLDER)

    def _refusal(self, header: bytes) -> ApiError | None:
        scheme, _, key = header.partition(b" ")
        if scheme.lower() != b"bearer" or not key.strip():
            message = "this server asks for an API key; send the header `authorization: Bearer KEY`"
        elif self._keys.has(key.strip()):
            return None
        else:
            message = "the API key is not one of this server's"
        return ApiError(401, message, code="invalid_api_key")
