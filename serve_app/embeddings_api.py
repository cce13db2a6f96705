"""POST /v1/embeddings: texts to vectors, in OpenAI's shape."""

from __future__ import annotations

import base64
import sys
from array import array
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BeforeValidator, Field
from starlette.responses import JSONResponse, Response

from engine import Embedding, EmbeddingKind, EmbedTokens, Pooling

from .analyses import TokenUsage, analyze_all, encode_text
from .errors import ApiError, told_as
from .schemas import Object, Prompt, Unsupported, check_prompt, is_int
from .schemas.answers import Answer
from .service import answer_of, service_of
from .translation import Checkpoint, check_model

router = APIRouter(tags=["embeddings"])

_PLAIN = "embeddings are of the text as the plain model reads it"


class EmbeddingRequest(Object):
    """Body of POST /v1/embeddings."""

    model: str | None = None
    """One of /v1/models; absent means the only one."""
    input: Annotated[str | list[str] | list[int] | list[list[int]], BeforeValidator(check_prompt)]
    """Text or token ids; a list of either gives one vector each."""
    encoding_format: Literal["float", "base64"] = "float"
    """`base64`: little-endian 32-bit floats."""
    dimensions: int | None = Field(default=None, ge=1)
    """Vectors are as wide as the model; any other number is refused."""
    user: str | None = None
    """Accepted and not used."""
    embedding_type: EmbeddingKind = "composed"
    """`hidden` state, `composed` of concepts and remainder, or the features of one head alone."""
    pooling: Pooling = "mean"
    """Over the text's tokens: their mean, the last or the first."""

    # Ours elsewhere: unknown fields are tolerated, but nobody should believe that these did something.
    steering: Annotated[None, Unsupported(instead=_PLAIN)] = None
    attribution: Annotated[None, Unsupported(instead=_PLAIN)] = None
    diffusion: Annotated[None, Unsupported(instead=_PLAIN)] = None

    @property
    def inputs(self) -> list[Prompt]:
        """One entry a vector."""
        if isinstance(self.input, str):
            return [self.input]
        items: list[Any] = self.input
        return [items] if is_int(items[0]) else items


class EmbeddingItem(Answer):
    """One vector."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """A string where base64 was asked for."""


class EmbeddingList(Answer):
    """Answer of POST /v1/embeddings."""

    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: TokenUsage


@router.post("/v1/embeddings", response_model=EmbeddingList)
async def create_embeddings(request: Request, body: EmbeddingRequest) -> Response:
    """One vector for each input."""
    service = service_of(request)
    checkpoint = service.checkpoint
    check_model(body.model, checkpoint)
    _check_sizes(body, checkpoint, service.limits.max_embedding_inputs)
    many = not isinstance(body.input, str) and not is_int(body.input[0])
    analyses = [
        EmbedTokens(
            token_ids=encode_text(item, checkpoint, param=f"input[{i}]" if many else "input"),
            kind=body.embedding_type,
            pooling=body.pooling,
        )
        for i, item in enumerate(body.inputs)
    ]
    with told_as(token_ids="input"):
        embeddings = await answer_of(request, analyze_all(service.client, analyses, Embedding))
    num_tokens = sum(len(analysis.token_ids) for analysis in analyses)
    return JSONResponse(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": i, "embedding": _encoded(embedding.vector, body.encoding_format)}
                for i, embedding in enumerate(embeddings)
            ],
            "model": checkpoint.model_id,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
    )


def _check_sizes(body: EmbeddingRequest, checkpoint: Checkpoint, max_inputs: int) -> None:
    width = checkpoint.config.n_embd
    if body.dimensions not in (None, width):
        message = f"dimensions is {body.dimensions}; this model's embeddings have {width}, and no others are made"
        raise ApiError(400, message, code="unsupported_field", param="dimensions")
    if len(body.inputs) > max_inputs:
        message = f"input holds {len(body.inputs)} texts; at most {max_inputs} fit one request"
        raise ApiError(400, message, code="invalid_value", param="input")


def _encoded(vector: tuple[float, ...], encoding_format: str) -> list[float] | str:
    if encoding_format == "float":
        return list(vector)
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode("ascii")
