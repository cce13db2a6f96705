"""The HTTP API as a FastAPI application. Knows an engine only through `EngineClient`, and nothing of Ray."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, Response

from . import __version__, generate_api
from .concepts import Concept
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
from .schemas import Head
from .service import Service, api_errors, service_of
from .tracing import NO_TRACER, TraceMiddleware
from .translation import check_model

MAX_REQUEST_ID_LENGTH = 256
"""Characters of `x-request-id`, which is written into every line of the log that belongs to the request."""


def _check_request_id(request: Request) -> None:
    length = len(request.headers.get("x-request-id", ""))
    if length > MAX_REQUEST_ID_LENGTH:
        message = f"x-request-id has {length} characters; at most {MAX_REQUEST_ID_LENGTH} are allowed"
        raise ApiError(400, message, code="invalid_value", param="x-request-id")


router = APIRouter()


def create_api(service: Service) -> FastAPI:
    """The application. Ray Serve in front of it takes `x-request-id` or makes one, and returns it."""
    tracing = [] if service.tracer is NO_TRACER else [Middleware(TraceMiddleware, tracer=service.tracer)]
    app = FastAPI(
        title="Glassblock",
        version=__version__,
        description="Serves interpretable block-diffusion language models: steer by concepts, see why.",
        middleware=[
            *tracing,
            Middleware(MeterMiddleware, recorder=service.recorder),
            Middleware(BodyLimitMiddleware, max_bytes=service.limits.max_body_bytes),
        ],
        dependencies=[Depends(_check_request_id)],
        # Under `default`, or FastAPI would announce 422s of its own shape.
        responses={"default": ERROR_RESPONSE},
        redoc_url=None,
    )
    app.state.service = service
    app.include_router(generate_api.router)
    app.include_router(router)
    for kind, handler in (
        (ApiError, _answer_error),
        (RequestValidationError, _answer_invalid),
        (HTTPException, _answer_http_error),
        (ClientDisconnected, _answer_nobody),
        (Exception, _answer_error),
    ):
        app.add_exception_handler(kind, handler)
    return app


@router.get("/v1/models", tags=["models"])
async def list_models(request: Request) -> dict[str, Any]:
    """The models served: one."""
    return {"object": "list", "data": [_model(service_of(request))]}


@router.get("/v1/models/{model:path}", tags=["models"])
async def get_model(request: Request, model: str) -> dict[str, Any]:
    """One model."""
    service = service_of(request)
    check_model(model, service.checkpoint)
    return _model(service)


@router.get("/v1/concepts", tags=["concepts"])
async def list_concepts(
    request: Request,
    query: Annotated[str, Query(max_length=500)] = "",
    head: Head | None = None,
    steerable: bool | None = None,
    group: Annotated[str | None, Query(max_length=500)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
    offset: Annotated[int, Query(ge=0)] = 0,
) -> dict[str, Any]:
    """Search by words in name (they weigh more) and description, best first; without a query, all by id."""
    catalogue = service_of(request).checkpoint.catalogue
    found = catalogue.search(query, head=head, steerable=steerable, group=group)
    page = [catalogue.get(i) for i in found[offset : offset + limit]]
    return {
        "object": "list",
        "data": [concept.to_json() for concept in page if concept is not None],
        "total": len(found),
        "limit": limit,
        "offset": offset,
        "has_more": offset + limit < len(found),
    }


@router.get("/v1/concepts/{concept_id}", tags=["concepts"])
async def get_concept(request: Request, concept_id: int) -> dict[str, Any]:
    """One concept by its id."""
    return _concept(request, concept_id).to_json()


@router.get("/v1/concepts/{concept_id}/top_tokens", tags=["concepts"])
async def get_top_tokens(
    request: Request, concept_id: int, k: Annotated[int, Query(ge=1, le=1000)] = 15
) -> dict[str, Any]:
    """The tokens that a concept promotes most, with the alignment of its direction with each."""
    service = service_of(request)
    concept, checkpoint = _concept(request, concept_id), service.checkpoint
    k = min(k, checkpoint.config.vocab_size)
    with api_errors():
        top = await service.client.concept_top_tokens(checkpoint.catalogue.local_id(concept), k, concept.head)
    tokenizer = checkpoint.tokenizer
    return {
        "object": "list",
        "concept": {"id": concept.id, "name": concept.name},
        "data": [
            {
                "token_id": token_id,
                "token": tokenizer.token_name(token_id),
                "bytes": list(tokenizer.text_bytes(token_id)),
                "alignment": round(alignment, 6),
            }
            for token_id, alignment in top
        ],
    }


@router.get("/health", tags=["operations"])
async def get_health() -> dict[str, str]:
    """The HTTP side is alive."""
    return {"status": "ok"}


@router.get("/ready", tags=["operations"])
async def get_ready(request: Request) -> dict[str, str]:
    """An engine has loaded its checkpoint, has generated something and answers; otherwise a 503."""
    with api_errors():
        await service_of(request).client.check_ready()
    return {"status": "ready"}


@router.get("/version", tags=["operations"])
async def get_version(request: Request) -> dict[str, str]:
    """Version of the server and name of its model."""
    return {"version": __version__, "model": service_of(request).checkpoint.model_id}


def _model(service: Service) -> dict[str, Any]:
    checkpoint = service.checkpoint
    return {
        "id": checkpoint.model_id,
        "object": "model",
        "created": service.created,
        "owned_by": "glassblock",
        "max_model_len": checkpoint.config.block_size,
    }


def _concept(request: Request, concept_id: int) -> Concept:
    catalogue = service_of(request).checkpoint.catalogue
    concept = catalogue.get(concept_id)
    if concept is None:
        message = f"no concept has the id {concept_id}; ids lie in [0, {len(catalogue)})"
        raise ApiError(404, message, code="concept_not_found", param="concept_id")
    return concept


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
