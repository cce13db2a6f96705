"""The deployment that hosts the engine: one engine a replica, token ids in, event batches out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from contextvars import Context
from dataclasses import asdict, replace
from typing import Any, cast

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from engine import (
    Analysis,
    AnalysisResult,
    AsyncEngine,
    EngineConfig,
    EngineLoad,
    Event,
    Finished,
    GenerateRequest,
    Head,
    QueueFull,
    Recorder,
    prefix_keys,
)

from .checkpoint import locate
from .config import EngineServerSettings, TelemetrySettings
from .engine_spans import with_engine_spans
from .lease_desk import LeaseDesk
from .lease_messages import Refusal, ReportAnswer, Welcome
from .replica_choice import ReplicaChoice, publish_clock
from .replica_reports import Reporter, make_report
from .routing.messages import Lease, ReplicaReport, RouteRequest
from .routing.ranking import clock_of
from .streaming import coalesce, without_commits
from .telemetry import ServeRecorder, show_engine_log
from .tracing import TraceContext, make_tracer

logger = logging.getLogger("ray.serve")

EngineFactory = Callable[..., AsyncEngine]
"""Makes an engine as `AsyncEngine.from_checkpoint` does."""
STATS_PERIOD_S = 0.5
"""How often the controller fetches a replica's clock. It is read only where the router cannot be reached."""
SILENT_S = 5.0
"""An engine that has not said its load for so long hangs. A heartbeat is much less, even while the router is away."""
ROUTER_CONFIG = RequestRouterConfig.model_validate(
    {"request_router_class": ReplicaChoice, "request_routing_stats_period_s": STATS_PERIOD_S}
)
"""Set in code: named in a deploy file, the class would have to be importable by Ray's dashboard."""


