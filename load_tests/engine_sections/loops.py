"""Loops that send requests: one block side by side, closed loop, open loop.

Nothing but `Engine.add_request`, `step` and the events is used. A step may return no events, and a pass's events may
come with a later step.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from engine import BlockFinished, BlockStarted, Committed, Engine, Event, Finished, GenerateRequest, SamplingParams

from .load import WrongOutput, check
from .timing import ReplayTimer

SKIPPED_STEPS = 3
"""At both ends of a block: requests arrive, and leave."""


@dataclass(frozen=True)
class Block:
    """One block of several requests that began it together."""

    step_s: list[float]
    """Seconds of the single engine steps, those at both ends left out."""
    device_s: list[float]
    """Seconds of the graphs that the same steps replayed; empty where there are none."""
    whole_s: float
    """Seconds of a step averaged over the whole block, whatever happened in it."""

    @property
    def has_device(self) -> bool:
        """True where device time could be measured."""
        return bool(self.device_s)


def step(engine: Engine) -> list[Event]:
    """One engine step on behalf of requests that have not ended."""
    if not engine.has_work:
        raise WrongOutput("requests have not ended, and the engine has nothing left to do")
    return engine.step()


def drain(engine: Engine) -> None:
    """Let a pass end that was launched before its requests were known to have ended."""
    while engine.has_work:
        engine.step()


def seal_prompts(engine: Engine, requests: Iterable[GenerateRequest]) -> None:
    """Leave the prompts' pages in the prefix index, so that requests with them begin in the same pass."""
    engine.generate(
        replace(request, max_tokens=1, steering=None, attribution=None, sampling=SamplingParams(seed=0))
        for request in requests
    )


def run_block(engine: Engine, requests: Sequence[GenerateRequest], timer: ReplayTimer) -> Block:
    """Run requests to their end and time every step."""
    asked = {engine.add_request(request): request for request in requests}
    step_s: list[float] = []
    # Writing lanes belongs to arriving, not to a pass.
    step(engine)
    with timer:
        started = time.perf_counter()
        while asked:
            timer.next_step()
            step_started = time.perf_counter()
            events = step(engine)
            step_s.append(time.perf_counter() - step_started)
            for event in events:
                if isinstance(event, Finished):
                    check(event.output, asked.pop(event.request_id))
        whole_s = (time.perf_counter() - started) / len(step_s)
    drain(engine)
    return Block(_middle(step_s), _middle(timer.seconds()), whole_s)


def _middle(values: list[float]) -> list[float]:
    """Without both ends, where that leaves something."""
    return values[SKIPPED_STEPS:-SKIPPED_STEPS] or values


@dataclass
class Served:
    """What clients saw, in seconds."""

    first_block_s: list[float] = field(default_factory=list)
    between_blocks_s: list[float] = field(default_factory=list)
    last_block_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    num_requests: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    device_s: float | None = None
    """Seconds that the GPU spent in graphs; None where that is not known."""
    full_tokens: int = 0
    """Tokens committed while as many requests ran as could."""
    full_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """While all clients had a request running, or over all where that never was."""
        if self.full_s > 0 and self.full_tokens:
            return self.full_tokens / self.full_s
        return self.num_tokens / self.seconds

    @property
    def idle_share(self) -> float | None:
        """Share of the time in which the GPU ran no graph."""
        return None if self.device_s is None else max(0.0, 1 - self.device_s / self.seconds)


@dataclass
class _Running:
    request: GenerateRequest
    arrived: float
    last_block: float | None = None


class Driver:
    """Steps an engine and notes what its requests see."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.served = Served()
        self.running: dict[str, _Running] = {}

    def send(self, request: GenerateRequest, arrived: float | None = None) -> str:
        """Add a request that arrived now, or before."""
        request_id = self.engine.add_request(request)
        self.running[request_id] = _Running(request, time.perf_counter() if arrived is None else arrived)
        return request_id

    def step(self) -> list[Event]:
        """One engine step; returns its events."""
        started = time.perf_counter()
        events = step(self.engine)
        now = time.perf_counter()
        self.served.step_s.append(now - started)
        for event in events:
            self._take(event, now)
        return events

    def _take(self, event: Event, now: float) -> None:
        item, served = self.running[event.request_id], self.served
        if isinstance(event, BlockFinished):
            if item.last_block is None:
                served.first_block_s.append(now - item.arrived)
            else:
                served.between_blocks_s.append(now - item.last_block)
            item.last_block = now
        elif isinstance(event, Finished):
            check(event.output, item.request)
            served.last_block_s.append(now - item.arrived)
            served.num_requests += 1
            served.num_tokens += len(event.output.commits)
            del self.running[event.request_id]


def closed_loop(engine: Engine, requests: Sequence[GenerateRequest], clients: int, timer: ReplayTimer) -> Served:
    """Each client sends its next request when its last one has ended."""
    waiting, driver = list(reversed(requests)), Driver(engine)
    with timer:
        started = time.perf_counter()
        while waiting or driver.running:
            while waiting and len(driver.running) < clients:
                driver.send(waiting.pop())
            is_full = len(driver.running) == clients
            step_started = time.perf_counter()
            events = driver.step()
            if is_full:
                driver.served.full_s += time.perf_counter() - step_started
                driver.served.full_tokens += sum(len(e.commits) for e in events if isinstance(e, Committed))
        driver.served.seconds = time.perf_counter() - started
    return _ended(driver, timer)


def open_loop(
    engine: Engine,
    requests: Sequence[GenerateRequest],
    requests_per_s: float,
    timer: ReplayTimer,
    sleep: Callable[[float], None] = time.sleep,
) -> Served:
    """Requests arrive at random moments of a constant rate, whatever the engine does (a Poisson process, seeded)."""
    drawn, due, arrivals = random.Random(0), 0.0, []
    for request in requests:
        due += drawn.expovariate(requests_per_s)
        arrivals.append((due, request))
    arrivals.reverse()
    driver = Driver(engine)
    with timer:
        started = time.perf_counter()
        while arrivals or driver.running:
            now = time.perf_counter() - started
            while arrivals and arrivals[-1][0] <= now:
                due, request = arrivals.pop()
                driver.send(request, started + due)
            if driver.running:
                driver.step()
            else:
                sleep(max(0.0, arrivals[-1][0] - now))
        driver.served.seconds = time.perf_counter() - started
    return _ended(driver, timer)


def seconds_to_canvas(engine: Engine, requests: Sequence[GenerateRequest]) -> float:
    """Seconds until every request has begun its first canvas: its prompt is in the pages."""
    driver, seconds = Driver(engine), 0.0
    started = time.perf_counter()
    begun = 0
    for request in requests:
        driver.send(request)
    while driver.running:
        # A short text may begin and end in one step.
        begun += sum(isinstance(event, BlockStarted) for event in driver.step())
        if begun >= len(requests) and not seconds:
            seconds = time.perf_counter() - started
    drain(engine)
    return seconds


def _ended(driver: Driver, timer: ReplayTimer) -> Served:
    drain(driver.engine)
    served = driver.served
    device_s = timer.seconds()
    served.device_s = sum(device_s) if device_s else None
    return served
