"""What the engine's requests have still to be told: events in order, and commits that wait for their attribution.

Knows what was asked and committed, and explanations in flight. Must not know plans, passes, lanes or the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from .decoding.steering import SteeringPlan
from .errors import NonFiniteLogits
from .lifecycle import Life, Measurements
from .output import Commit, Committed, Event, Finished, FinishReason, Output
from .request import GenerateRequest
from .runner.explaining import ExplanationInFlight, KeptCommit
from .runner.model_runner import ModelRunner
from .scheduling import Sequence


@dataclass(slots=True, eq=False)
class Entry:
    """One request in the engine: what was asked, what it became, what was committed so far."""

    request: GenerateRequest
    sequence: Sequence
    seed: int
    steering: SteeringPlan
    life: Life
    is_announced: bool = False
    """Its Started event has been made."""
    commits: list[Commit] = field(default_factory=list)
    """Those that were handed out."""
    unexplained: list[tuple[Commit, KeptCommit]] = field(default_factory=list)
    """Those that wait for attribution; all of one block."""
    unexplained_since: float = 0.0
    """When the engine learned of the oldest of them, by its clock."""

    @property
    def id(self) -> str:
        """The request's id."""
        return self.sequence.id

    @property
    def attribution_top_k(self) -> int | None:
        """Concepts that a commit returns per head; None: all that the heads report."""
        assert self.request.attribution is not None, f"{self.id} asked for no attribution"
        return self.request.attribution.top_k


@dataclass(slots=True, eq=False)
class _LateCommits:
    """Stands among the events where commits will, once they are explained."""

    entry: Entry
    commits: list[Commit]
    is_explained: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Ending:
    """Stands among the events where Finished will, once nothing before it is late."""

    entry: Entry
    reason: FinishReason
    error: str | None


class Outbox:
    """Events that are not handed out yet. What comes behind late commits of its request waits with them."""

    def __init__(
        self, entries: dict[str, Entry], runner: ModelRunner, measured: Measurements, clock: Callable[[], float]
    ) -> None:
        """`entries` are the engine's requests by id. One leaves them when its Finished event is handed out."""
        self._entries = entries
        self._runner = runner
        self._measured = measured
        self._clock = clock
        self._events: list[Event | _LateCommits | _Ending] = []
        self._explaining: list[tuple[ExplanationInFlight, list[_LateCommits]]] = []

    @property
    def num_explaining(self) -> int:
        """Explanations that the device has been asked for and that were not read."""
        return len(self._explaining)

    def add(self, event: Event) -> None:
        """Hand an event out next."""
        self._events.append(event)

    def add_commits(self, entry: Entry, commits: list[Commit]) -> None:
        """Hand commits of one block out next, as they are."""
        self._events.append(_committed(entry, commits))

    def finish(self, entry: Entry, reason: FinishReason) -> None:
        """Hand the request's output out once everything before it is."""
        error = _describe_failure(entry.sequence) if reason is FinishReason.ERROR else None
        self._events.append(_Ending(entry, reason, error))

    def explain(self, entries: list[Entry]) -> None:
        """Have all that these entries have waiting explained, in one call; the commits are handed out with that."""
        waiting = [entry for entry in entries if entry.unexplained]
        if not waiting:
            return
        kept = [item for entry in waiting for _, item in entry.unexplained]
        top_k = [entry.attribution_top_k for entry in waiting for _ in entry.unexplained]
        late = [_LateCommits(entry, [commit for commit, _ in entry.unexplained]) for entry in waiting]
        self._events += late
        for entry in waiting:
            entry.unexplained = []
        try:
            self._explaining.append((self._runner.explain(kept, top_k), late))
        except BaseException:
            # Their lanes go on, so nobody can explain them later. They are handed out as they are.
            for commits in late:
                commits.is_explained = True
            raise

    def take_explanations(self, number: int) -> None:
        """Wait for the first explanations that have been asked for."""
        for _ in range(number):
            explanation, late_commits = self._explaining[0]
            attributions = iter(explanation.read())
            # Not before: an interrupt while the host waits must lose no explanation.
            del self._explaining[0]
            for late in late_commits:
                late.commits = [replace(commit, attribution=next(attributions)) for commit in late.commits]
                late.is_explained = True

    def take_events(self) -> list[Event]:
        """The events that are ready, each request's in order."""
        ready: list[Event] = []
        waiting: list[Event | _LateCommits | _Ending] = []
        blocked: set[str] = set()
        now = self._clock()
        for event in self._events:
            request_id = _request_id(event)
            if request_id in blocked or (isinstance(event, _LateCommits) and not event.is_explained):
                blocked.add(request_id)
                waiting.append(event)
                continue
            entry = self._entries[request_id]
            if isinstance(event, _LateCommits):
                event = _committed(entry, event.commits)
            elif isinstance(event, _Ending):
                event = _finished(event)
                del self._entries[request_id]
            self._measured.handed_out(entry.life, event, now)
            ready.append(event)
        self._events = waiting
        return ready

    def discard(self, request_ids: Collection[str]) -> None:
        """Drop requests and what they have not been told: no event speaks of them any more."""
        for request_id in request_ids:
            self._entries.pop(request_id, None)
        self._events = [event for event in self._events if _request_id(event) not in request_ids]


def _describe_failure(sequence: Sequence) -> str:
    canvas = sequence.canvas_range(sequence.block)
    return (
        f"{NonFiniteLogits.__name__}: the model gave no finite logits for a masked position in "
        f"[{canvas.start}, {canvas.stop}); check the checkpoint, "
        "and that strengths and logit_bias leave some token to choose"
    )


def _request_id(event: Event | _LateCommits | _Ending) -> str:
    return event.entry.id if isinstance(event, _LateCommits | _Ending) else event.request_id


def _committed(entry: Entry, commits: list[Commit]) -> Committed:
    """Hand commits of one block out."""
    entry.commits += commits
    return Committed(entry.id, commits[0].position // entry.sequence.block_size, tuple(commits))


def _finished(ending: _Ending) -> Finished:
    entry, sequence = ending.entry, ending.entry.sequence
    output = Output(
        request_id=entry.id,
        token_ids=tuple(sequence.text_token_ids),
        finish_reason=ending.reason,
        commits=tuple(entry.commits),
        num_forward_passes=sequence.num_forward_passes,
        num_denoising_steps=sequence.num_denoising_steps,
        num_blocks=sequence.num_blocks,
        num_prompt_tokens=sequence.prompt_length,
        num_cached_tokens=sequence.num_cached_tokens,
        num_preemptions=sequence.num_preemptions,
        seed=entry.seed,
        steering=entry.steering.resolved,
        error=ending.error,
    )
    return Finished(entry.id, output)
