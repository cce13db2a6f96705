"""What answers hold, for the description at /openapi.json. Answers are written by `rendering`; a test compares."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from engine import Head

FinishReason = Literal["stop", "length"]


class Answer(BaseModel):
    """Nothing else is in it."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class PromptDetails(Answer):
    """Of the prompt's tokens."""

    cached_tokens: int
    """How many were not computed again."""


class Usage(Answer):
    """Tokens of prompts, each counted once, and of all choices as they were returned."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class CompletionLogprobs(Answer):
    """Lists with one entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """Null for a text's first token."""
    top_logprobs: list[dict[str, float] | None]
    """The likeliest tokens and the one that stands there."""
    text_offset: list[int]
    """Characters of the text before the token."""


class TokenLogprob(Answer):
    """A token and how likely it was."""

    token: str
    logprob: float
    bytes: list[int]
    """What it adds to the text; nothing for special tokens, perhaps only a part of a character."""


class ContentLogprob(TokenLogprob):
    """A token of the text."""

    top_logprobs: list[TokenLogprob]
    """The likeliest tokens there, best first."""


class ChatLogprobs(Answer):
    """One entry a token."""

    content: list[ContentLogprob]
    refusal: None


class NamedConcept(Answer):
    """A concept by its catalogue id."""

    id: int
    name: str | None


class WeightedConcept(NamedConcept):
    """A concept that is steered by."""

    weight: float


class ResolvedSteering(Answer):
    """What an intervention became."""

    concepts: list[WeightedConcept]
    alpha: float | None
    """What the model adds along the concepts' direction."""
    peak_logit: float | None
    """What one unit of alpha gives the best aligned token."""
    layer: int
    schedule: Literal["fixed", "hard_cutoff"]
    cutoff_tokens: int | None = None
    """Of `hard_cutoff`."""


class AppliedSuppression(Answer):
    """A concept whose tokens were lowered."""

    concept: NamedConcept
    strength: float


class AppliedOverride(Answer):
    """A concept whose weight was set."""

    concept: NamedConcept
    head: Head
    weight: float


class Steering(Answer):
    """What was steered, if anything was asked for."""

    resolved: list[ResolvedSteering]
    suppress: list[AppliedSuppression]
    preset: str | None = None
    """`name@version` of the preset that is a part of it."""
    overrides: list[AppliedOverride] | None = None
    override_mode: Literal["delta", "reference"] | None = None


class Diffusion(Answer):
    """What ran, over all choices."""

    blocks: int
    denoising_steps: int
    forward_passes: int | None
    """Null where a stop string ended a choice: nobody counted."""
    policy: str
    threshold: float | None = None
    factor: float | None = None
    entropy_bound: float | None = None
    tokens_per_step: int
    sampler: Literal["greedy", "entropy", "top_p"]
    repetition_penalty: float
    cfg_scale: float | None = None
    seed: int
    """The one that was sent or drawn: with it the answer can be had again."""


class ActiveConcept(NamedConcept):
    """A concept's part in one token's logit."""

    weight: float | None
    contribution: float | None


class TokenAttribution(Answer):
    """One token; `known_total` + `discovered_total` + `epsilon` = `logit`."""

    position: int
    """Counted from the first generated token."""
    token: str
    bytes: list[int]
    token_id: int
    block: int
    step: int
    commit_order: int
    logit: float | None
    logprob: float | None
    known: list[ActiveConcept] | None = None
    discovered: list[ActiveConcept] | None = None
    known_total: float | None
    discovered_total: float | None
    epsilon: float | None


class ChunkConcept(NamedConcept):
    """A concept's mean share in a chunk's tokens."""

    head: Head
    score: float | None


class ChunkAttribution(Answer):
    """The text between two end-of-chunk tokens: positions [start, end)."""

    start: int
    end: int
    text: str
    epsilon_pct: float | None
    concepts: list[ChunkConcept]


class Attribution(Answer):
    """Of one choice."""

    index: int
    tokens: list[TokenAttribution] | None = None
    chunks: list[ChunkAttribution] | None = None


class AnswerHead(Answer):
    """What the two APIs' answers and events have in common."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str
    steering: Steering | None = None
    attribution: list[Attribution] | None = None


class CompletionChoice(Answer):
    """One continuation."""

    index: int
    """The prompt's index * n + the choice's."""
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    """The stop string or stop token that ended the text."""
    prompt_token_ids: list[int] | None = None
    """With `return_token_ids`."""
    token_ids: list[int] | None = None
    """With `return_token_ids`."""


class CompletionAnswer(AnswerHead):
    """A plain answer of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage
    diffusion: Diffusion | None = None


class ChatMessage(Answer):
    """What the model says."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Answer):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    """The stop string or stop token that ended the text."""
    token_ids: list[int] | None = None
    """With `return_token_ids`."""


class ChatAnswer(AnswerHead):
    """A plain answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    """With `return_token_ids`."""
    diffusion: Diffusion | None = None


class CompletionChunkChoice(Answer):
    """What a choice gained."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    prompt_token_ids: list[int] | None = None
    """Once for each choice, with `return_token_ids`."""
    token_ids: list[int] | None = None


class CompletionChunk(AnswerHead):
    """An event of a stream of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None
    diffusion: dict[str, Any] | None = None
    """With `stream_options.include_diffusion`: an event of the generation, and then `choices` is empty."""


class ChatDelta(Answer):
    """What a message gained; the role comes with its first text."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(Answer):
    """What a choice gained."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatChunk(AnswerHead):
    """An event of a stream of /v1/chat/completions."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    """In the first event with text, with `return_token_ids`."""
    diffusion: dict[str, Any] | None = None
    """With `stream_options.include_diffusion`: an event of the generation, and then `choices` is empty."""


def _without_references(schema: Any, definitions: dict[str, Any]) -> Any:
    """The schema with definitions in the place of references to them; none refers to itself."""
    if isinstance(schema, list):
        return [_without_references(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _without_references(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {key: _without_references(value, definitions) for key, value in schema.items() if key != "$defs"}


def _responses(answer: type[BaseModel], chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    schema = chunk.model_json_schema()
    event = _without_references(schema, schema.get("$defs", {}))
    stream = {
        "type": "string",
        "description": "With `stream: true`: lines `data: {...}`, each followed by an empty one, then `data: [DONE]`.",
        "contentMediaType": "application/json",
        "contentSchema": event,
    }
    description = "The text. An error after a stream began is its last event, and the connection is cut."
    # Of each event, as OpenAPI 3.2 describes a stream: beside a `schema` it would be of the whole stream.
    # The last one is no JSON.
    data = {"anyOf": [{"const": "[DONE]"}, stream]}
    events = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    return {
        200: {"model": answer, "description": description, "content": {"text/event-stream": {"itemSchema": events}}}
    }


COMPLETION_RESPONSES = _responses(CompletionAnswer, CompletionChunk)
CHAT_RESPONSES = _responses(ChatAnswer, ChatChunk)
