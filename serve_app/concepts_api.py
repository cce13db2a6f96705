"""Concepts over HTTP: search, what each promotes, what is near it, and which are active in a text."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from .concepts import Concept
from .errors import ApiError
from .schemas import Head
from .service import answer_of, service_of

router = APIRouter(tags=["concepts"])


@router.get("/v1/concepts")
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


@router.get("/v1/concepts/{concept_id}")
async def get_concept(request: Request, concept_id: int) -> dict[str, Any]:
    """One concept by its id."""
    return _concept(request, concept_id).to_json()


@router.get("/v1/concepts/{concept_id}/top_tokens")
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
                "token": tokenizer.token_name(token_id),
                "bytes": list(tokenizer.text_bytes(token_id)),
                "alignment": round(alignment, 6),
            }
            for token_id, alignment in top
        ],
    }


def _concept(request: Request, concept_id: int) -> Concept:
    catalogue = service_of(request).checkpoint.catalogue
    concept = catalogue.get(concept_id)
    if concept is None:
        message = f"no concept has the id {concept_id}; ids lie in [0, {len(catalogue)})"
        raise ApiError(404, message, code="concept_not_found", param="concept_id")
    return concept
