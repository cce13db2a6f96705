"""Body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from engine import limits

from .base import Unsupported, check_text, is_int
from .generate import DEFAULT_MAX_TOKENS, GenerateFields

Prompt = str | list[int]


def check_prompt(value: Any) -> Any:
    """The value, if it is text, token ids, or a list of either."""
    if isinstance(value, str):
        return check_text(value)
    if isinstance(value, list) and value:
        if all(map(is_int, value)) or all(isinstance(item, list) and all(map(is_int, item)) for item in value):
            return value
        if all(isinstance(item, str) for item in value):
            return [check_text(item) for item in value]
    raise PydanticCustomError(
        "prompt_type", "must be a string, or a list (not empty) of strings, of token ids, or of lists of token ids"
    )


_Logprobs = Annotated[int, Field(ge=0, le=limits.MAX_LOGPROBS)]


def _check_logprobs(value: Any) -> Any:
    # Chat says whether, this API how many; clients of the one send its "no" to the other.
    return None if value is False else value


class CompletionRequest(GenerateFields):
    """Continues prompts.

    Unknown top-level fields are tolerated; unknown keys inside `steering`, `attribution`, `diffusion` and
    `stream_options` are errors.
    """

    prompt: Annotated[str | list[str] | list[int] | list[list[int]], BeforeValidator(check_prompt)]
    """Text or token ids; a list of either gives `n` choices each. Text is never searched for special tokens."""
    max_tokens: int = Field(default=DEFAULT_MAX_TOKENS, ge=0)
    """Exact number of tokens at most. Absent: 256, or fewer where the context or the server allows no more.
    0 only with `echo`: nothing is generated, the prompt is returned and scored."""
    logprobs: Annotated[
        _Logprobs | None, BeforeValidator(_check_logprobs, json_schema_input_type=_Logprobs | Literal[False] | None)
    ] = None
    """Return each token's log-probability (before penalties and temperature) and those of this many likeliest."""
    echo: bool = False
    """Let the text begin with the prompt. With `logprobs`, prompt and text are scored from left to right: each token as
    it would be with all later ones of its block still masked, without steering and guidance."""

    suffix: Annotated[str, Unsupported("")] = ""
    top_logprobs: Annotated[None, Unsupported()] = None
    max_completion_tokens: Annotated[None, Unsupported(instead="send `max_tokens`")] = None
    messages: Annotated[None, Unsupported(instead="send them to /v1/chat/completions")] = None

    @model_validator(mode="after")
    def _check_scoring(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError("max_tokens", "is 0; at least 1 without `echo`", {"field": "max_tokens"})
        affected = {
            "steering": self.steering is not None,
            "diffusion.cfg_scale": bool(self.diffusion.cfg_scale),
            "attribution": self.attribution.level != "off" and self.max_tokens == 0,
        }
        for field, is_there in affected.items():
            if is_there and self.why_plain is not None:
                raise PydanticCustomError(
                    "no_effect", "has no effect: {why}; leave it out", {"why": self.why_plain, "field": field}
                )
        return self

    @property
    def prompts(self) -> list[Prompt]:
        """One entry for each `n` choices."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        items: list[Any] = self.prompt
        return [items] if is_int(items[0]) else items

    @property
    def token_limit(self) -> int:
        """Most tokens to generate."""
        return self.max_tokens

    @property
    def why_plain(self) -> str | None:
        """Why steering would change nothing of the answer; None where it would."""
        if self.max_tokens == 0:
            return "nothing is generated"
        return "with `echo`, `logprobs` are the plain model's" if self.is_scoring else None

    @property
    def num_logprobs(self) -> int | None:
        """How many likely alternatives come with each token; None: no logprobs at all."""
        return self.logprobs

    @property
    def has_echo(self) -> bool:
        """True when the text begins with the prompt."""
        return self.echo

    @property
    def is_scoring(self) -> bool:
        """True when prompt and text are scored from left to right, in place of the logprobs of the generation."""
        return self.echo and self.logprobs is not None
