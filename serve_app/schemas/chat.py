"""Body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from engine import limits

from ..errors import UNSUPPORTED_FIELD
from .base import Object, Unsupported, check_text
from .generate import DEFAULT_MAX_TOKENS, GenerateFields

MAX_MESSAGES = 1000


class TextPart(Object):
    """One part of a message; text is the only kind that the model reads."""

    type: Literal["text"]
    """`text`; the model sees no images and hears no sounds."""
    text: Annotated[str, BeforeValidator(lambda value: check_text(value) if isinstance(value, str) else value)]
    """Never searched for special tokens."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_kinds(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise PydanticCustomError(
                UNSUPPORTED_FIELD,
                "is {kind}; only parts of type text are supported",
                {"kind": repr(kind)[:80], "field": "type"},
            )
        return data


def _check_content(value: Any) -> Any:
    """A string -> itself; anything else is left to the list's own checks."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if isinstance(value, list):
        return value
    raise PydanticCustomError("content", "must be a string or a list of text parts")


def _check_role(value: Any) -> Any:
    if value in ("tool", "function"):
        raise PydanticCustomError(UNSUPPORTED_FIELD, "is {role}; tools are not supported", {"role": repr(value)})
    # OpenAI renamed it; templates know the old name.
    return "system" if value == "developer" else value


_PART_SCHEMA = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART_SCHEMA}]}


class Message(Object):
    """One turn of a conversation. What else other servers return in a message may be sent back."""

    role: Annotated[Literal["system", "user", "assistant"], BeforeValidator(_check_role)]
    """Who speaks; `developer` is `system` by another name."""
    content: Annotated[list[TextPart], BeforeValidator(_check_content), WithJsonSchema(_CONTENT_SCHEMA)]
    """A string, or a list of text parts, which are joined by line ends. Never searched for special tokens."""
    name: Annotated[str, AfterValidator(check_text)] | None = None
    """Handed to the template; most ignore it."""
    tool_calls: Annotated[list[Any], Unsupported([])] = []
    function_call: Annotated[None, Unsupported()] = None

    @property
    def text(self) -> str:
        """All of its content."""
        return "\n".join(part.text for part in self.content)


class ChatRequest(GenerateFields):
    """Continues a conversation.

    Unknown top-level fields are tolerated; unknown keys inside `steering`, `attribution`, `diffusion` and
    `stream_options` are errors.
    """

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    """The conversation so far, put together by the checkpoint's chat template."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Exact number of tokens at most. Absent: 256, or fewer where the context or the server allows no more."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """The same by its newer name."""
    logprobs: bool = False
    """Return each token's log-probability, before penalties and temperature."""
    top_logprobs: int | None = Field(default=None, ge=0, le=limits.MAX_LOGPROBS)
    """With `logprobs`: how many of the likeliest tokens come with each."""
    add_generation_prompt: bool = True
    """End the prompt with what begins an answer."""
    continue_final_message: bool = False
    """Go on with the last message in place of beginning a new one; needs `add_generation_prompt: false`."""

    echo: Annotated[bool, Unsupported(False)] = False
    prompt: Annotated[None, Unsupported(instead="send `messages`, or send it to /v1/completions")] = None
    chat_template: Annotated[None, Unsupported()] = None
    chat_template_kwargs: Annotated[dict[str, Any], Unsupported({})] = {}
    documents: Annotated[list[Any], Unsupported([])] = []
    add_special_tokens: Annotated[bool, Unsupported(False)] = False
    modalities: Annotated[list[str], Unsupported(["text"])] = ["text"]
    audio: Annotated[None, Unsupported()] = None
    prediction: Annotated[None, Unsupported()] = None
    web_search_options: Annotated[None, Unsupported()] = None
    reasoning_effort: Annotated[str | None, Unsupported("none")] = None
    verbosity: Annotated[str | None, Unsupported("medium")] = None

    @model_validator(mode="after")
    def _check_together(self) -> ChatRequest:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise PydanticCustomError(
                "max_completion_tokens",
                "is {new} and max_tokens is {old}; they mean the same, so send one",
                {"new": self.max_completion_tokens, "old": self.max_tokens, "field": "max_completion_tokens"},
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "only allowed with `logprobs: true`", {"field": "top_logprobs"})
        if self.continue_final_message and self.add_generation_prompt:
            raise PydanticCustomError(
                "continue_final_message",
                "a message is either continued or begun; send `add_generation_prompt: false` too",
                {"field": "continue_final_message"},
            )
        return self

    @property
    def token_limit(self) -> int:
        """Most tokens to generate."""
        return self.max_completion_tokens or self.max_tokens or DEFAULT_MAX_TOKENS

    @property
    def num_logprobs(self) -> int | None:
        """How many likely alternatives come with each token; None: no logprobs at all."""
        return (self.top_logprobs or 0) if self.logprobs else None
