"""Log-probabilities as the two APIs show them.

They are of the model's own distribution: before temperature, penalties and bans.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..tokenizer import Tokenizer

LEAST = -9999.0
"""Stands for minus infinity, which JSON has no number for."""


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token of a text and how likely it was."""

    token_id: int
    offset: int
    """Characters of the text before it."""
    logprob: float | None
    """None for a text's first token, which nothing precedes."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of the likeliest tokens there, best first."""


def prompt_offsets(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[int]:
    """For each token of a prompt, how many characters stand before it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, num_characters = [], 0
    for token_id in token_ids:
        offsets.append(num_characters)
        num_characters += len(decoder.decode(tokenizer.text_bytes(token_id)))
    return offsets


def token_key(tokenizer: Tokenizer, token_id: int) -> str:
    """The token as a string that no other token shares: bytes that are no text are spelled out."""
    spelled = tokenizer.text_bytes(token_id)
    try:
        spelled.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
    return tokenizer.token_name(token_id)


def completion_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenEntry]) -> dict[str, Any]:
    """The parallel lists of /v1/completions. A token is among its own `top_logprobs` also where it is not likely."""
    return {
        "tokens": [token_key(tokenizer, entry.token_id) for entry in entries],
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [_by_key(tokenizer, entry) for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenEntry]) -> dict[str, Any]:
    """The list of objects of /v1/chat/completions."""
    return {
        "content": [
            {
                **_token(tokenizer, entry.token_id, entry.logprob),
                "top_logprobs": [_token(tokenizer, token_id, logprob) for token_id, logprob in entry.top],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def _by_key(tokenizer: Tokenizer, entry: TokenEntry) -> dict[str, float | None] | None:
    if entry.logprob is None:
        return None
    both = dict(entry.top)
    both.setdefault(entry.token_id, entry.logprob)
    return {token_key(tokenizer, token_id): _finite(logprob) for token_id, logprob in both.items()}


def _token(tokenizer: Tokenizer, token_id: int, logprob: float | None) -> dict[str, Any]:
    return {
        "token": token_key(tokenizer, token_id),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.text_bytes(token_id)),
    }


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST)
