"""What the routes work with: the service behind them, who asks, and errors as the API shows them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fastapi import Request
from opentelemetry.trace import Tracer

from engine import NullRecorder, Recorder

from .completions import Caller, EngineClient
from .config import Limits
from .errors import KNOWN_ERRORS, ApiError, to_api_error
from .tracing import NO_TRACER
from .translation import Checkpoint

TIMEOUT_HEADER = "x-queue-timeout-seconds"
"""How long a request may wait for a replica. `x-request-timeout-seconds` is Serve's own, for the whole answer."""


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


@contextmanager
def api_errors() -> Iterator[None]:
    """Turn exceptions that the error table knows into ApiErrors."""
    try:
        yield
    except KNOWN_ERRORS as error:
        raise to_api_error(error) from error


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
    """The service that the application of this request was made with."""
    service: Service = request.app.state.service
    return service
