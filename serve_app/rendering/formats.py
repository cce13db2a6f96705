"""The two shapes of an answer: of /v1/completions and of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..schemas import GenerateFields
from ..tokenizer import Tokenizer
from .choice import Choice, TextPiece
from .logprobs import TokenEntry, chat_logprobs, completion_logprobs


class AnswerFormat(Protocol):
    """What one API calls things, and where it puts them. One object an answer: streams have a state."""

    id_prefix: str
    """What an answer's id begins with."""
    object_name: str
    """`object` of a plain answer."""
    chunk_name: str
    """`object` of a stream's events."""

    def whole(self, choice: Choice) -> dict[str, Any]:
        """A choice of a plain answer."""

    def piece(self, choice: Choice, piece: TextPiece) -> dict[str, Any]:
        """A choice of a stream's event that brings text."""

    def ending(self, choice: Choice) -> dict[str, Any]:
        """A choice of a stream's event that ends it."""

    def top(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """What a plain answer, or a stream's first event, says beside its choices."""


class CompletionFormat:
    """The older API: text."""

    id_prefix = "cmpl-"
    object_name = chunk_name = "text_completion"

    def __init__(self, request: GenerateFields, tokenizer: Tokenizer) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._begun: set[int] = set()

    def whole(self, choice: Choice) -> dict[str, Any]:
        """A choice of a plain answer."""
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": self._logprobs(choice.entries()),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **self._ids(choice, choice.token_ids),
        }

    def piece(self, choice: Choice, piece: TextPiece) -> dict[str, Any]:
        """A choice of a stream's event that brings text."""
        return {
            "index": choice.index,
            "text": piece.text,
            "logprobs": self._logprobs(piece.entries) if piece.entries else None,
            "finish_reason": None,
            **self._ids(choice, piece.token_ids),
        }

    def ending(self, choice: Choice) -> dict[str, Any]:
        """A choice of a stream's event that ends it."""
        ends = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        return {**self.piece(choice, choice.rest()), **ends}

    def top(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Nothing: the ids of prompts are with their choices, as there may be several."""
        return {}

    def _logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, Any] | None:
        return None if self._request.num_logprobs is None else completion_logprobs(self._tokenizer, entries)

    def _ids(self, choice: Choice, token_ids: Sequence[int]) -> dict[str, Any]:
        if not self._request.return_token_ids:
            return {}
        is_first = choice.index not in self._begun
        self._begun.add(choice.index)
        prompt = {"prompt_token_ids": list(choice.job.prompt_token_ids)} if is_first else {}
        return {**prompt, "token_ids": list(token_ids)}


class ChatFormat:
    """The newer API: messages."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, request: GenerateFields, tokenizer: Tokenizer) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._begun: set[int] = set()

    def whole(self, choice: Choice) -> dict[str, Any]:
        """A choice of a plain answer."""
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice.entries()),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **self._ids(choice.token_ids),
        }

    def piece(self, choice: Choice, piece: TextPiece) -> dict[str, Any]:
        """A choice of a stream's event that brings text."""
        return self._chunk(choice, piece, {"content": piece.text})

    def ending(self, choice: Choice) -> dict[str, Any]:
        """A choice of a stream's event that ends it; it says the role too if no text did."""
        piece = choice.rest()
        ends = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        return {**self._chunk(choice, piece, {} if choice.index in self._begun else {"content": ""}), **ends}

    def top(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The prompt's ids, if they were asked for: all choices have one prompt."""
        if not self._request.return_token_ids:
            return {}
        return {"prompt_token_ids": list(choices[0].job.prompt_token_ids)}

    def _chunk(self, choice: Choice, piece: TextPiece, delta: dict[str, Any]) -> dict[str, Any]:
        # Not before there is text: whoever measures takes the time to the first token by it.
        role = {} if choice.index in self._begun else {"role": "assistant"}
        self._begun.add(choice.index)
        return {
            "index": choice.index,
            "delta": {**role, **delta},
            "logprobs": self._logprobs(piece.entries) if piece.entries else None,
            "finish_reason": None,
            **self._ids(piece.token_ids),
        }

    def _logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, Any] | None:
        return None if self._request.num_logprobs is None else chat_logprobs(self._tokenizer, entries)

    def _ids(self, token_ids: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(token_ids)} if self._request.return_token_ids else {}
