"""The engine as the ingress sees it: a lease from the router, then a stream from the replica that it names.

What can fail before anything was sent is tried again elsewhere; what fails later is the client's to know.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any, cast

from opentelemetry.trace import Tracer
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from engine import (
    Analysis,
    AnalysisResult,
    EngineStopped,
    Event,
    Finished,
    GenerateRequest,
    Head,
    Recorder,
    prefix_keys,
)

from .completions import Caller
from .config import IngressSettings
from .errors import KNOWN_ERRORS, RATE_LIMIT, SERVER_ERROR, ApiError, to_api_error
from .lease_messages import Queued, Refusal, RefusalReason, Returned, RouteCall, ServiceLoad, Welcome, replica_load
from .replica_calls import REPLICA_LOST, ReplicaCalls
from .replica_reports import short_keys
from .router_notes import ROUTER_LOST, RouterNotes
from .routing.messages import Lease, Rejected, RejectionReason, RouteRequest
from .tracing import NO_TRACER, RouteSpan

logger = logging.getLogger("ray.serve")

_NOT_READY: tuple[type[Exception], ...] = (TimeoutError, *KNOWN_ERRORS)
_PAUSE_S = 0.02
"""Before a refused request asks again, and longer each time: what was refused on old news gets newer ones."""


class RoutedEngineClient:
    """An EngineClient that reaches EngineServer replicas through Ray Serve, and the router first where there is one."""

    def __init__(
        self,
        engine: DeploymentHandle[Any],
        router: DeploymentHandle[Any] | None,
        *,
        block_size: int,
        settings: IngressSettings,
        recorder: Recorder,
        tracer: Tracer = NO_TRACER,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Results travel by gRPC instead of through Ray's object store: a third of the time for each batch.
        self._calls = engine.options(_by_reference=False)
        self._questions = ReplicaCalls(self._calls, settings, recorder)
        # Events are plain data: what cloudpickle does beyond pickle is for code, and takes most of its time.
        self._streams = engine.options(stream=True, _by_reference=False, response_serialization="pickle")
        self._router = None if router is None else router.options(stream=True, _by_reference=False)
        self._block_size = block_size
        self._settings = settings
        self._recorder = recorder
        self._tracer = tracer
        self._clock = clock
        self._status = None if router is None else router.options(_by_reference=False)
        self._notes = RouterNotes(self._status, settings)
        self._is_ready = False

    async def generate(
        self, request: GenerateRequest, caller: Caller | None = None
    ) -> AsyncGenerator[tuple[Event, ...], None]:
        """The request's events from one of the replicas."""
        if not self._is_ready:
            # Without any replica a call would wait for one instead of failing.
            await self.check_ready()
        span = RouteSpan(self._tracer, request.request_id or "")
        try:
            served = self._serve(self._route(request, caller or Caller()), request, span)
            async with aclosing(served) as batches:
                async for events in batches:
                    span.generated(events)
                    yield events
        except KNOWN_ERRORS as error:
            span.close(error)
            raise to_api_error(error) from error
        finally:
            span.close()

    async def concept_top_tokens(self, concept_id: int, k: int, head: Head) -> list[tuple[int, float]]:
        """(token id, alignment) of the tokens that a concept most promotes."""
        return cast(list[tuple[int, float]], await self._ask("concept_top_tokens", concept_id, k, head))

    async def concept_neighbors(self, concept_id: int, k: int, head: Head) -> list[tuple[int, float]]:
        """(concept id, cosine) of the concepts nearest to one."""
        return cast(list[tuple[int, float]], await self._ask("concept_neighbors", concept_id, k, head))

    async def analyze(self, analysis: Analysis) -> AnalysisResult:
        """An analysis of text by one of the replicas."""
        return cast(AnalysisResult, await self._ask("analyze", analysis))

    async def _ask(self, method: str, *arguments: Any) -> Any:
        if not self._is_ready:
            # Without any replica a call would wait for one instead of failing.
            await self.check_ready()
        return await self._questions.ask(method, *arguments)

    async def load(self) -> ServiceLoad:
        """What the router knows of all replicas; where it is away, what one of them says of itself."""
        if self._status is not None and not self._notes.is_router_away:
            try:
                async with asyncio.timeout(self._settings.router_timeout_s):
                    known: ServiceLoad = await self._status.load.remote()
                return known
            except ROUTER_LOST as error:
                self._notes.find_router(error)
        try:
            async with asyncio.timeout(self._settings.ready_timeout_s):
                used: dict[str, int] = await self._calls.stats.remote()
        except _NOT_READY as error:
            raise _not_ready() from error
        return ServiceLoad(replicas=(replica_load(used),), is_complete=False)

    async def check_ready(self) -> None:
        """Raise ApiError 503 unless a replica answers within the timeout."""
        try:
            async with asyncio.timeout(self._settings.ready_timeout_s):
                await self._answer()
        except _NOT_READY as error:
            self._is_ready = False
            raise _not_ready() from error
        self._is_ready = True

    async def _answer(self) -> None:
        await self._calls.stats.remote()

    def _route(self, request: GenerateRequest, caller: Caller) -> RouteRequest:
        assert request.request_id is not None, "requests are named where they arrive"
        sampling = request.sampling
        # Adaptive policies commit as they like; nobody knows how many before.
        tokens_per_step = 1.0 if sampling.is_adaptive else float(sampling.max_commits(self._block_size))
        return RouteRequest(
            request_id=request.request_id,
            tenant=caller.tenant,
            priority=request.priority,
            num_prompt_tokens=len(request.prompt_token_ids),
            max_tokens=request.max_tokens,
            tokens_per_step=tokens_per_step,
            num_lanes=request.num_lanes,
            prefix_keys=short_keys(prefix_keys(request.prompt_token_ids, self._block_size)),
            deadline_s=caller.deadline_s,
        )

    async def _serve(
        self, route: RouteRequest, request: GenerateRequest, span: RouteSpan
    ) -> AsyncGenerator[tuple[Event, ...], None]:
        """Try replicas until one has taken the request and sent something; from then on it is that one's."""
        arrived = self._clock()
        returned: Returned | None = None
        for num_tries in range(1, self._settings.max_tries + 1):
            is_last = num_tries == self._settings.max_tries
            age_s = self._clock() - arrived
            again = replace(
                route,
                age_s=age_s,
                is_returned=returned is not None,
                deadline_s=None if route.deadline_s is None else max(route.deadline_s - age_s, 0.0),
            )
            # In the end a request waits at some replica rather than being sent to and fro.
            lease = None if is_last and num_tries > 1 else await self._lease(again, returned)
            has_sent = is_finished = False
            replica_id = lease.replica_id if lease is not None else ""
            span.leased(lease)
            try:
                async with self._open(request, again, lease, span) as (first, batches):
                    replica_id = first.replica_id
                    if isinstance(first, Refusal):
                        span.refused(replica_id, first.reason.value)
                        assert lease is not None, "only leases are refused"
                        returned = Returned(lease.lease_id, lease.replica_id, first.reason)
                        if is_last:
                            raise _overloaded()
                    else:
                        span.taken(replica_id, num_tries)
                        # The router has kept the deadline of what it leased; any other waits at the replica.
                        deadline_s = route.deadline_s if lease is None else None
                        async for events in self._begun_within(deadline_s, batches, arrived):
                            has_sent = True
                            yield events
                            is_finished = isinstance(events[-1], Finished)
                        if is_finished:
                            return
                        raise EngineStopped("the replica ended the stream before its last event")
            except REPLICA_LOST as error:
                span.lost(replica_id)
                # What was sent was this replica's; its client has to know that no more comes.
                if has_sent or is_last:
                    self._notes.lost(replica_id, lease)
                    if isinstance(error, TimeoutError):
                        raise _not_ready() from error
                    raise
                logger.warning("%s: replica %s is lost (%r); trying another", route.request_id, replica_id, error)
                self._recorder.count("ingress_retries")
                returned = self._returned(replica_id, lease)
                continue
            await asyncio.sleep(_PAUSE_S * num_tries)

    async def _begun_within(
        self, deadline_s: float | None, batches: AsyncIterator[tuple[Event, ...]], arrived: float
    ) -> AsyncIterator[tuple[Event, ...]]:
        """The batches; ApiError 408 unless the first comes within the deadline, counted from the arrival."""
        waited_s = self._clock() - arrived
        limit = asyncio.timeout(None if deadline_s is None else max(deadline_s - waited_s, 0.0))
        try:
            async with limit:
                first = await anext(batches, None)
        except TimeoutError as error:
            if limit.expired():
                raise _late(self._clock() - arrived, retry_after_s=1) from error
            raise
        if first is not None:
            yield first
            async for events in batches:
                yield events

    @asynccontextmanager
    async def _open(
        self, request: GenerateRequest, route: RouteRequest, lease: Lease | None, span: RouteSpan
    ) -> AsyncIterator[tuple[Welcome | Refusal, AsyncIterator[tuple[Event, ...]]]]:
        """A replica's first word and its batches of events. Cancelled at the end, whatever it is."""
        streams = self._streams if lease is None else self._streams.options(session_id=lease.replica_id)
        response = cast(
            DeploymentResponseGenerator[Welcome | Refusal | tuple[Event, ...]],
            streams.take.remote(request, route, lease, span.context),
        )
        first = None
        try:
            async with asyncio.timeout(self._settings.connect_timeout_s):
                first = await anext(response, None)
            if first is None:
                raise EngineStopped("the replica ended the call without a word")
            assert isinstance(first, Welcome | Refusal), first
            yield first, cast(AsyncIterator[tuple[Event, ...]], response)
        except asyncio.CancelledError:
            if first is None and lease is not None:
                # The replica may never see the call.
                self._notes.withdraw(route.request_id)
            raise
        finally:
            response.cancel()  # type: ignore[no-untyped-call]

    async def _lease(self, route: RouteRequest, returned: Returned | None) -> Lease | None:
        """The router's decision; None where it cannot be reached, so that the replica is chosen here.

        Raises ApiError where the request is given up.
        """
        if self._router is None:
            return None
        if self._notes.is_router_away:
            self._recorder.count("ingress_router_fallbacks")
            return None
        try:
            decision = await self._decision(route, returned)
        except ROUTER_LOST as error:
            self._notes.find_router(error)
            self._recorder.count("ingress_router_fallbacks")
            return None
        if isinstance(decision, Rejected):
            raise _rejection(decision)
        return decision

    async def _decision(self, route: RouteRequest, returned: Returned | None) -> Lease | Rejected:
        assert self._router is not None
        response = cast(
            DeploymentResponseGenerator[Queued | Lease | Rejected],
            self._router.assign.remote(RouteCall(route, returned)),
        )
        try:
            async with asyncio.timeout(self._settings.router_timeout_s):
                answer = await anext(response, None)
            if isinstance(answer, Queued):
                answer = await anext(response, None)
            if answer is None:
                raise TimeoutError("the router ended the call without a decision")
            assert not isinstance(answer, Queued)
            return answer
        except asyncio.CancelledError:
            # A lease may be on its way here, and closing the call no longer reaches it.
            self._notes.withdraw(route.request_id)
            raise
        finally:
            response.cancel()  # type: ignore[no-untyped-call]

    def _returned(self, replica_id: str, lease: Lease | None) -> Returned | None:
        """What the router is told with the next try."""
        if lease is not None:
            return Returned(lease.lease_id, lease.replica_id, RefusalReason.LOST)
        self._notes.lost(replica_id, None)
        return None


def _rejection(decision: Rejected) -> ApiError:
    retry_after_s = max(1, -int(-decision.retry_after_s // 1))
    if decision.reason is RejectionReason.DEADLINE:
        return _late(decision.waited_s, retry_after_s)
    whose = "of this key " if decision.reason is RejectionReason.TENANT_LIMIT else ""
    message = f"too many requests {whose}wait; try again in {retry_after_s} s"
    return ApiError(429, message, code=decision.reason.value, type=RATE_LIMIT, retry_after_s=retry_after_s)


def _late(waited_s: float, retry_after_s: int) -> ApiError:
    message = f"no replica was free within the request's time; it waited {waited_s:.1f} s"
    return ApiError(408, message, code="deadline_exceeded", type=SERVER_ERROR, retry_after_s=retry_after_s)


def _overloaded() -> ApiError:
    message = "no replica has room; try again shortly"
    return ApiError(503, message, code="engine_unavailable", type=SERVER_ERROR, retry_after_s=1)


def _not_ready() -> ApiError:
    message = "no engine is ready yet; try again shortly"
    return ApiError(503, message, code="not_ready", type=SERVER_ERROR, retry_after_s=2)
