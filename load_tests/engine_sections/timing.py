"""Clocks: repeated runs under a CUDA graph, the replays of an engine's graphs, and what gets compiled.

On a GPU, time is taken by events on the stream; elsewhere by the host's clock.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch

from engine.runner.model_runner import ModelRunner
from engine.runner.pass_in_flight import PassInFlight


def device_seconds(
    work: Callable[[], object], device: torch.device, repeats: int = 15, warm_ups: int = 3
) -> list[float]:
    """Seconds of repeated runs; under a CUDA graph on a GPU, so that launches cost nothing."""
    if device.type != "cuda":
        work()
        return [_timed(work) for _ in range(repeats)]
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for _ in range(warm_ups):
        graph.replay()
    marks = []
    for _ in range(repeats):
        start, end = _event(), _event()
        start.record()
        graph.replay()
        end.record()
        marks.append((start, end))
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) / 1e3 for start, end in marks]


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class ReplayTimer:
    """Device time of CUDA graphs that are replayed while this is entered: of passes alone, or of all.

    It stands in for `CUDAGraph.replay`, so that it needs to know nothing about how an engine replays. What an
    engine launches outside graphs is not counted: device time is a little too small, idle time a little too large.
    """

    def __init__(self, device: torch.device, runner: ModelRunner | None = None) -> None:
        """With `runner`, only what its `launch` replays counts: explanations are graphs too, and no part of a pass."""
        self._device = device
        self._runner = runner
        self._is_counting = runner is None
        self._original: Any = None
        self._steps: list[list[tuple[Any, Any]]] = [[]]

    def __enter__(self) -> ReplayTimer:
        if self._device.type != "cuda":
            return self
        original = torch.cuda.CUDAGraph.replay
        steps = self._steps

        def replay(graph: torch.cuda.CUDAGraph) -> None:
            if not self._is_counting:
                original(graph)
                return
            start, end = _event(), _event()
            start.record()
            original(graph)
            end.record()
            steps[-1].append((start, end))

        self._original = original
        torch.cuda.CUDAGraph.replay = replay  # type: ignore[assignment,method-assign]
        if self._runner is not None:
            self._count_launches(self._runner)
        return self

    def _count_launches(self, runner: ModelRunner) -> None:
        launch = runner.launch

        def counted(*arguments: Any) -> PassInFlight:
            self._is_counting = True
            try:
                return launch(*arguments)
            finally:
                self._is_counting = False

        runner.launch = counted  # type: ignore[method-assign]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._original is not None:
            torch.cuda.CUDAGraph.replay = self._original  # type: ignore[method-assign]
            if self._runner is not None:
                # What stood in for the method; the class still has it.
                del self._runner.launch
            torch.cuda.synchronize(self._device)

    def next_step(self) -> None:
        """What is replayed from now on belongs to another step."""
        self._steps.append([])

    def seconds(self) -> list[float]:
        """Device seconds of each step that replayed anything. Call it after leaving."""
        return [sum(start.elapsed_time(end) for start, end in step) / 1e3 for step in self._steps if step]


class CompileCounter:
    """Counts kernels and graphs that are compiled in this process, outside of `expected`.

    A Triton kernel counts when a call finds no variant for its arguments in memory, whether or not the cache on disk
    has one; a graph when torch.compile traces it, and so does each of its graph breaks.
    """

    def __init__(self) -> None:
        self._num_kernels = 0
        self._num_expected = 0
        self._knobs: Any = None
        self._previous: Any = None
        if importlib.util.find_spec("triton") is not None:
            self._install()

    @property
    def count(self) -> int:
        """Compilations so far that nobody expected."""
        return self._total() - self._num_expected

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Compilations in here do not count: an engine warms up, or another library runs."""
        before = self._total()
        try:
            yield
        finally:
            self._num_expected += self._total() - before

    def close(self) -> None:
        """Take the hook away again."""
        if self._knobs is not None:
            self._knobs.runtime.jit_post_compile_hook = self._previous

    def _install(self) -> None:
        try:
            knobs = importlib.import_module("triton.knobs")
            previous = knobs.runtime.jit_post_compile_hook
        except (ImportError, AttributeError):
            return  # an older Triton, without the hook

        def hook(*args: Any, **kwargs: Any) -> Any:
            self._num_kernels += 1
            return previous(*args, **kwargs) if previous else None

        self._knobs, self._previous = knobs, previous
        knobs.runtime.jit_post_compile_hook = hook

    def _total(self) -> int:
        """Compilations of any kind, expected or not."""
        # Imported by whoever compiles; importing it here would only cost time.
        dynamo = sys.modules.get("torch._dynamo.utils")
        if dynamo is None:
            return self._num_kernels
        graphs, breaks = dynamo.counters["stats"]["unique_graphs"], dynamo.counters["graph_break"]
        return self._num_kernels + int(graphs) + int(sum(breaks.values()))
