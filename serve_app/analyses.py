"""Analyses of text for HTTP: their input as ids, and several of them at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar, cast

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from engine import Analysis, AnalysisResult, QueueFull

from .chat_template import encode_chat
from .completions import EngineClient
from .errors import ApiError
from .schemas import MAX_MESSAGES, Message, Prompt, check_text, is_int
from .schemas.answers import Answer
from .translation import Checkpoint, turns_of

AT_ONCE = 8
"""Analyses of one HTTP request that are under way together: enough to keep replicas busy, few enough for others."""

R = TypeVar("R", bound=AnalysisResult)


def _is_text_or_messages(value: Any) -> Any:
    if isinstance(value, list) and value and all(isinstance(item, Mapping | Message) for item in value):
        return value
    if isinstance(value, str):
        return check_text(value)
    if isinstance(value, list) and value and all(map(is_int, value)):
        return value
    raise PydanticCustomError("input_type", "must be a string, or a list (not empty) of token ids or of messages")


def _kind(value: Any) -> str:
    # Named, so that an error tells what is wrong with a message, and not that it is no text.
    if isinstance(value, str):
        return "text"
    return "ids" if isinstance(value, list) and value and is_int(value[0]) else "messages"


TextInput = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[int], Tag("ids"), Field(min_length=1)]
    | Annotated[list[Message], Tag("messages"), Field(min_length=1, max_length=MAX_MESSAGES)],
    Discriminator(_kind),
    BeforeValidator(_is_text_or_messages),
]
"""One text, in any of the ways to say it."""


class TokenUsage(Answer):
    """Tokens that were read."""

    prompt_tokens: int
    total_tokens: int


async def analyze_all(client: EngineClient, analyses: Sequence[Analysis], kind: type[R]) -> list[R]:
    """The results, in order; `kind` is their class. The first error, or a cancellation, ends those that still run.

    QueueFull is an error only while nothing of them runs: otherwise fewer are done at once.
    """
    results: dict[int, R] = {}
    left = deque(enumerate(analyses))
    num_under_way = 0

    async def work() -> None:
        nonlocal num_under_way
        while left:
            index, analysis = left.popleft()
            num_under_way += 1
            try:
                result = await client.analyze(analysis)
            except QueueFull:
                if num_under_way == 1:
                    raise
                left.appendleft((index, analysis))
                return
            finally:
                num_under_way -= 1
            assert isinstance(result, kind), result
            results[index] = result

    workers = [asyncio.ensure_future(work()) for _ in range(min(AT_ONCE, len(analyses)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [results[index] for index in range(len(analyses))]


def encode_input(text: str | list[int] | list[Message], checkpoint: Checkpoint) -> list[int]:
    """Ids of a TextInput that a body has as `input`. Raises ApiError that says what is wrong with it."""
    if isinstance(text, str) or is_int(text[0]):
        return encode_text(cast(Prompt, text), checkpoint, param="input")
    turns = turns_of(cast(list[Message], text))
    _check_length(sum(len(turn.content.encode()) for turn in turns), checkpoint, "input")
    try:
        token_ids = encode_chat(
            checkpoint.chat_template, turns, model_id=checkpoint.model_id, add_generation_prompt=False
        )
    except ApiError as error:
        # It knows a conversation as `messages`, which this body has not.
        raise error.with_param("input") from error
    return encode_text(token_ids, checkpoint, param="input")


def encode_text(text: Prompt, checkpoint: Checkpoint, *, param: str, least: int = 1) -> list[int]:
    """Ids of a text, or the ids themselves once they are checked. Raises ApiError that names `param`."""
    config = checkpoint.config
    context, vocab_size = config.block_size, config.vocab_size
    if isinstance(text, str):
        _check_length(len(text.encode()), checkpoint, param)
        token_ids = checkpoint.tokenizer.encode(text)
    else:
        token_ids = text
        for i, token_id in enumerate(token_ids):
            if not 0 <= token_id < vocab_size:
                message = f"{param}[{i}] is {token_id}; token ids lie in [0, {vocab_size})"
                raise ApiError(400, message, code="invalid_value", param=f"{param}[{i}]")
            if token_id == config.mask_token_id:
                message = f"{param}[{i}] is {token_id}, the mask token, which stands for no text; leave it out"
                raise ApiError(400, message, code="invalid_value", param=f"{param}[{i}]")
    if len(token_ids) < least:
        raise ApiError(400, f"{param} is empty; at least {least} token is needed", code="invalid_value", param=param)
    if len(token_ids) > context:
        message = f"{param} has {len(token_ids)} tokens; the model's context has {context}"
        raise ApiError(400, message, code="context_length_exceeded", param=param)
    return token_ids


def _check_length(num_bytes: int, checkpoint: Checkpoint, param: str) -> None:
    """Raise ApiError before time is spent on a text that no context could hold."""
    context = checkpoint.config.block_size
    if num_bytes > context * checkpoint.tokenizer.longest_token:
        message = f"{param} has {num_bytes} bytes, which cannot be fewer than {context} tokens, the model's context"
        raise ApiError(400, message, code="context_length_exceeded", param=param)
