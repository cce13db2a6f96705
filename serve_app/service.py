"""What every module of routes shares: the service behind them, checks of headers, errors and cancellation."""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, Request
from opentelemetry.trace import Tracer
from pydantic import BaseModel, ConfigDict

from engine import NullRecorder, Recorder

from .api_keys import OPEN_PATHS, ApiKeys
from .completions import EngineClient
from .config import CorsSettings, Limits
from .disconnect import until_disconnect
from .errors import ERROR_RESPONSE, KNOWN_ERRORS, ApiError, to_api_error
from .presets import PresetStore
from .prometheus_text import PrometheusRecorder
from .tracing import NO_TRACER
from .translation import Checkpoint

MAX_REQUEST_ID_LENGTH = 256
"""Characters of `x-request-id`, which is written into every line of the log that belongs to the request."""

T = TypeVar("T")


class Answer(BaseModel):
    """What a route answers with, for its description; fields are explained in place."""

    model_config = ConfigDict(use_attribute_docstrings=True)


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


def check_request_id(request: Request) -> None:
    """Raise a 400 for an `x-request-id` that would fill the log."""
    length = len(request.headers.get("x-request-id", ""))
    if length > MAX_REQUEST_ID_LENGTH:
        message = f"x-request-id has {length} characters; at most {MAX_REQUEST_ID_LENGTH} are allowed"
        raise ApiError(400, message, code="invalid_value", param="x-request-id")


def make_router(tag: str) -> APIRouter:
    """A router whose routes say how errors look, under one heading of the description."""
    # Under `default`, or FastAPI would announce 422s of its own shape.
    return APIRouter(tags=[tag], responses={"default": ERROR_RESPONSE}, dependencies=[Depends(check_request_id)])


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
