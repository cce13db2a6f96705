"""One answer from the engine's first event to the last byte, plain or streamed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from engine import Analysis, AnalysisResult, Event, GenerateRequest, Head, Scores, ScoreTokens

from .errors import told_as
from .lease_messages import ServiceLoad
from .rendering import AnswerFormat, Choice, DiffusionPiece, Piece, TextPiece, additions, usage
from .schemas import GenerateFields, StreamOptions
from .streaming import DONE, sse
from .translation import Checkpoint, ChoiceJob

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

    async def concept_neighbors(self, concept_id: int, k: int, head: Head) -> list[tuple[int, float]]:
        """(concept id, cosine) of the concepts nearest to one; all ids are local to `head`."""

    async def analyze(self, analysis: Analysis) -> AnalysisResult:
        """An analysis of text; raises what the engine raises."""

    async def load(self) -> ServiceLoad:
        """What replicas use now; raises ApiError 503 where nobody can tell."""

    async def check_ready(self) -> None:
        """Raise what becomes a 503 unless an engine answers: an ApiError, or the engine's own EngineStopped."""


class Completion:
    """One request's generation. Close it, and whatever still runs is cancelled."""

    def __init__(
        self,
        client: EngineClient,
        request: GenerateFields,
        jobs: Sequence[ChoiceJob],
        checkpoint: Checkpoint,
        answer_format: AnswerFormat,
        completion_id: str,
        caller: Caller | None = None,
    ) -> None:
        self._client = client
        self._request = request
        self._checkpoint = checkpoint
        self._format = answer_format
        self._choices = [Choice(job, request, checkpoint) for job in jobs]
        self._batches = merge(
            [
                _until_done(client.generate(choice.job.engine_request, caller), choice)
                for choice in self._choices
                if choice.job.engine_request is not None
            ]
        )
        self._first: tuple[int, tuple[Event, ...]] | None = None
        self._scores: list[Scores | None] | None = None
        self._id, self._created = completion_id, int(time.time())
        self._is_first_chunk = True

    async def start(self) -> None:
        """Wait until every choice has begun; raises what refuses any of them, with nothing left running."""
        # From here on a refusal can no longer become a status, so all choices have to be past it.
        self._first = await anext(self._batches, None)
        if self._first is None and self._request.is_scoring:
            self._scores = await self._score()

    async def aclose(self) -> None:
        """Cancel what still runs."""
        await self._batches.aclose()

    async def answer(self) -> dict[str, Any]:
        """The plain answer, when all of it is there."""
        await self.start()
        async for pieces in self._pieces():
            for _ in pieces:
                pass
        return {
            **self._head(self._format.object_name),
            "choices": [self._format.whole(choice) for choice in self._choices],
            "usage": usage(self._choices),
            **self._format.top(self._choices),
            **additions(self._choices, self._request, self._checkpoint),
        }

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events, those ready together in one piece; the caller starts and closes it.

        Every piece costs a message at each process on its way, however small it is.
        """
        seq = 0
        shows_diffusion = self._options is not None and self._options.include_diffusion != "off"
        async for pieces in self._pieces():
            chunks: list[bytes] = []
            try:
                for piece in pieces:
                    if isinstance(piece, TextPiece):
                        chunks.append(self._chunk([self._format.piece(self._choices[piece.index], piece)]))
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
        if shows_diffusion and "diffusion" in extra:
            summary = extra.pop("diffusion")
            done = {"type": "generation.done", "steps": summary["denoising_steps"], **summary}
            yield self._chunk([], {"diffusion": {"seq": seq, **done}, **extra})
        last = self._choices[-1].index
        wants_extra = not shows_diffusion and self._asks_for_more()
        for choice in self._choices:
            yield self._chunk([self._format.ending(choice)], extra if wants_extra and choice.index == last else {})
        if self._options is not None and self._options.include_usage:
            yield sse({**self._head(self._format.chunk_name), "choices": [], "usage": usage(self._choices)})
        yield DONE

    async def _pieces(self) -> AsyncIterator[Iterator[Piece]]:
        """One iterator for each batch of events, to be read before the next is asked for."""
        for choice in self._choices:
            yield choice.begin()
        if self._first is not None:
            index, events = self._first
            yield self._choices[index].take(events)
        async for index, events in self._batches:
            yield self._choices[index].take(events)
        if self._request.is_scoring:
            scores = await self._score() if self._scores is None else self._scores
            yield (choice.score(of_choice) for choice, of_choice in zip(self._choices, scores, strict=True))

    async def _score(self) -> list[Scores | None]:
        """Scores of prompt and text of each choice; None for one without any token."""
        assert self._request.num_logprobs is not None
        found: dict[tuple[int, ...], Scores | None] = {(): None}
        for choice in self._choices:
            token_ids = (*choice.job.prompt_token_ids, *choice.token_ids)
            if token_ids not in found:
                asked = ScoreTokens(token_ids=token_ids, num_logprobs=self._request.num_logprobs)
                with told_as(token_ids="prompt"):
                    scores = await self._client.analyze(asked)
                assert isinstance(scores, Scores), scores
                found[token_ids] = scores
        return [found[*choice.job.prompt_token_ids, *choice.token_ids] for choice in self._choices]

    @property
    def _options(self) -> StreamOptions | None:
        return self._request.stream_options

    def _asks_for_more(self) -> bool:
        """A stream that nobody asked to hold more holds standard chunks only."""
        request = self._request
        is_asked = request.steering is not None or request.attribution.level != "off"
        return is_asked or "diffusion" in request.model_fields_set

    def _head(self, name: str) -> dict[str, Any]:
        return {"id": self._id, "object": name, "created": self._created, "model": self._checkpoint.model_id}

    def _chunk(self, choices: list[dict[str, Any]], extra: Mapping[str, Any] = MappingProxyType({})) -> bytes:
        chunk = {**self._head(self._format.chunk_name), "choices": choices, **extra}
        if choices and self._is_first_chunk:
            self._is_first_chunk = False
            chunk |= self._format.top(self._choices)
        if self._options is not None and self._options.include_usage:
            chunk["usage"] = usage(self._choices) if self._options.continuous_usage_stats else None
        return sse(chunk)

    def _diffusion_chunk(self, seq: int, piece: DiffusionPiece) -> bytes:
        return self._chunk([], {"diffusion": {"seq": seq, **piece.event}})


async def _until_done(
    source: AsyncGenerator[tuple[Event, ...], None], choice: Choice
) -> AsyncGenerator[tuple[Event, ...], None]:
    """The events until the choice needs no more; the engine's work for it ends there."""
    async with aclosing(source) as batches:
        async for events in batches:
            yield events
            if choice.is_done:
                return


async def merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of all sources as they come, with their source's index; none before every source has its first.

    A source is not asked for its next item before the last one's reader asks for more. Closing it, or an error in one
    source, closes them all.
    """
    if not sources:
        return
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
                    yield index, item
                    following[asyncio.ensure_future(anext(sources[index]))] = index
        finally:
            # A source cannot be closed while something waits for its next item.
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)
