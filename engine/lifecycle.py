"""What an engine measures: the clocks of each request, and the numbers of each pass.

Every name that the engine records stands here. Knows a recorder and a clock; must not know devices or tensors, and
decides nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from .metrics import GuardedRecorder, Recorder
from .output import BlockFinished, Committed, Event, Finished, FinishReason
from .request import GenerateRequest
from .scheduling import Plan, RowKind, Sequence

KIND_NAMES = {kind: kind.name.lower() for kind in RowKind}
"""Kind of row -> its label."""


class Usage(Protocol):
    """What is in use; `EngineStats` has it."""

    @property
    def num_waiting(self) -> int:
        """Requests without a lane."""

    @property
    def num_lanes_in_use(self) -> int:
        """Lanes of running sequences."""

    @property
    def pages_free(self) -> int:
        """Pages without content."""

    @property
    def pages_cached(self) -> int:
        """Pages kept for prefixes to come."""

    @property
    def pages_held(self) -> int:
        """Pages of running sequences."""


class Draft(Protocol):
    """What became of a draft; `DraftOutcome` has it."""

    @property
    def is_position_right(self) -> bool:
        """The expected commit came at the expected position."""

    @property
    def is_token_right(self) -> bool:
        """And with the expected token."""

    @property
    def is_commit(self) -> bool:
        """So the draft's own commit counted."""


@dataclass(slots=True)
class _Canvas:
    """A block that is being filled."""

    started_at: float
    num_passes: int = 0


@dataclass(slots=True, eq=False)
class Life:
    """One request's clocks. They run on through preemptions: what a client waits for counts, whatever the cause."""

    policy: str
    added_at: float
    canvases: dict[int, _Canvas] = field(default_factory=dict)
    """Blocks that have begun and whose end has not been handed out."""
    has_token: bool = False
    """A token was handed out."""
    last_block_at: float | None = None
    """When the end of a block was last handed out."""

    def begin(self, block: int, now: float) -> None:
        """A pass with a denoise row of the block is about to be launched; only the first one starts its clock."""
        self.canvases.setdefault(block, _Canvas(now))

    def count_pass(self, block: int) -> None:
        """A pass has committed tokens of the block."""
        self.canvases[block].num_passes += 1


