"""Engine: takes requests, runs passes, hands out events. The only module that knows all the others.

One thread at a time may use an Engine; `AsyncEngine` puts a thread around it.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

from .admission import check_request
from .analysis import Analysis, AnalysisResult
from .analyzing import AnalysisDesk, ScoreCache, start_analysis
from .checks import is_whole, shown
from .config import EngineConfig, ModelConfig
from .decoding.attribution import top_tokens
from .decoding.neighbors import nearest_concepts
from .decoding.steering import SteeringPlan, plan_steering
from .errors import InvalidValue, Unsupported
from .lifecycle import Measurements
from .limits import MAX_SEED
from .load import EngineLoad, PassAverages, measure
from .metrics import NullRecorder, Recorder
from .model.concept_heads import ConceptHead
from .model.steerling import SteerlingModel
from .outbox import Entry, Outbox
from .output import (
    BlockFinished,
    BlockStarted,
    Event,
    Finished,
    FinishReason,
    Output,
    Started,
)
from .request import GenerateRequest, Head
from .runner.explaining import keep
from .runner.graphs import row_buckets
from .runner.model_runner import ModelRunner
from .runner.pass_in_flight import PassInFlight, RowOutcome
from .runner.step_profiler import StepProfiler
from .scheduling import (
    CanvasFinished,
    CanvasStarted,
    Plan,
    RowResult,
    Scheduler,
    SequenceFinished,
    make_sequence,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """A snapshot of what is in use."""

    num_waiting: int
    num_running: int
    num_lanes: int
    num_lanes_in_use: int
    """A guided request runs on two."""
    num_pages: int
    pages_free: int
    pages_cached: int
    pages_held: int


class Engine:
    """Continuous batching over one model: every request moves through its blocks at its own pace."""

    def __init__(
        self,
        model: SteerlingModel,
        config: EngineConfig | None = None,
        *,
        recorder: Recorder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` decides when commits are explained and what durations are recorded, never what is computed."""
        self.config = config or EngineConfig()
        self.runner = ModelRunner(model, self.config)
        self.scheduler = Scheduler(self.config, model.config.diff_block_size, self.runner.cache.num_pages)
        self._clock = clock
        self._measured = Measurements(recorder or NullRecorder(), clock, row_buckets(self.config.max_rows))
        self._measured.capacity(
            rows=self.config.max_rows, lanes=self.config.num_lanes, pages=self.runner.cache.num_pages
        )
        self._measured.usage(self.stats())
        self._entries: dict[str, Entry] = {}
        self._outbox = Outbox(self._entries, self.runner, self._measured, clock)
        self._in_flight: deque[tuple[Plan, PassInFlight]] = deque()
        self._profiler = None
        if self.config.profile_dir is not None:
            self._profiler = StepProfiler(
                self.config.profile_dir, self.config.profile_steps, num_skipped=self.config.profile_after
            )
        is_async = self.config.async_scheduling
        self._is_async = self.runner.device.type == "cuda" if is_async is None else is_async
        self._num_arrived = 0
        self._pass_averages = PassAverages()
        self._analyses = AnalysisDesk(self.config.max_analyses)
        self._score_cache = ScoreCache(self.config.score_cache_bytes)
        self._measured.scored(0, 0, cache_bytes=0)

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path,
        config: EngineConfig | None = None,
        *,
        recorder: Recorder | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Engine:
        """Load a checkpoint folder (config.json, *.safetensors), telling `progress` bytes of weights read and in all.

        Raises InvalidConfig or CheckpointError.
        """
        config = config or EngineConfig()
        return cls(ModelRunner.load(path, config, progress=progress), config, recorder=recorder)

    @property
    def model_config(self) -> ModelConfig:
        """Shape and special tokens of the loaded checkpoint."""
        return self.runner.config

    @property
    def has_work(self) -> bool:
        """True while some request waits or runs, or has events to hand out, or an analysis is under way."""
        return bool(self._entries) or self._analyses.has_work

    def memory_table(self) -> str:
        """What the device's memory goes to, for people."""
        return self.runner.memory.table()

    def stats(self) -> EngineStats:
        """What is in use now."""
        scheduler = self.scheduler
        return EngineStats(
            num_waiting=scheduler.num_waiting,
            num_running=scheduler.num_running,
            num_lanes=self.config.num_lanes,
            num_lanes_in_use=self.config.num_lanes - scheduler.num_free_lanes,
            num_pages=self.runner.cache.num_pages,
            pages_free=scheduler.num_free_pages,
            pages_cached=scheduler.num_cached_pages,
            pages_held=scheduler.num_held_pages,
        )

    def load(self, *, with_all_prefixes: bool = False) -> EngineLoad:
        """What is in use and for how long, for somebody who chooses between engines.

        Prefixes are told once: those that came and went since the last call, or all that are offered now.
        """
        return measure(
            self.scheduler, self._pass_averages, num_lanes=self.config.num_lanes, with_all_prefixes=with_all_prefixes
        )

    def generate(self, requests: Iterable[GenerateRequest]) -> list[Output]:
        """Serve requests together and return their outputs in the order of the requests.

        Raises InvalidRequest, with nothing started, if any of them can never be served. Other requests that the
        engine already has go on meanwhile, but their events are lost: use one or the other.
        """
        requests = list(requests)
        self._check_list(requests)
        ids: list[str] = []
        outputs: dict[str, Output] = {}

        def step() -> None:
            outputs.update((event.request_id, event.output) for event in self.step() if isinstance(event, Finished))

        try:
            for request in requests:
                # The queue's limit is for callers who can come back later.
                while self.scheduler.is_full:
                    step()
                ids.append(self.add_request(request))
            # Other requests of the engine may end meanwhile.
            while not outputs.keys() >= set(ids):
                step()
        except BaseException:
            # A refusal, an interrupt or a failing pass: nobody is left to take what these would bring.
            self._discard(ids)
            raise
        return [outputs[request_id] for request_id in ids]

    def add_request(self, request: GenerateRequest) -> str:
        """Queue a request and return its id. Raises InvalidRequest or QueueFull; then nothing has changed."""
        self._check(request)
        life = self._measured.begin(request)
        # Before the device works for it: a flood that is refused should cost next to nothing.
        self.scheduler.check_room()
        request_id = request.request_id or f"gen-{secrets.token_hex(8)}"
        if request_id in self._entries:
            raise InvalidValue(
                f"request_id {request_id!r} belongs to a request that has not ended; choose another or leave it out",
                param="request_id",
            )
        seed = request.sampling.seed
        entry = Entry(
            request=request,
            sequence=make_sequence(request, self.model_config, id=request_id, arrival=self._num_arrived),
            seed=secrets.randbelow(MAX_SEED) if seed is None else seed,
            steering=self._plan_steering(request),
            life=life,
        )
        self.scheduler.add(entry.sequence)
        self._entries[request_id] = entry
        self._num_arrived += 1
        self._measured.added(request)
        return request_id

    def abort(self, request_id: str) -> None:
        """End a request before the next step; its Finished event comes with that step. Unknown ids are ignored."""
        entry = self._entries.get(request_id)
        if entry is None or not self.scheduler.abort(request_id):
            return
        self._measured.aborted()
        self._outbox.explain([entry])
        self._outbox.finish(entry, FinishReason.ABORT)

    def step(self) -> list[Event]:
        """Plan a pass, launch it, and apply a pass: this one, or with async scheduling the one before.

        Returns the events that are ready, of every request, each request's in order.
        """
        if self._profiler is None or self._profiler.is_done:
            return self._step()
        with self._profiler.step():
            return self._step()

    def _step(self) -> list[Event]:
        is_launched = self._launch()
        # Also here, so that a pass that hangs is seen to hang with lanes in use.
        self._measured.usage(self.stats())
        is_ahead = is_launched and self._is_async
        # What is asked for from here on stands behind the pass that has just been launched, and is read in the next
        # step; what was asked for before stands behind the pass that is read now.
        num_asked = self._outbox.num_explaining
        while len(self._in_flight) > is_ahead:
            self._land()
        self._outbox.take_explanations(num_asked)
        self._explain_due()
        if not is_ahead:
            self._outbox.take_explanations(self._outbox.num_explaining)
        if self._analyses.has_work:
            self._analyses.advance()
            self._measured.scored(*self._score_cache.take_counts(), cache_bytes=self._score_cache.num_bytes)
        # When the step is over: nothing measures again until there is work, and an idle engine has to look idle.
        self._measured.usage(self.stats())
        events = self._outbox.take_events()
        self._forget_void_passes()
        return events

    def begin_analysis(self, analysis: Analysis) -> Future[AnalysisResult]:
        """Take an analysis on: steps do it slice by slice between passes, and the future gets its result.

        Raises InvalidRequest or QueueFull; then nothing has changed. Cancelling the future ends the analysis.
        """
        self._analyses.check_room()
        return self._analyses.add(start_analysis(analysis, self.runner, self.scheduler, self._score_cache))

    def analyze(self, analysis: Analysis) -> AnalysisResult:
        """Do one analysis now. Requests go on meanwhile, but their events are lost: use one or the other."""
        result = self.begin_analysis(analysis)
        while not result.done():
            self.step()
        return result.result()

    def end_analyses(self, error: Exception) -> None:
        """End every analysis with an error."""
        self._analyses.close(error)

    def preempt(self, request_id: str) -> bool:
        """Send a running request back to the queue before the next step; False if it does not run.

        It continues to the same tokens later. For tests and for operators who drain a lane.
        """
        entry = self._entries.get(request_id)
        if entry is None or not entry.sequence.is_running:
            return False
        self._outbox.explain([entry])
        return self.scheduler.preempt(request_id)

    def check_integrity(self) -> None:
        """Assert that pages, lanes, sequences and caches agree; for tests and for idle moments."""
        self.scheduler.check_integrity()
        self._score_cache.check_integrity(is_idle=not self._analyses.has_work)

    def concept_top_tokens(self, concept_id: int, k: int = 15, *, head: Head = "known") -> list[tuple[int, float]]:
        """(token id, alignment) of the tokens a concept most promotes, by its unit embedding against lm_head."""
        concept_head = self._checked_head(concept_id, k, head)
        ids, values = top_tokens(self.runner.model, concept_head, concept_id, k)
        return list(zip(ids.tolist(), values.tolist(), strict=True))

    def concept_neighbors(self, concept_id: int, k: int = 10, *, head: Head = "known") -> list[tuple[int, float]]:
        """(concept id, cosine) of the concepts of the same head whose embeddings point most alike, itself left out."""
        ids, values = nearest_concepts(self._checked_head(concept_id, k, head), concept_id, k)
        return list(zip(ids.tolist(), values.tolist(), strict=True))

    def _checked_head(self, concept_id: int, k: int, head: str) -> ConceptHead:
        """The head that has the concept; raises InvalidRequest for what is wrong with any of the three."""
        model = self.runner.model
        if head not in ("known", "discovered"):
            raise InvalidValue(f"head is {shown(head)}; it must be 'known' or 'discovered'", param="head")
        concept_head = model.known_head if head == "known" else model.discovered_head
        if concept_head is None:
            raise Unsupported("this checkpoint has no discovered head", param="head")
        if not is_whole(concept_id, 0, concept_head.num_concepts - 1):
            raise InvalidValue(
                f"concept {shown(concept_id)} does not exist; {head} concepts lie in [0, {concept_head.num_concepts})",
                param="concept_id",
            )
        if not is_whole(k, 0):
            raise InvalidValue(f"k is {shown(k)}; it must be a whole number at least 0", param="k")
        return concept_head

    def _check(self, request: GenerateRequest) -> None:
        num_pages, num_lanes = self.runner.cache.num_pages, self.config.num_lanes
        check_request(request, self.model_config, num_pages=num_pages, num_lanes=num_lanes)

    def _check_list(self, requests: list[GenerateRequest]) -> None:
        """Raise InvalidRequest if one could never be served, or two have one id."""
        ids: set[str] = set()
        for request in requests:
            self._check(request)
            if request.request_id in ids:
                raise InvalidValue(f"request_id {request.request_id!r} is in the list twice", param="request_id")
            if request.request_id is not None:
                ids.add(request.request_id)

    def _discard(self, request_ids: list[str]) -> None:
        """Drop requests and what they have not handed out: no event tells of them any more."""
        for request_id in request_ids:
            self.scheduler.abort(request_id)
        self._outbox.discard(request_ids)
        self._forget_void_passes()

    def _forget_void_passes(self) -> None:
        """Where every request has ended, what is still in flight concerns nobody, and nobody need wait for it."""
        if not self._entries:
            self._in_flight.clear()

    def _plan_steering(self, request: GenerateRequest) -> SteeringPlan:
        with self.runner.beside_passes():
            return plan_steering(self.runner.model, request.steering)

    def _launch(self) -> bool:
        """Plan the next pass and give it to the device; False if there is nothing to run."""
        if not self.scheduler.has_work:
            return False
        plan = self.scheduler.plan()
        try:
            self._take_in(plan)
            if not plan.rows:
                return False
            lives = ((self._entries[row.sequence.id].life, row.block) for row in plan.denoise_rows)
            self._measured.launching(plan, lives)
            self._in_flight.append((plan, self.runner.launch(plan.rows, self._num_logprobs(plan))))
        except BaseException:
            # How far the device came nobody knows: whoever was to run is written to a lane anew.
            concerned = [*(row.sequence.id for row in plan.rows), *(item.sequence.id for item in plan.admitted)]
            try:
                self._outbox.explain([self._entries[id_] for id_ in dict.fromkeys(concerned)])
            finally:
                for request_id in concerned:
                    self.scheduler.preempt(request_id)
            raise
        return True

    def _land(self) -> None:
        """Wait for the oldest pass in flight and apply what it did."""
        plan, launched = self._in_flight[0]
        outcomes, timing = launched.read()
        # Not before: an interrupt while the host waits must lose no commits.
        self._in_flight.popleft()
        self._pass_averages.observe(len(plan.rows), timing.device)
        # Rows of sequences that have ended or lost their lane since concern nobody.
        outcomes = [outcome for outcome in outcomes if self.scheduler.is_in_flight(outcome.row)]
        num_commits = sum(len(outcome.commits) for outcome in outcomes)
        self._measured.landed(plan, device_seconds=timing.device, wait_seconds=timing.wait, num_commits=num_commits)
        self._apply(plan, outcomes)

    def _take_in(self, plan: Plan) -> None:
        """Explain what preempted sequences left in their lanes, then write the admitted ones into theirs."""
        preempted = [self._entries[item.sequence.id] for item in plan.preempted]
        self._outbox.explain(preempted)
        self._measured.preempted(len(preempted))
        for admission in plan.admitted:
            entry = self._entries[admission.sequence.id]
            sequence = entry.sequence
            state = (sequence, entry.request.sampling, entry.seed, entry.steering)
            self.runner.lanes.write(admission.lane, *state)
            if admission.shadow_lane is not None:
                self.runner.lanes.write(admission.shadow_lane, *state, is_shadow=True)
            if not entry.is_announced:
                entry.is_announced = True
                self._measured.admitted(entry.life, sequence)
                self._outbox.add(
                    Started(
                        request_id=entry.id,
                        seed=entry.seed,
                        block_size=sequence.block_size,
                        num_prompt_tokens=sequence.prompt_length,
                        prompt_tail=sequence.prompt_length % sequence.block_size,
                        num_cached_tokens=sequence.num_cached_tokens,
                        steering=entry.steering.resolved,
                    )
                )

    def _num_logprobs(self, plan: Plan) -> int:
        return max(
            (self._entries[row.sequence.id].request.sampling.num_logprobs for row in plan.denoise_rows), default=0
        )

    def _apply(self, plan: Plan, outcomes: list[RowOutcome]) -> None:
        """Feed the pass's commits to the scheduler; tell what starts, then the commits, then what ends."""
        results = [
            RowResult(
                outcome.row.sequence.id,
                tuple((c.position, c.token_id) for c in outcome.commits),
                is_finite=outcome.is_finite,
            )
            for outcome in outcomes
        ]
        changes = self.scheduler.apply(plan, results)
        starts = [change for change in changes if isinstance(change, CanvasStarted)]
        ends = [change for change in changes if not isinstance(change, CanvasStarted)]
        for start in starts:
            self._outbox.add(BlockStarted(start.sequence.id, start.block, start.start, start.end))
        for outcome in outcomes:
            self._take_commits(self._entries[outcome.row.sequence.id], outcome)
        # Nothing may be left to explain when a block or a text ends; all that end share one call.
        try:
            self._outbox.explain([self._entries[id_] for id_ in dict.fromkeys(end.sequence.id for end in ends)])
        finally:
            for end in ends:
                self._report_end(end)

    def _take_commits(self, entry: Entry, outcome: RowOutcome) -> None:
        """Hand the commits of a denoise row out, or keep them until they are explained."""
        num_logprobs = entry.request.sampling.num_logprobs
        commits = [replace(commit, top_logprobs=commit.top_logprobs[:num_logprobs]) for commit in outcome.commits]
        self._measured.drafted(outcome.draft)
        if not commits:
            return
        entry.life.count_pass(outcome.row.block)
        if entry.request.attribution is None:
            self._outbox.add_commits(entry, commits)
            return
        if not entry.unexplained:
            entry.unexplained_since = self._clock()
        entry.unexplained += [(commit, keep(commit, outcome.row, entry.request.sampling)) for commit in commits]

    def _report_end(self, end: CanvasFinished | SequenceFinished) -> None:
        sequence = end.sequence
        match end:
            case CanvasFinished():
                self._outbox.add(BlockFinished(sequence.id, end.block, end.start, end.end))
            case SequenceFinished():
                self._outbox.finish(self._entries[sequence.id], end.reason)

    def _explain_due(self) -> None:
        """Explain the commits that have waited long enough."""
        now = self._clock()
        due = [
            entry
            for entry in self._entries.values()
            if entry.unexplained and now - entry.unexplained_since >= self.config.explain_interval_s
        ]
        self._outbox.explain(due)
