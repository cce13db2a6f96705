"""Spans of a request inside a replica, made from the engine's events and the times at which they come.

The engine itself knows nothing of spans.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer

from engine import BlockFinished, BlockStarted, Committed, Event, Finished, FinishReason, Started

from .tracing import NO_TRACER, TraceContext


@dataclass(slots=True)
class _OpenBlock:
    """A block that has begun."""

    number: int
    started_ns: int
    first_step: int | None = None
    last_step: int | None = None
    num_commits: int = 0


class EngineSpans:
    """Spans of one request in an engine: all of it, its queue, its prefill, and each of its blocks.

    A block's span has the first and the last denoising step that committed in it; steps count from 0 over the whole
    request, and each is one row of one pass. The engine tells that a block began once its first pass is done. So a
    block is taken to begin where the one before ended; the first one where the request got its lane, or, if there was
    something to prefill, after its first pass, which then belongs to the prefill's span.
    """

    def __init__(
        self,
        tracer: Tracer,
        context: TraceContext,
        engine_request_id: str,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._tracer = tracer
        self._clock_ns = clock_ns
        self._ids = {"request_id": context.request_id, "engine_request_id": engine_request_id}
        self._since_ns = clock_ns()
        """When what is going on now began."""
        self._has_prefill = False
        self._block: _OpenBlock | None = None
        self._span: Span = tracer.start_span(
            "engine",
            context=context.parent,
            kind=SpanKind.SERVER,
            attributes=self._ids,
            start_time=self._since_ns,
        )

    def take(self, events: Sequence[Event]) -> None:
        """Events that have come now, in their order."""
        if not self._span.is_recording():
            return
        now_ns = self._clock_ns()
        for event in events:
            match event:
                case Started():
                    self._child("queue", now_ns, {"cached_tokens": event.num_cached_tokens})
                    self._has_prefill = event.num_prompt_tokens - event.prompt_tail > event.num_cached_tokens
                case BlockStarted():
                    if self._has_prefill:
                        self._has_prefill = False
                        self._child("prefill", now_ns, {})
                    self._block = _OpenBlock(event.block, self._since_ns)
                case Committed():
                    self._count(event)
                case BlockFinished():
                    self._end_block(now_ns, is_whole=True)
                case Finished():
                    self._end(event, now_ns)

    def close(self) -> None:
        """End what is open: nobody wants more events."""
        if self._span.is_recording():
            now_ns = self._clock_ns()
            self._end_block(now_ns, is_whole=False)
            self._span.set_attribute("cancelled", True)
            self._span.end(now_ns)

    def _child(self, name: str, now_ns: int, attributes: dict[str, int | bool]) -> None:
        parent = trace.set_span_in_context(self._span)
        span = self._tracer.start_span(
            name, context=parent, attributes={**self._ids, **attributes}, start_time=self._since_ns
        )
        span.end(now_ns)
        self._since_ns = now_ns

    def _count(self, event: Committed) -> None:
        block = self._block
        if block is None or block.number != event.block or not event.commits:
            return
        if block.first_step is None:
            block.first_step = event.commits[0].denoising_step
        block.last_step = event.commits[-1].denoising_step
        block.num_commits += len(event.commits)

    def _end_block(self, now_ns: int, *, is_whole: bool) -> None:
        block, self._block = self._block, None
        if block is None:
            return
        attributes: dict[str, int | bool] = {"block": block.number, "commits": block.num_commits, "whole": is_whole}
        if block.first_step is not None and block.last_step is not None:
            attributes |= {"first_step": block.first_step, "last_step": block.last_step}
        self._since_ns = block.started_ns
        self._child("block", now_ns, attributes)

    def _end(self, event: Finished, now_ns: int) -> None:
        self._end_block(now_ns, is_whole=False)
        output = event.output
        self._span.set_attributes(
            {
                "finish_reason": output.finish_reason.value,
                "prompt_tokens": output.num_prompt_tokens,
                "tokens": len(output.token_ids),
                "passes": output.num_forward_passes,
                "steps": output.num_denoising_steps,
                "blocks": output.num_blocks,
                "preemptions": output.num_preemptions,
            }
        )
        if output.finish_reason is FinishReason.ERROR:
            self._span.set_status(Status(StatusCode.ERROR, output.error))
        self._span.end(now_ns)


def with_engine_spans(
    batches: AsyncGenerator[tuple[Event, ...], None],
    tracer: Tracer,
    context: TraceContext | None,
    engine_request_id: str | None,
) -> AsyncGenerator[tuple[Event, ...], None]:
    """The same batches, watched; without a `context` they themselves. Closing it closes `batches`."""
    if context is None or tracer is NO_TRACER:
        return batches
    return _watched(batches, EngineSpans(tracer, context, engine_request_id or ""))


async def _watched(
    batches: AsyncGenerator[tuple[Event, ...], None], spans: EngineSpans
) -> AsyncGenerator[tuple[Event, ...], None]:
    try:
        async with aclosing(batches):
            async for events in batches:
                spans.take(events)
                yield events
    finally:
        spans.close()