@serve.deployment(name="EngineServer", request_router_config=ROUTER_CONFIG)
class EngineServer:
    """Loads a checkpoint and serves it. Ready once constructed, since it has generated something by then."""

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        engine_config: EngineConfig | None = None,
        router: DeploymentHandle[Any] | None = None,
        settings: EngineServerSettings | None = None,
        engine_factory: EngineFactory = AsyncEngine.from_checkpoint,
        recorder_factory: Callable[[], Recorder] = ServeRecorder,
        telemetry: TelemetrySettings | None = None,
    ) -> None:
        """Raises CheckpointError or InvalidConfig, which ends the replica with the reason in its log.

        Without a `router` nothing is reported, and requests come without leases.
        """
        started = time.monotonic()
        show_engine_log()
        settings = settings or EngineServerSettings()
        engine_config = engine_config or EngineConfig()
        folder = locate(model, revision, with_weights=True)
        self._settings = settings
        self._coalesce_interval_s = settings.coalesce_interval_s
        self._max_waiting = settings.max_waiting
        self._tracer = make_tracer(telemetry or TelemetrySettings(), "engine")
        recorder = recorder_factory()
        self._engine = engine_factory(folder, engine_config, recorder=recorder)
        self._block_size = self._engine.model_config.diff_block_size
        self._desk = LeaseDesk(own_replica_id(), grace_s=settings.lease_grace_s)
        # Results travel by gRPC instead of through Ray's object store.
        self._router = None if router is None else router.options(_by_reference=False)
        self._report_interval_s = settings.report_interval_s
        self._reporter = Reporter(
            self._desk,
            send=self._report,
            ask_load=lambda with_all_prefixes: self._engine.ask_load(with_all_prefixes=with_all_prefixes),
            heartbeat_s=settings.heartbeat_s,
        )
        self._reporting: asyncio.Task[None] | None = None
        self._stats: dict[str, Any] = {}
        self._is_configured = False
        if settings.warm_up_tokens > 0:
            # This may already run inside an event loop, which cannot run another one.
            with ThreadPoolExecutor(max_workers=1) as thread:
                thread.submit(asyncio.run, self._warm_up(settings.warm_up_tokens)).result()
        recorder.gauge("engine_start_seconds", time.monotonic() - started)
        with suppress(RuntimeError):
            # Where there is a loop already. If not, the first call from Serve brings one.
            self._start_reporting(asyncio.get_running_loop())

    async def generate(
        self, request: GenerateRequest, trace: TraceContext | None = None
    ) -> AsyncGenerator[tuple[Event, ...], None]:
        """The request's events in batches; raises what the engine raises. Closing it aborts the request."""
        batches = cast(AsyncGenerator[tuple[Event, ...], None], self._engine.generate(request))
        batches = with_engine_spans(batches, self._tracer, trace, request.request_id)
        async with aclosing(coalesce(batches, self._coalesce_interval_s)) as gathered:
            async for events in gathered:
                yield without_commits(events)

    async def take(
        self,
        request: GenerateRequest,
        route: RouteRequest,
        lease: Lease | None,
        trace: TraceContext | None = None,
    ) -> AsyncGenerator[Welcome | Refusal | tuple[Event, ...], None]:
        """Welcome at once and then the request's events, or one Refusal.

        Raises what the engine raises. A request without a lease waits in the engine's own queue.
        """
        self._start_reporting(asyncio.get_running_loop())
        # Each lane has a page table of its own.
        num_lanes = route.num_lanes
        num_pages = num_lanes * (len(request.prompt_token_ids) // self._block_size + 1)
        if lease is not None:
            keys = prefix_keys(request.prompt_token_ids, self._block_size)
            reason = self._desk.refusal(lease, num_lanes, num_pages, keys)
            if reason is not None:
                yield Refusal(self._desk.replica_id, reason)
                return
        elif self._max_waiting is not None and self._desk.num_waiting >= self._max_waiting:
            raise QueueFull(f"{self._desk.num_waiting} requests wait and max_waiting is {self._max_waiting}")
        self._desk.take(route.request_id, num_lanes, num_pages)
        try:
            yield Welcome(self._desk.replica_id)
            async with aclosing(self.generate(request, trace)) as batches:
                async for events in batches:
                    yield events
                    if isinstance(events[-1], Finished):
                        log_end(events[-1])
        finally:
            self._desk.leave(route.request_id)

    async def concept_top_tokens(self, concept_id: int, k: int, head: Head) -> list[tuple[int, float]]:
        """(token id, alignment) of the tokens that a concept most promotes."""
        return await self._engine.concept_top_tokens(concept_id, k, head=head)

    async def concept_neighbors(self, concept_id: int, k: int, head: Head) -> list[tuple[int, float]]:
        """(concept id, cosine) of the concepts of the same head that point most alike."""
        return await self._engine.concept_neighbors(concept_id, k, head=head)

    async def analyze(self, analysis: Analysis) -> AnalysisResult:
        """An analysis of text, done between passes; raises what the engine raises."""
        return await self._engine.analyze(analysis)

    async def stats(self) -> dict[str, int]:
        """What the engine uses now."""
        return asdict(await self._engine.stats())

    async def check_health(self) -> None:
        """Called by Serve: a replica whose engine stopped or hangs is replaced."""
        self._start_reporting(asyncio.get_running_loop())
        self._engine.check_health()

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Called by Serve with `user_config`: LiveEngineServerSettings. Streams go on.

        One that it leaves out is as the replica's own settings say.

        Raises ValueError for bad ones at the start. Later they are logged and change nothing: what is raised here ends
        the replica with all its streams, and the next one too.
        """
        try:
            live = self._settings.live_with(user_config)
        except ValueError as error:
            if not self._is_configured:
                raise
            logger.error("user_config changes nothing; mend it before this replica is replaced: %s", error)
            return
        self._is_configured = True
        self._coalesce_interval_s = live.coalesce_interval_s
        self._max_waiting = live.max_waiting
        self._start_reporting(asyncio.get_running_loop())

    def record_routing_stats(self) -> dict[str, Any]:
        """Called by Serve: when lanes come free, for those who choose without the router."""
        load = self._desk.load
        if load is None:
            return self._stats
        clock = clock_of(make_report(load, self._desk, number=0))
        if self._desk.load_age_s > SILENT_S:
            # Its boundaries have all passed, so it would look the idlest of all.
            clock = replace(clock, num_lanes_free=0, boundaries_s=(), is_silent=True)
        stats = publish_clock(clock, time.time() - self._desk.load_age_s)
        if clock.num_lanes_in_use or {**stats, "read_at": 0} != {**self._stats, "read_at": 0}:
            # What an idle replica says stays as it is, or every process would be told twice a second.
            self._stats = stats
        return self._stats

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve: what LanePolicy decides by."""
        desk, load, answer = self._desk, self._desk.load, self._reporter.last_answer
        return {
            "lanes": float(load.num_lanes) if load is not None else 0.0,
            "lanes_in_use": float(load.num_lanes - load.num_lanes_free + desk.num_lanes_waiting) if load else 0.0,
            "lanes_queued": float(answer.num_lanes_queued) if answer is not None else 0.0,
            "oldest_wait_s": answer.oldest_wait_s if answer is not None else 0.0,
        }

    def __del__(self) -> None:
        # Serve calls this when the replica leaves; it also runs when the constructor failed.
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.stop()

    def _start_reporting(self, loop: asyncio.AbstractEventLoop) -> None:
        # A task that has ended, whatever ended it, would leave the replica silent, and so idle, for good.
        if self._reporting is None or self._reporting.done():
            # Not in the name of a request that happens to begin it: with that, Serve would cancel reports.
            self._reporting = loop.create_task(self._reporter.run(), context=Context())

            def take(load: EngineLoad) -> None:
                # In the engine's thread, which may outlive the loop.
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(self._reporter.take, load)

            self._engine.watch_load(take, interval_s=self._report_interval_s)

    async def _report(self, report: ReplicaReport) -> ReportAnswer:
        if self._router is None:
            return ReportAnswer(wants_all_prefixes=False, num_lanes_queued=0, oldest_wait_s=0.0)
        answer: ReportAnswer = await self._router.report.remote(report, self._block_size)
        return answer

    async def _warm_up(self, num_tokens: int) -> None:
        async for _ in self._engine.generate(GenerateRequest(prompt_token_ids=(), max_tokens=num_tokens)):
            pass


def own_replica_id() -> str:
    """The id by which Serve, the router and leases name this replica."""
    try:
        return serve.get_replica_context().replica_id.to_full_id_str()
    except RayServeException:
        # Not inside a replica: there is one engine only.
        return "local"


def log_end(finished: Finished) -> None:
    """One line for each request; Serve's log adds the id of the HTTP request that it is a part of."""
    output = finished.output
    level = logging.INFO if output.error is None else logging.ERROR
    logger.log(
        level,
        "%s: %s, %d tokens in %d passes and %d blocks, %d of %d prompt tokens cached%s",
        output.request_id,
        output.finish_reason.value,
        len(output.token_ids),
        output.num_forward_passes,
        output.num_blocks,
        output.num_cached_tokens,
        output.num_prompt_tokens,
        f"; {output.error}" if output.error else "",
    )
