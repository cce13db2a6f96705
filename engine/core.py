"""Engine: takes requests, runs passes, hands out events. The only module that knows all the others.

One thread at a time may use an Engine; `AsyncEngine` puts a thread around it.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from .admission import check_request
from .config import EngineConfig, ModelConfig
from .decoding.attribution import top_tokens
from .decoding.steering import SteeringPlan, plan_steering
from .errors import InvalidValue, NonFiniteLogits, Unsupported
from .metrics import NullRecorder, Recorder
from .model.steerling import SteerlingModel
from .request import (
    MAX_SEED,
    BlockFinished,
    BlockStarted,
    Commit,
    Committed,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    Output,
    Started,
)
from .runner.model_runner import KeptCommit, ModelRunner, RowOutcome
from .scheduling import BlockFinished as CanvasFinished
from .scheduling import BlockStarted as CanvasStarted
from .scheduling import (
    Plan,
    RowResult,
    Scheduler,
    Sequence,
    SequenceFinished,
)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of what is in use."""

    num_waiting: int
    num_running: int
    num_lanes: int
    num_pages: int
    pages_free: int
    pages_cached: int
    pages_held: int


@dataclass(slots=True, eq=False)
class _Entry:
    """One request in the engine: what was asked, what it became, what came out so far."""

    request: GenerateRequest
    sequence: Sequence
    seed: int
    steering: SteeringPlan
    commits: list[Commit] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    unexplained: list[tuple[Commit, KeptCommit]] = field(default_factory=list)
    oldest_unexplained: float = 0.0
    block: int = 0
    """The block whose commits are in `unexplained` or come next."""

    @property
    def id(self) -> str:
        """The request's id."""
        return self.sequence.id


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
        """`clock` decides only when commits are explained, never what is computed."""
        self.config = config or EngineConfig()
        self.runner = ModelRunner(model, self.config)
        self.scheduler = Scheduler(self.config, model.config.diff_block_size, self.runner.cache.num_pages)
        self._recorder = recorder or NullRecorder()
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._num_arrived = 0

    @classmethod
    def from_checkpoint(
        cls, path: str | Path, config: EngineConfig | None = None, *, recorder: Recorder | None = None
    ) -> Engine:
        """Load a checkpoint folder (config.json, *.safetensors); raises InvalidConfig or CheckpointError."""
        config = config or EngineConfig()
        return cls(ModelRunner.load(path, config), config, recorder=recorder)

    @property
    def model_config(self) -> ModelConfig:
        """Shape and special tokens of the loaded checkpoint."""
        return self.runner.config

    @property
    def has_work(self) -> bool:
        """True while some request waits or runs, or has events to hand out."""
        return bool(self._entries)

    def stats(self) -> EngineStats:
        """What is in use now."""
        scheduler = self.scheduler
        return EngineStats(
            num_waiting=scheduler.num_waiting,
            num_running=scheduler.num_running,
            num_lanes=self.config.num_lanes,
            num_pages=self.runner.cache.num_pages,
            pages_free=scheduler.num_free_pages,
            pages_cached=scheduler.num_cached_pages,
            pages_held=scheduler.num_held_pages,
        )

    def generate(self, requests: Iterable[GenerateRequest]) -> list[Output]:
        """Serve requests together and return their outputs in the order of the requests.

        Raises InvalidRequest, with nothing started, if any of them can never be served. Other requests that the
        engine already has go on meanwhile, but their events are lost: use one or the other.
        """
        requests = list(requests)
        ids: list[str] = []
        for request in requests:
            try:
                ids.append(self.add_request(request))
            except Exception:
                for request_id in ids:
                    self.abort(request_id)
                raise
        outputs: dict[str, Output] = {}
        while len(outputs) < len(ids):
            for event in self.step():
                if isinstance(event, Finished):
                    outputs[event.request_id] = event.output
        return [outputs[request_id] for request_id in ids]

    def add_request(self, request: GenerateRequest) -> str:
        """Queue a request and return its id. Raises InvalidRequest or QueueFull; then nothing has changed."""
        check_request(request, self.model_config, num_pages=self.runner.cache.num_pages)
        request_id = request.request_id or f"gen-{secrets.token_hex(8)}"
        if request_id in self._entries:
            raise InvalidValue(f"request_id {request_id!r} is in use; ids of running requests must differ")
        seed = request.sampling.seed
        entry = _Entry(
            request=request,
            sequence=self._make_sequence(request_id, request),
            seed=secrets.randbelow(MAX_SEED) if seed is None else seed,
            steering=plan_steering(self.runner.model, request.steering),
        )
        self.scheduler.add(entry.sequence)
        self._entries[request_id] = entry
        self._num_arrived += 1
        return request_id

    def abort(self, request_id: str) -> None:
        """End a request before the next step; its Finished event comes with that step. Unknown ids are ignored."""
        entry = self._entries.get(request_id)
        if entry is None or not self.scheduler.abort(request_id):
            return
        self._recorder.count("aborts")
        self._explain([entry])
        self._finish(entry, FinishReason.ABORT, None)

    def step(self) -> list[Event]:
        """Run one pass: plan, run, apply. Returns the events of every request, each request's in order."""
        if self.scheduler.has_work:
            plan = self.scheduler.plan()
            self._take_in(plan)
            started = self._clock()
            outcomes = self.runner.run(plan.rows, self._num_logprobs(plan))
            self._record_pass(plan, self._clock() - started)
            self._apply(plan, outcomes)
        self._explain_due()
        events: list[Event] = []
        for entry in list(self._entries.values()):
            events += entry.events
            entry.events = []
            if events and isinstance(events[-1], Finished) and events[-1].request_id == entry.id:
                del self._entries[entry.id]
        return events

    def preempt(self, request_id: str) -> bool:
        """Send a running request back to the queue before the next step; False if it does not run.

        It continues to the same tokens later. For tests and for operators who drain a lane.
        """
        entry = self._entries.get(request_id)
        if entry is None or not entry.sequence.is_running:
            return False
        self._explain([entry])
        return self.scheduler.preempt(request_id)

    def check_integrity(self) -> None:
        """Assert that pages, lanes and sequences agree; for tests and for idle moments."""
        self.scheduler.check_integrity()

    def concept_top_tokens(
        self, concept_id: int, k: int = 15, *, head: Literal["known", "discovered"] = "known"
    ) -> list[tuple[int, float]]:
        """(token id, alignment) of the tokens a concept most promotes, by its unit embedding against lm_head."""
        model = self.runner.model
        concept_head = model.known_head if head == "known" else model.discovered_head
        if concept_head is None:
            raise Unsupported("this checkpoint has no discovered head", param="head")
        if not 0 <= concept_id < concept_head.num_concepts:
            raise InvalidValue(
                f"concept {concept_id} does not exist; {head} concepts lie in [0, {concept_head.num_concepts})",
                param="concept_id",
            )
        ids, values = top_tokens(model, concept_head, concept_id, k)
        return list(zip(ids.tolist(), values.tolist(), strict=True))

    def _make_sequence(self, request_id: str, request: GenerateRequest) -> Sequence:
        config, sampling = self.model_config, request.sampling
        ends = set(sampling.stop_token_ids)
        if config.eot_id is not None and not sampling.ignore_eos:
            ends.add(config.eot_id)
        return Sequence(
            id=request_id,
            priority=request.priority,
            arrival=self._num_arrived,
            block_size=config.diff_block_size,
            prompt_token_ids=request.prompt_token_ids,
            max_tokens=request.max_tokens,
            mask_token_id=config.mask_token_id,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
            end_token_ids=frozenset(ends) - set(config.banned_token_ids),
            tokens_per_step=sampling.tokens_per_step,
        )

    def _take_in(self, plan: Plan) -> None:
        """Explain what preempted sequences left in their lanes, then write the admitted ones into theirs."""
        preempted = [self._entries[item.sequence.id] for item in plan.preempted]
        self._explain(preempted)
        if preempted:
            self._recorder.count("preemptions", len(preempted))
        for admission in plan.admitted:
            entry = self._entries[admission.sequence.id]
            sequence = entry.sequence
            self.runner.lanes.write(admission.lane, sequence, entry.request.sampling, entry.seed, entry.steering)
            if sequence.num_preemptions == 0:
                entry.events.append(
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
        """Feed the pass's commits to the scheduler and turn its changes into events, in order."""
        outcome_of = {outcome.row.sequence.id: outcome for outcome in outcomes}
        step_of = {sequence_id: self._entries[sequence_id].sequence.num_denoising_steps for sequence_id in outcome_of}
        results = [
            RowResult(
                sequence_id, tuple((c.position, c.token_id) for c in outcome.commits), is_finite=outcome.is_finite
            )
            for sequence_id, outcome in outcome_of.items()
        ]
        changes = self.scheduler.apply(plan, results)
        changes_of = defaultdict(list)
        for change in changes:
            changes_of[change.sequence.id].append(change)
        ending = [
            self._entries[sequence_id]
            for sequence_id, own in changes_of.items()
            if any(isinstance(change, CanvasFinished | SequenceFinished) for change in own)
        ]
        for sequence_id, outcome in outcome_of.items():
            entry = self._entries[sequence_id]
            # A canvas starts before the pass's commits and finishes after them.
            for change in changes_of[sequence_id]:
                if isinstance(change, CanvasStarted) and change.block == outcome.row.block:
                    entry.events.append(BlockStarted(entry.id, change.block, change.start, change.end))
            entry.block = outcome.row.block
            self._take_commits(entry, outcome, step_of[sequence_id])
        self._explain(ending)
        for sequence_id, outcome in outcome_of.items():
            self._report(self._entries[sequence_id], outcome, changes_of[sequence_id])

    def _take_commits(self, entry: _Entry, outcome: RowOutcome, denoising_step: int) -> None:
        num_logprobs = entry.request.sampling.num_logprobs
        commits = [
            Commit(
                position=c.position,
                token_id=c.token_id,
                denoising_step=denoising_step,
                confidence=c.confidence,
                target_logit=c.target_logit,
                logprob=c.logprob,
                top_logprobs=c.top_logprobs[:num_logprobs],
            )
            for c in outcome.commits
        ]
        self._recorder.count("engine_commits", len(commits))
        if not commits:
            return
        if entry.request.attribution is None:
            self._hand_out(entry, commits)
            return
        if not entry.unexplained:
            entry.oldest_unexplained = self._clock()
        block_size = entry.sequence.block_size
        entry.unexplained += [
            (c, KeptCommit(outcome.row.lane, c.position % block_size, c.token_id, c.target_logit)) for c in commits
        ]

    def _report(
        self, entry: _Entry, outcome: RowOutcome, changes: list[CanvasStarted | CanvasFinished | SequenceFinished]
    ) -> None:
        for change in changes:
            match change:
                case CanvasStarted(block=block) if block == outcome.row.block:
                    pass  # reported before the commits
                case CanvasStarted():
                    entry.events.append(BlockStarted(entry.id, change.block, change.start, change.end))
                case CanvasFinished():
                    entry.events.append(BlockFinished(entry.id, change.block, change.start, change.end))
                case SequenceFinished():
                    error = None
                    if change.reason is FinishReason.ERROR:
                        error = _describe_failure(outcome)
                    self._finish(entry, change.reason, error)

    def _explain_due(self) -> None:
        """Explain the commits that have waited long enough."""
        now = self._clock()
        due = [
            entry
            for entry in self._entries.values()
            if entry.unexplained and now - entry.oldest_unexplained >= self.config.explain_interval_s
        ]
        self._explain(due)

    def _explain(self, entries: list[_Entry]) -> None:
        """Explain all that these entries have waiting, in one call, and hand the commits out."""
        pending = [(entry, commit, kept) for entry in entries for commit, kept in entry.unexplained]
        if not pending:
            return
        top_k = [entry.request.attribution.top_k if entry.request.attribution else 0 for entry, _, _ in pending]
        attributions = self.runner.explain([kept for _, _, kept in pending], top_k)
        explained: dict[str, list[Commit]] = defaultdict(list)
        for (entry, commit, _), attribution in zip(pending, attributions, strict=True):
            explained[entry.id].append(dataclasses.replace(commit, attribution=attribution))
        for entry in entries:
            if entry.unexplained:
                entry.unexplained = []
                self._hand_out(entry, explained[entry.id])

    def _hand_out(self, entry: _Entry, commits: list[Commit]) -> None:
        entry.commits += commits
        entry.events.append(Committed(entry.id, entry.block, tuple(commits)))

    def _finish(self, entry: _Entry, reason: FinishReason, error: str | None) -> None:
        sequence = entry.sequence
        output = Output(
            request_id=entry.id,
            token_ids=tuple(sequence.text_token_ids),
            finish_reason=reason,
            commits=tuple(entry.commits),
            num_forward_passes=sequence.num_forward_passes,
            num_denoising_steps=sequence.num_denoising_steps,
            num_blocks=sequence.num_blocks,
            num_prompt_tokens=sequence.prompt_length,
            num_cached_tokens=sequence.num_cached_tokens,
            num_preemptions=sequence.num_preemptions,
            seed=entry.seed,
            steering=entry.steering.resolved,
            error=error,
        )
        entry.events.append(Finished(entry.id, output))

    def _record_pass(self, plan: Plan, seconds: float) -> None:
        recorder, stats = self._recorder, self.stats()
        recorder.count("engine_passes")
        recorder.observe("engine_rows", len(plan.rows))
        recorder.observe("engine_pass_seconds", seconds)
        recorder.gauge("requests_waiting", stats.num_waiting)
        recorder.gauge("lanes_in_use", stats.num_running)
        recorder.gauge("pages_free", stats.pages_free)
        recorder.gauge("pages_cached", stats.pages_cached)
        recorder.gauge("pages_held", stats.pages_held)


def _describe_failure(outcome: RowOutcome) -> str:
    return (
        f"{NonFiniteLogits.__name__}: the model gave no finite logits for a masked position in "
        f"[{outcome.row.block * outcome.row.sequence.block_size}, {outcome.row.key_length}); check the checkpoint, "
        "and that strengths and logit_bias leave some token to choose"
    )
