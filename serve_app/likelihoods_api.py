"""POST /v1/likelihoods: how likely a continuation is, estimated under random masking."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from engine import EstimateLikelihood, Likelihood, limits

from .analyses import analyze_all, encode_text
from .errors import ApiError, told_as
from .schemas import Prompt, StrictObject, check_text, is_int
from .schemas.answers import Answer
from .service import answer_of, api_errors, service_of
from .translation import check_model

router = APIRouter(tags=["analyses"])


def _check_one_text(value: Any) -> Any:
    if isinstance(value, str):
        return check_text(value)
    if isinstance(value, list) and all(map(is_int, value)):
        return value
    raise PydanticCustomError("text_type", "must be a string or a list of token ids")


class LikelihoodRequest(StrictObject):
    """Body of POST /v1/likelihoods."""

    model: str | None = None
    """One of /v1/models; absent means the only one."""
    prompt: Annotated[Prompt, BeforeValidator(_check_one_text)] = ""
    """What is given: text or token ids, perhaps none."""
    continuation: Annotated[Prompt, BeforeValidator(_check_one_text)]
    """What is judged: text or token ids, at least one."""
    num_samples: int = Field(default=128, ge=1, le=limits.MAX_SAMPLES)
    """Forward passes with different masks. The standard error falls with the square root of their number; more than
    batch_size of them are needed to tell it."""
    batch_size: int = Field(default=32, ge=1, le=limits.MAX_SAMPLES)
    """Samples whose mask counts are spread evenly over the continuation."""
    seed: int = Field(default=0, ge=0, le=limits.MAX_SEED)
    cfg_scale: float = Field(default=0.0, ge=0, le=limits.MAX_CFG_SCALE)
    """Guidance; 0 is off."""


class LikelihoodAnswer(Answer):
    """Answer of POST /v1/likelihoods, in nats."""

    object: Literal["likelihood"]
    model: str
    log_likelihood: float
    standard_error: float | None
    """Null where num_samples is at most batch_size: one batch does not tell how far another would be."""
    num_samples: int
    num_tokens: int
    """Of the continuation."""


@router.post("/v1/likelihoods", response_model=LikelihoodAnswer)
async def estimate_likelihood(request: Request, body: LikelihoodRequest) -> dict[str, Any]:
    """A Monte-Carlo estimate of the continuation's log-likelihood after the prompt."""
    service = service_of(request)
    checkpoint = service.checkpoint
    check_model(body.model, checkpoint)
    prompt = encode_text(body.prompt, checkpoint, param="prompt", least=0)
    continuation = encode_text(body.continuation, checkpoint, param="continuation")
    context = checkpoint.config.block_size
    if len(prompt) + len(continuation) > context:
        message = (
            f"prompt and continuation have {len(prompt)} and {len(continuation)} tokens; together at most {context}"
        )
        raise ApiError(400, message, code="context_length_exceeded", param="prompt")
    with api_errors():
        analysis = EstimateLikelihood(
            prompt_token_ids=prompt,
            continuation_token_ids=continuation,
            num_samples=body.num_samples,
            batch_size=body.batch_size,
            seed=body.seed,
            cfg_scale=body.cfg_scale,
        )
    with told_as(continuation_token_ids="continuation"):
        (found,) = await answer_of(request, analyze_all(service.client, [analysis], Likelihood))
    return {
        "object": "likelihood",
        "model": checkpoint.model_id,
        "log_likelihood": found.log_likelihood,
        "standard_error": found.standard_error,
        "num_samples": found.num_samples,
        "num_tokens": len(continuation),
    }
