"""Concepts over HTTP: search, what each promotes, what is near it, and which are active in a text."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from engine import ConceptContribution, Head, Inspection, InspectTokens, limits

from .analyses import TextInput, TokenUsage, analyze_all, encode_input
from .attribution import number
from .concepts import Concept, ConceptCatalogue
from .errors import ApiError, told_as
from .schemas import StrictObject
from .schemas.answers import Answer
from .service import answer_of, service_of
from .translation import check_model

router = APIRouter(tags=["concepts"])


class InspectRequest(StrictObject):
    """Body of POST /v1/concepts/inspect."""

    model: str | None = None
    """One of /v1/models; absent means the only one."""
    input: TextInput
    """Text, token ids, or messages for the chat template."""
    top_k: int = Field(default=8, ge=0, le=limits.MAX_INSPECTED_CONCEPTS)
    """Concepts of each head for a token, largest weight first."""


class ConceptGroup(Answer):
    """The public group of a concept."""

    id: int
    name: str | None


class ConceptAnswer(Answer):
    """One concept of the catalogue."""

    object: Literal["concept"]
    id: int
    name: str | None
    description: str | None
    head: Head
    group: ConceptGroup | None
    is_steerable: bool
    is_tone: bool
    is_alignment: bool
    is_demographic: bool


class ConceptList(Answer):
    """A page of concepts."""

    object: Literal["list"]
    data: list[ConceptAnswer]
    total: int
    limit: int
    offset: int
    has_more: bool


class ConceptName(Answer):
    """A concept in short."""

    id: int
    name: str | None


class PromotedToken(Answer):
    """A token that a concept promotes."""

    token_id: int
    token: str
    bytes: list[int]
    alignment: float
    """Of the concept's unit embedding with the token's row of the output matrix."""


class PromotedTokens(Answer):
    """Answer of GET /v1/concepts/{concept_id}/top_tokens."""

    object: Literal["list"]
    concept: ConceptName
    data: list[PromotedToken]


class Neighbor(ConceptName):
    """A concept near another one."""

    head: Head
    cosine: float


class NeighborList(Answer):
    """Answer of GET /v1/concepts/{concept_id}/neighbors, nearest first."""

    object: Literal["list"]
    concept: ConceptName
    data: list[Neighbor]


class ActiveConcept(ConceptName):
    """A concept at a token."""

    weight: float | None
    """Sigmoid of its logit; null for what JSON has no number for, as everywhere."""
    contribution: float | None
    """To the logit of the token that stands there."""


class InspectedToken(Answer):
    """One token and what is active where it stands."""

    position: int
    token_id: int
    token: str
    bytes: list[int]
    known: list[ActiveConcept]
    discovered: list[ActiveConcept]


class InspectionAnswer(Answer):
    """Answer of POST /v1/concepts/inspect."""

    object: Literal["concepts.inspection"]
    model: str
    tokens: list[InspectedToken]
    usage: TokenUsage


@router.get("/v1/concepts", response_model=ConceptList)
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


@router.get("/v1/concepts/{concept_id}", response_model=ConceptAnswer)
async def get_concept(request: Request, concept_id: int) -> dict[str, Any]:
    """One concept by its id."""
    return _concept(request, concept_id).to_json()


@router.get("/v1/concepts/{concept_id}/top_tokens", response_model=PromotedTokens)
async def get_top_tokens(
    request: Request, concept_id: int, k: Annotated[int, Query(ge=1, le=1000)] = 15
) -> dict[str, Any]:
    """The tokens that a concept promotes most, with the alignment of its direction with each."""
    service = service_of(request)
    concept, checkpoint = _concept(request, concept_id), service.checkpoint
    k = min(k, checkpoint.config.vocab_size)
    local_id = checkpoint.catalogue.local_id(concept)
    top = await answer_of(request, service.client.concept_top_tokens(local_id, k, concept.head))
    tokenizer = checkpoint.tokenizer
    return {
        "object": "list",
        "concept": {"id": concept.id, "name": concept.name},
        "data": [
            {
                "token_id": token_id,
                **tokenizer.spelled(token_id),
                "alignment": round(alignment, 6),
            }
            for token_id, alignment in top
        ],
    }


@router.get("/v1/concepts/{concept_id}/neighbors", response_model=NeighborList)
async def get_neighbors(
    request: Request, concept_id: int, k: Annotated[int, Query(ge=1, le=1000)] = 10
) -> dict[str, Any]:
    """The concepts of the same head whose directions are nearest, with the cosine between them."""
    service = service_of(request)
    concept, catalogue = _concept(request, concept_id), service.checkpoint.catalogue
    near = await answer_of(request, service.client.concept_neighbors(catalogue.local_id(concept), k, concept.head))
    return {
        "object": "list",
        "concept": {"id": concept.id, "name": concept.name},
        "data": [
            {**catalogue.named(concept.head, local_id), "head": concept.head, "cosine": round(cosine, 6)}
            for local_id, cosine in near
        ],
    }


@router.post("/v1/concepts/inspect", response_model=InspectionAnswer)
async def inspect(request: Request, body: InspectRequest) -> Response:
    """Which concepts are active at each token of a text that is there already, and what each adds to its logit."""
    service = service_of(request)
    checkpoint = service.checkpoint
    check_model(body.model, checkpoint)
    token_ids = await asyncio.to_thread(encode_input, body.input, checkpoint)
    analysis = InspectTokens(token_ids=token_ids, top_k=body.top_k)
    with told_as(token_ids="input"):
        (found,) = await answer_of(request, analyze_all(service.client, [analysis], Inspection))
    tokenizer, catalogue = checkpoint.tokenizer, checkpoint.catalogue
    tokens = [
        {
            "position": position,
            "token_id": token_id,
            **tokenizer.spelled(token_id),
            "known": [_active(catalogue, "known", item) for item in active.known],
            "discovered": [_active(catalogue, "discovered", item) for item in active.discovered],
        }
        for position, (token_id, active) in enumerate(zip(token_ids, found.tokens, strict=True))
    ]
    usage = {"prompt_tokens": len(token_ids), "total_tokens": len(token_ids)}
    answer = {"object": "concepts.inspection", "model": checkpoint.model_id, "tokens": tokens, "usage": usage}
    return JSONResponse(answer)


def _active(catalogue: ConceptCatalogue, head: Head, item: ConceptContribution) -> dict[str, Any]:
    return {
        **catalogue.named(head, item.concept_id),
        "weight": number(item.weight),
        "contribution": number(item.contribution),
    }


def _concept(request: Request, concept_id: int) -> Concept:
    catalogue = service_of(request).checkpoint.catalogue
    concept = catalogue.get(concept_id)
    if concept is None:
        message = f"no concept has the id {concept_id}; ids lie in [0, {len(catalogue)})"
        raise ApiError(404, message, code="concept_not_found", param="concept_id")
    return concept