class Measurements:
    """Turns what happens in an engine into measurements. What a recorder raises is logged and costs no request."""

    def __init__(self, recorder: Recorder, clock: Callable[[], float], buckets: tuple[int, ...]) -> None:
        """`clock` gives seconds; `buckets`: numbers of rows by which the times of passes are told apart, rising."""
        self._recorder = GuardedRecorder(recorder)
        self._clock = clock
        self._buckets = buckets
        self._num_rows = 0

    def capacity(self, *, rows: int, lanes: int, pages: int) -> None:
        """The most that there is of each."""
        self._recorder.gauge("rows_capacity", rows)
        self._recorder.gauge("lanes_capacity", lanes)
        self._recorder.gauge("pages_capacity", pages)

    def usage(self, now: Usage) -> None:
        """What is in use, as it will be reported until the next call."""
        recorder = self._recorder
        recorder.gauge("requests_waiting", now.num_waiting)
        recorder.gauge("lanes_in_use", now.num_lanes_in_use)
        recorder.gauge("rows_in_use", self._num_rows if now.num_lanes_in_use else 0)
        recorder.gauge("pages_free", now.pages_free)
        recorder.gauge("pages_cached", now.pages_cached)
        recorder.gauge("pages_held", now.pages_held)

    def begin(self, request: GenerateRequest) -> Life:
        """Start the clocks of a request that has just come; nothing is counted yet, since it may still be refused."""
        return Life(request.sampling.policy, self._clock())

    def added(self, request: GenerateRequest) -> None:
        """The request was taken."""
        self._recorder.count("requests", policy=request.sampling.policy)
        if request.steering is not None and (request.steering.interventions or request.steering.suppress):
            self._recorder.count("requests_steered")
        if request.attribution is not None:
            self._recorder.count("requests_attributed")

    def admitted(self, life: Life, sequence: Sequence) -> None:
        """The request got a lane for the first time."""
        self._recorder.observe("request_queue_seconds", self._clock() - life.added_at)
        cached = sequence.num_cached_tokens
        self._recorder.count("prompt_tokens", cached, source="cached")
        self._recorder.count("prompt_tokens", sequence.prompt_length - cached, source="computed")
        if cached:
            self._recorder.count("prefix_hits")

    def scored(self, num_cached: int, num_computed: int, *, cache_bytes: int) -> None:
        """Positions of texts got scores, from the cache or from the device; the cache takes so many bytes now."""
        for source, number in (("cached", num_cached), ("computed", num_computed)):
            if number:
                self._recorder.count("scored_tokens", number, source=source)
        self._recorder.gauge("score_cache_bytes", cache_bytes)

    def preempted(self, number: int) -> None:
        """Sequences have lost their lanes because pages ran out."""
        if number:
            self._recorder.count("preemptions", number)

    def aborted(self) -> None:
        """A request was cancelled."""
        self._recorder.count("aborts")

    def launching(self, plan: Plan, denoised: Iterable[tuple[Life, int]]) -> None:
        """A pass is about to be given to the device. `denoised`: (life, block) of each of its denoise rows."""
        self._num_rows = len(plan.rows)
        now = self._clock()
        for life, block in denoised:
            life.begin(block, now)

    def landed(self, plan: Plan, *, device_seconds: float, wait_seconds: float, num_commits: int) -> None:
        """A pass was read. `num_commits`: those that count, of sequences that the pass still concerns."""
        recorder, num_rows = self._recorder, len(plan.rows)
        bucket = self._buckets[min(bisect_left(self._buckets, num_rows), len(self._buckets) - 1)]
        recorder.count("engine_passes")
        recorder.count("engine_commits", num_commits)
        recorder.count("engine_busy_seconds", device_seconds)
        recorder.observe("engine_rows", num_rows)
        recorder.observe("engine_pass_commits", num_commits)
        recorder.observe("engine_pass_seconds", device_seconds, rows=str(bucket))
        recorder.observe("engine_wait_seconds", wait_seconds)
        for kind, name in KIND_NAMES.items():
            if num_of_kind := sum(row.kind is kind for row in plan.rows):
                recorder.count("rows_run", num_of_kind, kind=name)

    def drafted(self, draft: Draft | None) -> None:
        """What became of a draft, if one rode in the pass."""
        if draft is not None:
            self._recorder.count("drafts")
            self._recorder.count("drafts_position_right", draft.is_position_right)
            self._recorder.count("drafts_token_right", draft.is_token_right)
            self._recorder.count("drafts_committed", draft.is_commit)

    def handed_out(self, life: Life, event: Event, now: float) -> None:
        """The caller gets the event, at `now` by the engine's clock."""
        match event:
            case Committed() if not life.has_token:
                life.has_token = True
                self._recorder.observe("request_first_token_seconds", now - life.added_at)
            case BlockFinished():
                self._block_finished(life, event.block, now)
            case Finished():
                reason = event.output.finish_reason
                self._recorder.count("requests_finished", reason=reason.value)
                if reason in (FinishReason.LENGTH, FinishReason.STOP):
                    self._recorder.observe("request_seconds", now - life.added_at)

    def _block_finished(self, life: Life, block: int, now: float) -> None:
        canvas = life.canvases.pop(block)
        self._recorder.observe("block_seconds", now - canvas.started_at, policy=life.policy)
        self._recorder.observe("block_passes", canvas.num_passes, policy=life.policy)
        if life.last_block_at is None:
            self._recorder.observe("request_first_block_seconds", now - life.added_at)
        else:
            self._recorder.observe("block_interval_seconds", now - life.last_block_at)
        life.last_block_at = now
