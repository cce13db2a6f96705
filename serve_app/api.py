"""The HTTP API as a FastAPI application. Knows an engine only through `EngineClient`, and nothing of Ray."""

from __future__ import annotations

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

from . import (
    __version__,
    concepts_api,
    embeddings_api,
    generate_api,
    input_attribution_api,
    likelihoods_api,
    models_api,
    operations_api,
    playground_api,
    presets_api,
    tokenizer_api,
)
from .api_keys import ApiKeyMiddleware
from .errors import (
    ERROR_RESPONSE,
    INVALID_REQUEST,
    SERVER_ERROR,
    ApiError,
    ClientDisconnected,
    from_unreadable,
    from_validation,
    to_api_error,
)
from .middleware import CLIENT_CLOSED_REQUEST, BodyLimitMiddleware, MeterMiddleware, note_error
from .prometheus_text import TeeRecorder
from .service import Service
from .tracing import NO_TRACER, TraceMiddleware

MAX_REQUEST_ID_LENGTH = 256
"""Characters of `x-request-id`, which is written into every line of the log that belongs to the request."""


def _check_request_id(request: Request) -> None:
    length = len(request.headers.get("x-request-id", ""))
    if length > MAX_REQUEST_ID_LENGTH:
        message = f"x-request-id has {length} characters; at most {MAX_REQUEST_ID_LENGTH} are allowed"
        raise ApiError(400, message, code="invalid_value", param="x-request-id")


_ROUTES = (
    generate_api,
    models_api,
    concepts_api,
    embeddings_api,
    likelihoods_api,
    input_attribution_api,
    presets_api,
    tokenizer_api,
    operations_api,
    playground_api,
)
"""Modules of routes, as the description shows them."""


def create_api(service: Service) -> FastAPI:
    """The application. Ray Serve in front of it takes `x-request-id` or makes one, and returns it."""
    app = FastAPI(
        title="Glassblock",
        version=__version__,
        description="Serves interpretable block-diffusion language models: steer by concepts, see why.",
        middleware=_middleware(service),
        dependencies=[Depends(_check_request_id)],
        # Under `default`, or FastAPI would announce 422s of its own shape.
        responses={"default": ERROR_RESPONSE},
        redoc_url=None,
    )
    app.state.service = service
    for module in _ROUTES:
        app.include_router(module.router)
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
