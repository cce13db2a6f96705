"""Engines that replicas are given instead of a checkpoint's: one that only keeps time, one with random weights.

Each maker is called as `AsyncEngine.from_checkpoint` is, after its own options, in the replica's process.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from engine import (
    Analysis,
    AnalysisResult,
    AsyncEngine,
    BlockFinished,
    BlockStarted,
    Commit,
    Committed,
    Engine,
    EngineConfig,
    EngineLoad,
    EngineStats,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    InvalidRequest,
    ModelConfig,
    Output,
    PrefixChanges,
    Recorder,
    RunningLoad,
    Started,
    check_request,
)

from ..engine_sections.bench import random_model
from .description import number_token

NUM_LANES, NUM_PAGES = 256, 65536
LEAST_PASS_S = 1e-4
"""What a step that takes no time is said to take."""


@dataclass(slots=True)
class _Sequence:
    request: GenerateRequest
    request_id: str
    commits: list[Commit] = field(default_factory=list)
    is_started: bool = False

    @property
    def start(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def position(self) -> int:
        """The next one that is committed."""
        return self.start + len(self.commits)

    @property
    def end(self) -> int:
        return self.start + self.request.max_tokens


class PacedEngine:
    """What AsyncEngine needs of an Engine: each step takes `step_s` and commits one token of every request.

    The token's text is the moment at which it was committed, in milliseconds of `clock`. Positions fill from the left.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        *,
        step_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.model_config = model_config
        self._step_s, self._clock, self._sleep = step_s, clock, sleep
        self._due = 0.0
        self._sequences: dict[str, _Sequence] = {}
        self._numbers = itertools.count()

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def add_request(self, request: GenerateRequest) -> str:
        """Take a request; raises InvalidRequest."""
        check_request(request, self.model_config)
        request_id = request.request_id or f"paced-{next(self._numbers)}"
        self._sequences[request_id] = _Sequence(request, request_id)
        return request_id

    def abort(self, request_id: str) -> None:
        """Forget a request."""
        self._sequences.pop(request_id, None)

    def step(self) -> list[Event]:
        """Sleep until the step is over, and commit."""
        if (wait := self._due - self._clock()) > 0:
            self._sleep(wait)
        now = self._clock()
        if now - self._due > self._step_s:
            # So late that the steps to come would all be too short.
            self._due = now
        self._due += self._step_s
        token_id = number_token(round(now * 1000))
        events: list[Event] = []
        for sequence in list(self._sequences.values()):
            self._advance(sequence, token_id, events)
        return events

    def stats(self) -> EngineStats:
        running = len(self._sequences)
        return EngineStats(
            num_waiting=0,
            num_running=running,
            num_lanes=NUM_LANES,
            num_lanes_in_use=running,
            num_pages=NUM_PAGES,
            pages_free=NUM_PAGES - running,
            pages_cached=0,
            pages_held=running,
        )

    def load(self, *, with_all_prefixes: bool = False) -> EngineLoad:
        """Room for everybody, and when each request's block will be full."""
        size = self.model_config.diff_block_size
        running = tuple(
            RunningLoad(
                request_id=sequence.request_id,
                num_steps_left=min(size - sequence.position % size, sequence.end - sequence.position),
                num_blocks_left=(sequence.end - 1) // size - sequence.position // size,
                num_pages=1,
            )
            for sequence in self._sequences.values()
        )
        return EngineLoad(
            num_lanes=NUM_LANES,
            num_lanes_free=NUM_LANES - len(running),
            num_pages=NUM_PAGES,
            num_pages_free=NUM_PAGES - len(running),
            num_waiting=0,
            num_lanes_waiting=0,
            running=running,
            pass_seconds=((1, max(self._step_s, LEAST_PASS_S)),),
            prefixes=PrefixChanges(is_everything=with_all_prefixes),
        )

    def concept_top_tokens(self, concept_id: int, k: int, *, head: str) -> list[tuple[int, float]]:
        """None: it has no concepts."""
        return []

    def concept_neighbors(self, concept_id: int, k: int, *, head: str) -> list[tuple[int, float]]:
        """None: it has no concepts."""
        return []

    def begin_analysis(self, analysis: Analysis) -> Future[AnalysisResult]:
        """Refused with InvalidRequest: there is nothing to analyze."""
        raise InvalidRequest(f"an engine that only keeps time has no model for {type(analysis).__name__}")

    def end_analyses(self, error: Exception) -> None:
        """There are none."""

    def _advance(self, sequence: _Sequence, token_id: int, events: list[Event]) -> None:
        size, name = self.model_config.diff_block_size, sequence.request_id
        if not sequence.is_started:
            sequence.is_started = True
            seed, start = sequence.request.sampling.seed or 0, sequence.start
            events += [Started(name, seed, size, start, start % size, 0, ()), self._block_started(sequence)]
        position = sequence.position
        block = position // size
        commit = Commit(position, token_id, len(sequence.commits), 0.9, 5.0, -0.25)
        sequence.commits.append(commit)
        events.append(Committed(name, block, (commit,)))
        is_end = sequence.position == sequence.end
        if is_end or sequence.position % size == 0:
            events.append(BlockFinished(name, block, max(block * size, sequence.start), sequence.position))
            events.append(Finished(name, self._output(sequence)) if is_end else self._block_started(sequence))
        if is_end:
            del self._sequences[name]

    def _block_started(self, sequence: _Sequence) -> BlockStarted:
        size, first = self.model_config.diff_block_size, sequence.position
        return BlockStarted(sequence.request_id, first // size, first, min(first // size * size + size, sequence.end))

    def _output(self, sequence: _Sequence) -> Output:
        size, num_commits = self.model_config.diff_block_size, len(sequence.commits)
        return Output(
            request_id=sequence.request_id,
            token_ids=tuple(commit.token_id for commit in sequence.commits),
            finish_reason=FinishReason.LENGTH,
            commits=tuple(sequence.commits),
            num_forward_passes=num_commits,
            num_denoising_steps=num_commits,
            num_blocks=(sequence.end - 1) // size - sequence.start // size + 1,
            num_prompt_tokens=sequence.start,
            num_cached_tokens=0,
            num_preemptions=0,
            seed=sequence.request.sampling.seed or 0,
            steering=(),
        )


def paced_engine(step_s: float, path: str | Path, config: object = None, *, recorder: object = None) -> AsyncEngine:
    """The engine that only keeps time, on the shape that the folder describes."""
    return AsyncEngine(cast(Engine, PacedEngine(ModelConfig.from_json(path), step_s=step_s)))


def random_engine(path: str | Path, config: EngineConfig, *, recorder: Recorder | None = None) -> AsyncEngine:
    """An engine of the shape that the folder describes, its random weights made on its own device."""
    torch.set_grad_enabled(False)
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = random_model(ModelConfig.from_json(path), device, dtype)
    # A pass that waits for its turn on a crowded machine is not a hung one.
    return AsyncEngine(Engine(model, config, recorder=recorder), hang_timeout_s=300.0)


MAKERS: dict[str, Callable[..., Any]] = {"paced": paced_engine, "random": random_engine}
