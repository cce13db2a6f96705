"""Analyses of text for HTTP: their input as ids, and several of them at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from engine import Analysis, AnalysisResult

from .completions import EngineClient
from .errors import ApiError
from .schemas import Prompt
from .translation import Checkpoint

AT_ONCE = 8
"""Analyses of one HTTP request that are under way together: enough to keep replicas busy, few enough for others."""

R = TypeVar("R", bound=AnalysisResult)


async def analyze_all(client: EngineClient, analyses: Sequence[Analysis], kind: type[R]) -> list[R]:
    """The results, in order; `kind` is their class. The first error, or a cancellation, ends those that still run."""
    results: dict[int, R] = {}
    left = iter(enumerate(analyses))

    async def work() -> None:
        for index, analysis in left:
            result = await client.analyze(analysis)
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


def encode_text(text: Prompt, checkpoint: Checkpoint, *, param: str, least: int = 1) -> list[int]:
    """Ids of a text, or the ids themselves once they are checked. Raises ApiError that names `param`."""
    context, vocab_size = checkpoint.config.block_size, checkpoint.config.vocab_size
    if isinstance(text, str):
        num_bytes = len(text.encode())
        if num_bytes > context * checkpoint.tokenizer.longest_token:
            message = f"{param} has {num_bytes} bytes, which cannot be fewer than {context} tokens, the model's context"
            raise ApiError(400, message, code="context_length_exceeded", param=param)
        token_ids = checkpoint.tokenizer.encode(text)
    else:
        token_ids = text
        for i, token_id in enumerate(token_ids):
            if not 0 <= token_id < vocab_size:
                message = f"{param}[{i}] is {token_id}; token ids lie in [0, {vocab_size})"
                raise ApiError(400, message, code="invalid_value", param=f"{param}[{i}]")
    if len(token_ids) < least:
        raise ApiError(400, f"{param} is empty; at least {least} token is needed", code="invalid_value", param=param)
    if len(token_ids) > context:
        message = f"{param} has {len(token_ids)} tokens; the model's context has {context}"
        raise ApiError(400, message, code="context_length_exceeded", param=param)
    return token_ids
