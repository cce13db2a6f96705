"""Server-sent events as bytes arrive: cut into events, and a whole stream read for what its client waited for.

Nothing is parsed while a stream runs: a client that parses is late for the next bytes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

DONE = b"[DONE]"
_PREFIX = b"data: "


class EventSplitter:
    """Cuts bytes, which arrive in pieces of any size, into the payloads of whole events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Payloads of the events that `chunk` completes."""
        *whole, self._rest = (self._rest + chunk).split(b"\n\n")
        return [event.removeprefix(_PREFIX) for event in whole if event.startswith(_PREFIX)]


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """One block of one stream: when its client heard of its begin and of its end, and its tokens."""

    started: float
    ended: float
    num_tokens: int


@dataclass(slots=True)
class Stream:
    """What one stream held; moments as the client's clock tells them."""

    first_byte: float | None = None
    first_token: float | None = None
    """When the first text came."""
    first_commit: float | None = None
    """When the first denoising step was told; only where `include_diffusion` is `steps`."""
    blocks: list[BlockSpan] = field(default_factory=list)
    """Sealed blocks, in order; only where `include_diffusion` was asked for."""
    num_prompt_tokens: int = 0
    num_tokens: int | None = None
    """By the server's usage; None where it sent none."""
    num_events: int = 0
    error_code: str | None = None
    """Of an error event."""
    is_done: bool = False
    """The stream ended with its end marker."""


def payloads(chunks: Sequence[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    """(moment, payload) of every whole event: it arrived when its last byte did."""
    splitter = EventSplitter()
    return [(moment, payload) for moment, chunk in chunks for payload in splitter.feed(chunk)]


def read_stream(chunks: Sequence[tuple[float, bytes]]) -> Stream:
    """Read a stream from (moment, bytes) as they arrived. Raises ValueError for an event that is no JSON."""
    stream = Stream(first_byte=chunks[0][0] if chunks else None)
    started_at: dict[tuple[int, int], float] = {}
    for moment, payload in payloads(chunks):
        stream.num_events += 1
        if payload == DONE:
            stream.is_done = True
        else:
            _take(stream, started_at, moment, json.loads(payload))
    return stream


def _take(stream: Stream, started_at: dict[tuple[int, int], float], moment: float, event: dict[str, Any]) -> None:
    if "error" in event:
        stream.error_code = str(event["error"].get("code"))
        return
    if stream.first_token is None and any(choice.get("text") for choice in event.get("choices", ())):
        stream.first_token = moment
    if usage := event.get("usage"):
        stream.num_prompt_tokens, stream.num_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    piece = event.get("diffusion", {})
    if piece.get("type") == "block.started":
        started_at[piece["index"], piece["block"]] = moment
    elif piece.get("type") == "step":
        stream.first_commit = moment if stream.first_commit is None else stream.first_commit
    elif piece.get("type") == "block.sealed":
        started = started_at.pop((piece["index"], piece["block"]), moment)
        stream.blocks.append(BlockSpan(started, moment, piece["end"] - piece["start"]))


def tokens_between(blocks: Sequence[BlockSpan], begin: float, end: float) -> float:
    """Tokens of a time span: each block's are spread evenly from its begin to its end."""
    total = 0.0
    for block in blocks:
        overlap = min(block.ended, end) - max(block.started, begin)
        if block.ended <= block.started:
            total += block.num_tokens if begin <= block.ended < end else 0
        elif overlap > 0:
            total += block.num_tokens * overlap / (block.ended - block.started)
    return total
