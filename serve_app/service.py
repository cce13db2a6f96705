"""What modules of routes work with: the service behind them, who asks, errors, and work that a client may leave."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request
from opentelemetry.trace import Tracer

from engine import NullRecorder, Recorder

from .api_keys import OPEN_PATHS, ApiKeys
from .completions import Caller, EngineClient
from .config import CorsSettings, Limits
from .disconnect import until_disconnect
from .errors import KNOWN_ERRORS, ApiError, to_api_error
from .preset_steering import Fields, apply_preset, names_preset
from .presets import PresetStore
from .prometheus_text import PrometheusRecorder
from .tracing import NO_TRACER
from .translation import Checkpoint

TIMEOUT_HEADER = "x-queue-timeout-seconds"
"""How long a request may wait for a replica. `x-request-timeout-seconds` is Serve's own, for the whole answer."""

T = TypeVar("T")

QUEUE_HEADERS = {
    "parameters": [
        {
            "name": TIMEOUT_HEADER,
            "in": "header",
            "description": "Seconds above 0 that the request may wait for a replica before a 408. Absent: no limit.",
            "schema": {"type": "number", "exclusiveMinimum": 0},
        },
    ]
}
"""For a route's description: what `caller_of` reads from the request itself, so that FastAPI does not find it."""


@dataclass(frozen=True, slots=True)
class Service:
    """What the routes work with."""

    client: EngineClient
    checkpoint: Checkpoint
    limits: Limits
    created: int
    """When the model came up, in seconds since 1970."""
    recorder: Recorder = field(default_factory=NullRecorder)
    """Takes what HTTP measures."""
    tracer: Tracer = NO_TRACER
    """Makes the spans of HTTP requests."""
    presets: PresetStore | None = None
    """Named steering. None: this server keeps none."""
    cors: CorsSettings = field(default_factory=CorsSettings)
    """Which pages of other origins may call."""
    api_keys: ApiKeys | None = None
    """Whose keys are asked for. None: everybody may call."""
    open_paths: frozenset[str] = OPEN_PATHS
    """What needs no key all the same."""
    metrics: PrometheusRecorder = field(default_factory=PrometheusRecorder)
    """What `/metrics` tells."""


def caller_of(request: Request) -> Caller:
    """Who sent a request. Raises ApiError for a timeout that is no time."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    # Only to tell keys apart: whoever reads it, in a queue or in a log, learns nothing of the key.
    is_key = scheme.lower() == "bearer" and key.strip() != ""
    tenant = hashlib.blake2b(key.strip().encode(), digest_size=8).hexdigest() if is_key else ""
    timeout = request.headers.get(TIMEOUT_HEADER)
    if timeout is None:
        return Caller(tenant=tenant)
    try:
        timeout_s = float(timeout)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s < math.inf:
        message = f"{TIMEOUT_HEADER} is {timeout!r}; it must be a number of seconds above 0"
        raise ApiError(400, message, code="invalid_value", param=TIMEOUT_HEADER)
    return Caller(tenant=tenant, deadline_s=timeout_s)


def service_of(request: Request) -> Service:
    """The service that the application was made for."""
    service: Service = request.app.state.service
    return service


@contextmanager
def api_errors() -> Iterator[None]:
    """Turn exceptions that the error table knows into ApiErrors."""
    try:
        yield
    except KNOWN_ERRORS as error:
        raise to_api_error(error) from error


async def answer_of(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives, cancelled as soon as the client leaves; the request's body must have been read before."""
    with api_errors():
        return await until_disconnect(request.receive, work)


async def with_named_preset(request: Fields, service: Service) -> Fields:
    """A request to generate, with the preset that it names; raises ApiError for one that cannot be had."""
    if not names_preset(request):
        return request
    # Presets are files, which may be far away.
    return await asyncio.to_thread(apply_preset, request, service.checkpoint, service.presets)
