"""Bodies and answers of /v1/attributions/input and /v1/traces/replay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from engine import limits

from .answers import Answer
from .base import StrictObject
from .chat import ChatRequest
from .completion import CompletionRequest

Role = Literal["prompt", "generated", "end_of_text"]


def _kind_of_request(value: Any) -> str:
    is_chat = isinstance(value, ChatRequest) or (isinstance(value, Mapping) and "messages" in value)
    return "chat" if is_chat else "completion"


class InputAttributionRequest(StrictObject):
    """Body of POST /v1/attributions/input: either `request` or `trace`."""

    model: str | None = None
    """One of /v1/models; absent means the only one."""
    request: (
        Annotated[
            Annotated[CompletionRequest, Tag("completion")] | Annotated[ChatRequest, Tag("chat")],
            Discriminator(_kind_of_request),
        ]
        | None
    ) = None
    """A body of /v1/completions or /v1/chat/completions with one prompt and one choice. It is generated, to its last
    token, whatever `stop` says; with a `seed`, it is the generation that the same body had before."""
    trace: dict[str, Any] | None = None
    """Of a generation that was made: the `trace` of an answer of this route."""
    n_steps: int = Field(default=32, ge=1, le=limits.MAX_INTEGRATION_STEPS)
    """Points on the way from masks to the text; more leave smaller completeness errors."""
    targets: list[int] | None = Field(default=None, min_length=1, max_length=limits.MAX_TARGETS)
    """Generated tokens to explain, counted from the first. Absent: all of the text."""
    top_k: int | None = Field(default=None, ge=1)
    """Of each target, the contributions of largest magnitude, largest first. Absent: all that are not 0."""

    @model_validator(mode="after")
    def _check_source(self) -> InputAttributionRequest:
        if (self.request is None) == (self.trace is None):
            what = "both are there" if self.request is not None else "neither is there"
            raise PydanticCustomError("source", "needs `request` or `trace`, and {what}", {"what": what})
        return self


class ReplayRequest(StrictObject):
    """Body of POST /v1/traces/replay."""

    model: str | None = None
    """One of /v1/models; absent means the only one."""
    trace: dict[str, Any]
    """The `trace` of an answer of /v1/attributions/input, of this server or of another."""


class InputToken(Answer):
    """A token that the model read while it wrote."""

    position: int
    token: str
    bytes: list[int]
    token_id: int
    role: Role
    """`end_of_text`: what stands right of an end, in place of what may have been committed there."""


class Target(Answer):
    """One explained token."""

    position: int
    """Counted from the first generated token."""
    token: str
    token_id: int
    logit: float | None
    """In the step that committed it, before penalties, bias and suppression."""
    baseline_logit: float | None
    """The same with masks for all tokens."""
    contributions: list[tuple[int, float]]
    """(position of an input token, what it added to the logit)."""
    completeness_error: float | None
    """How far all contributions are from summing to logit - baseline_logit."""


class Seed(Answer):
    """What ran."""

    seed: int


class InputAttributionAnswer(Answer):
    """Answer of POST /v1/attributions/input."""

    object: Literal["input_attribution"]
    model: str
    tokens: list[InputToken]
    targets: list[Target]
    n_steps: int
    trace: dict[str, Any]
    """To ask again, or to replay elsewhere."""
    diffusion: Seed | None = None
    """With `request`."""


class CheckedCommit(Answer):
    """One commit of a trace as this model sees it in its step."""

    position: int
    token: str
    token_id: int
    denoising_step: int
    logit: float | None
    logprob: float | None
    rank: int
    """Tokens that could have been chosen and have a larger logit; 0 for the likeliest."""
    recorded_logit: float | None


class ReplayAnswer(Answer):
    """Answer of POST /v1/traces/replay."""

    object: Literal["trace_replay"]
    model: str
    commits: list[CheckedCommit]
    num_likeliest: int
    """Commits of rank 0."""
    largest_difference: float | None
    """Between a logit and the recorded one; null where none is recorded."""
