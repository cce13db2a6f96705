"""One text completion from the engine's first event to the last byte, plain or streamed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from engine import Analysis, AnalysisResult, Event, GenerateRequest

from .rendering import Choice, DiffusionPiece, Piece, TextPiece, additions, usage
from .schemas import CompletionRequest, Head
from .streaming import DONE, sse
from .translation import Checkpoint

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """Who asks, as far as it matters for whose turn it is."""

    tenant: str = ""
    """Names an API key without telling it; the same for all who send none."""
    deadline_s: float | None = None
    """How long the caller waits for its request to begin."""


class EngineClient(Protocol):
    """The engine as HTTP sees it, wherever it runs."""

    def generate(
        self, request: GenerateRequest, caller: Caller | None = None
    ) -> AsyncGenerator[tuple[Event, ...], None]:
        """Batches of the request's events; closing it cancels the request."""

    async def concept_top_tokens(self, concept_id: int, k: int, head: Head) -> list[tuple[int, float]]:
        """(token id, alignment) of the tokens that a concept (id local to `head`) most promotes."""

    async def analyze(self, analysis: Analysis) -> AnalysisResult:
        """An analysis of text; raises what the engine raises."""

    async def check_ready(self) -> None:
        """Raise ApiError 503 unless an engine answers."""


class Completion:
    """One request's generation. Close it, and whatever still runs is cancelled."""

    def __init__(
        self,
        client: EngineClient,
        request: CompletionRequest,
        engine_requests: Sequence[GenerateRequest],
        checkpoint: Checkpoint,
        completion_id: str,
        caller: Caller | None = None,
    ) -> None:
        self._request = request
        self._checkpoint = checkpoint
        self._choices = [Choice(i, item, request, checkpoint) for i, item in enumerate(engine_requests)]
        self._batches = merge([client.generate(item, caller) for item in engine_requests])
        self._first: tuple[int, tuple[Event, ...]] | None = None
        self._head = {
            "id": completion_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": checkpoint.model_id,
        }

    async def start(self) -> None:
        """Wait until every choice has begun; raises what refuses any of them, with nothing left running."""
        # From here on a refusal can no longer become a status, so all choices have to be past it.
        self._first = await anext(self._batches)

    async def aclose(self) -> None:
        """Cancel what still runs."""
        await self._batches.aclose()

    async def answer(self) -> dict[str, Any]:
        """The plain answer, when all of it is there."""
        async for pieces in self._pieces():
            for _ in pieces:
                pass
        return {
            **self._head,
            "choices": [
                {**self._choice(choice.index, choice.text), "finish_reason": choice.output.finish_reason.value}
                for choice in self._choices
            ],
            "usage": usage(self._choices),
            **additions(self._choices, self._request, self._checkpoint),
        }

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events, those ready together in one piece; the caller closes the completion.

        Every piece costs a message at each process on its way, however small it is.
        """
        seq = 0
        shows_diffusion = self._options is not None and self._options.include_diffusion != "off"
        async for pieces in self._pieces():
            chunks: list[bytes] = []
            try:
                for piece in pieces:
                    if isinstance(piece, TextPiece):
                        chunks.append(self._chunk([self._choice(piece.index, piece.text)]))
                    else:
                        chunks.append(self._diffusion_chunk(seq, piece))
                        seq += 1
            except Exception:
                # What came before the error is the client's.
                if chunks:
                    yield b"".join(chunks)
                raise
            if chunks:
                yield b"".join(chunks)
        yield b"".join(self._ending(seq, shows_diffusion=shows_diffusion))

    def _ending(self, seq: int, *, shows_diffusion: bool) -> Iterator[bytes]:
        extra = additions(self._choices, self._request, self._checkpoint)
        if shows_diffusion:
            summary = extra.pop("diffusion")
            done = {"type": "generation.done", "steps": summary["denoising_steps"], **summary}
            yield self._chunk([], {"diffusion": {"seq": seq, **done}, **extra})
        last = self._choices[-1].index
        wants_extra = not shows_diffusion and self._asks_for_more()
        for choice in self._choices:
            finished = {**self._choice(choice.index, ""), "finish_reason": choice.output.finish_reason.value}
            yield self._chunk([finished], extra if wants_extra and choice.index == last else {})
        if self._options is not None and self._options.include_usage:
            yield sse({**self._head, "choices": [], "usage": usage(self._choices)})
        yield DONE

    async def _pieces(self) -> AsyncIterator[Iterator[Piece]]:
        """One iterator for each batch of events, to be read before the next is asked for."""
        if self._first is None:
            await self.start()
        assert self._first is not None
        index, events = self._first
        yield self._choices[index].take(events)
        async for index, events in self._batches:
            yield self._choices[index].take(events)

    @property
    def _options(self) -> Any:
        return self._request.stream_options

    def _asks_for_more(self) -> bool:
        """A stream that nobody asked to hold more holds standard chunks only."""
        request = self._request
        is_asked = request.steering is not None or request.attribution.level != "off"
        return is_asked or "diffusion" in request.model_fields_set

    def _choice(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def _chunk(self, choices: list[dict[str, Any]], extra: dict[str, Any] | None = None) -> bytes:
        chunk = {**self._head, "choices": choices, **(extra or {})}
        if self._options is not None and self._options.include_usage:
            chunk["usage"] = usage(self._choices) if self._options.continuous_usage_stats else None
        return sse(chunk)

    def _diffusion_chunk(self, seq: int, piece: DiffusionPiece) -> bytes:
        return self._chunk([], {"diffusion": {"seq": seq, **piece.event}})


async def merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of all sources as they come, with their source's index; none before every source has its first.

    Closing it, or an error in one source, closes them all.
    """
    if len(sources) == 1:
        # By far the most common case needs no task for each item.
        async with aclosing(sources[0]) as source:
            async for item in source:
                yield 0, item
        return
    async with AsyncExitStack() as stack:
        for source in sources:
            await stack.enter_async_context(aclosing(source))
        following = {asyncio.ensure_future(anext(source)): index for index, source in enumerate(sources)}
        try:
            begun, _ = await asyncio.wait(following, return_when=asyncio.FIRST_EXCEPTION)
            for task in begun:
                if not isinstance(error := task.exception(), StopAsyncIteration | None):
                    raise error
            while following:
                done, _ = await asyncio.wait(following, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=following.__getitem__):
                    index = following.pop(task)
                    try:
                        item = task.result()
                    except StopAsyncIteration:
                        continue
                    following[asyncio.ensure_future(anext(sources[index]))] = index
                    yield index, item
        finally:
            # A source cannot be closed while something waits for its next item.
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)
