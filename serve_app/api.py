"""The HTTP API as a FastAPI application. Knows an engine only through `EngineClient`, and nothing of Ray."""

from __future__ import annotations

import hashlib
import math
import uuid
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

from . import __version__
from .api_keys import ApiKeyMiddleware
from .completions import Caller, Completion
from .concepts_api import router as concepts
from .disconnect import EventStream, until_disconnect
from .embeddings_api import router as embeddings
from .errors import (
    INVALID_REQUEST,
    SERVER_ERROR,
    ApiError,
    ClientDisconnected,
    from_unreadable,
    from_validation,
    to_api_error,
)
from .middleware import CLIENT_CLOSED_REQUEST, BodyLimitMiddleware, MeterMiddleware, note_error
from .operations_api import router as operations
from .presets_api import router as presets
from .prometheus_text import TeeRecorder
from .schemas import CompletionRequest
from .service import Service, api_errors, make_router, service_of
from .tokenizer_api import router as tokenizer
from .tracing import NO_TRACER, TraceMiddleware
from .translation import check_model, to_engine

router = make_router("generate")
TIMEOUT_HEADER = "x-queue-timeout-seconds"
"""How long a request may wait for a replica. `x-request-timeout-seconds` is Serve's own, for the whole answer."""
_HEADERS = [
    {
        "name": TIMEOUT_HEADER,
        "in": "header",
        "description": "Seconds above 0 that the request may wait for a replica before a 408. Absent: no limit.",
        "schema": {"type": "number", "exclusiveMinimum": 0},
    },
]
"""What the code reads from the request itself, so that FastAPI does not find it."""


def create_api(service: Service) -> FastAPI:
    """The application. Ray Serve in front of it takes `x-request-id` or makes one, and returns it."""
    app = FastAPI(
        title="Glassblock",
        version=__version__,
        description="Serves interpretable block-diffusion language models: steer by concepts, see why.",
        middleware=_middleware(service),
        redoc_url=None,
    )
    app.state.service = service
    for each in (router, concepts, embeddings, operations, presets, tokenizer):
        app.include_router(each)
    for kind, handler in (
        (ApiError, _answer_error),
        (RequestValidationError, _answer_invalid),
        (HTTPException, _answer_http_error),
        (ClientDisconnected, _answer_nobody),
        (Exception, _answer_error),
    ):
        app.add_exception_handler(kind, handler)
    return app


def _middleware(service: Service) -> list[Middleware]:
    """What stands around the routes, the outermost first."""
    layers = [] if service.tracer is NO_TRACER else [Middleware(TraceMiddleware, tracer=service.tracer)]
    layers.append(Middleware(MeterMiddleware, recorder=TeeRecorder(service.recorder, service.metrics)))
    if service.cors.allowed_origins:
        # Before keys are asked for, which browsers do not send with their preflight, and so that pages can read a 401.
        layers.append(Middleware(CORSMiddleware, **service.cors.middleware_options))
    if service.api_keys is not None:
        layers.append(Middleware(ApiKeyMiddleware, keys=service.api_keys, open_paths=service.open_paths))
    layers.append(Middleware(BodyLimitMiddleware, max_bytes=service.limits.max_body_bytes))
    return layers


@router.post("/v1/completions", openapi_extra={"parameters": _HEADERS})
async def create_completion(request: Request, body: CompletionRequest) -> Response:
    """Continue a prompt, plain or as server-sent events."""
    service = service_of(request)
    completion_id = f"cmpl-{uuid.uuid4().hex}"
    with api_errors():
        engine_requests = to_engine(
            body, service.checkpoint, completion_id=completion_id, max_prompts=service.limits.max_prompts
        )
        caller = _caller(request)
        completion = Completion(service.client, body, engine_requests, service.checkpoint, completion_id, caller)
        if body.stream:
            return EventStream(await until_disconnect(request.receive, _started(completion)))
        return JSONResponse(await until_disconnect(request.receive, _finished(completion)))


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The models served: one."""
    return {"object": "list", "data": [_model(service_of(request))]}


@router.get("/v1/models/{model:path}")
async def get_model(request: Request, model: str) -> dict[str, Any]:
    """One model."""
    service = service_of(request)
    check_model(model, service.checkpoint)
    return _model(service)


async def _finished(completion: Completion) -> dict[str, Any]:
    async with aclosing(completion):
        return await completion.answer()


async def _started(completion: Completion) -> Any:
    """The completion's events, once it has begun; what refuses it is raised here, while a status can still say it."""
    await completion.start()

    async def events() -> Any:
        async with aclosing(completion):
            async for event in completion.stream():
                yield event

    return events()


def _caller(request: Request) -> Caller:
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


def _model(service: Service) -> dict[str, Any]:
    checkpoint = service.checkpoint
    return {
        "id": checkpoint.model_id,
        "object": "model",
        "created": service.created,
        "owned_by": "glassblock",
        "max_model_len": checkpoint.config.block_size,
    }


def _respond(request: Request, error: ApiError) -> JSONResponse:
    note_error(request.scope, error)
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers())


async def _answer_error(request: Request, error: Exception) -> Response:
    return _respond(request, to_api_error(error))


async def _answer_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.method == "POST" and media_type != "application/json" and not media_type.endswith("+json"):
        # Taking any type would let every web page that a user visits post to a server on the user's machine.
        message = f"content-type is {media_type!r}; send application/json (with curl: --json instead of -d)"
        return _respond(request, ApiError(415, message, code="unsupported_media_type"))
    return _respond(request, from_validation(error.errors(), error.body))


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 400:
        # FastAPI raises it for a body that is no JSON for another reason than its grammar, and hides the reason.
        return _respond(
            request, from_unreadable(error.__cause__, request.headers.get("content-encoding", "").strip().lower())
        )
    code = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}.get(error.status_code, "invalid_value")
    kind = SERVER_ERROR if error.status_code >= 500 else INVALID_REQUEST
    response = _respond(request, ApiError(error.status_code, str(error.detail), code=code, type=kind))
    response.headers.update(error.headers or {})
    return response


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
