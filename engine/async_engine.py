"""AsyncEngine: one thread around an Engine, for asyncio callers.

The thread alone touches the Engine. Callers leave commands in a queue and get events through their own asyncio
queue, so a slow reader delays nobody, and a pass never runs in an event loop.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from .analysis import Analysis, AnalysisResult
from .config import EngineConfig, ModelConfig
from .core import Engine, EngineStats
from .errors import EngineStopped
from .load import EngineLoad
from .metrics import Recorder
from .output import BlockFinished, BlockStarted, Event, Finished, Started
from .request import GenerateRequest, Head

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 30.0

T = TypeVar("T")


class _Subscription:
    """Carries one request's events from the engine's thread into its caller's event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_ready = asyncio.Event()
        self._events: list[Event] = []
        self._failure: BaseException | None = None

    def put(self, events: list[Event]) -> bool:
        """Hand over events; False if nobody is left to read them. Called in the engine's thread."""
        return self._call(lambda: self._events.extend(events))

    def fail(self, failure: BaseException) -> None:
        """Hand over what ended the request; called in the engine's thread."""

        def set_failure() -> None:
            self._failure = failure

        self._call(set_failure)

    async def get(self) -> tuple[Event, ...]:
        """All events that are ready, at least one; raises what ended the request once they are read."""
        await self._is_ready.wait()
        events, self._events = tuple(self._events), []
        if self._failure is None:
            self._is_ready.clear()
        elif not events:
            raise self._failure
        return events

    def _call(self, change: Callable[[], None]) -> bool:
        def apply() -> None:
            change()
            self._is_ready.set()

        try:
            self._loop.call_soon_threadsafe(apply)
        except RuntimeError:
            # The caller's event loop is closed, and closed without closing its generators.
            return False
        return True


@dataclass(frozen=True, slots=True)
class _Command(Generic[T]):
    """Something to do in the engine's thread, and where its result goes."""

    action: Callable[[], T]
    result: Future[T]

    def run(self) -> None:
        """Do it; an exception goes to whoever asked, never to the engine's loop."""
        if not self.result.set_running_or_notify_cancel():
            return
        try:
            self.result.set_result(self.action())
        except Exception as error:
            self.result.set_exception(error)

    def refuse(self, error: EngineStopped) -> None:
        """Answer without doing it."""
        if self.result.set_running_or_notify_cancel():
            self.result.set_exception(error)


class _LoadWatch:
    """Tells somebody the engine's load when a block or a lane changed, but no more often than each `interval_s`."""

    def __init__(self, engine: Engine, callback: Callable[[EngineLoad], None], interval_s: float) -> None:
        self._engine, self._callback, self._interval_s = engine, callback, interval_s
        self._has_news = False
        self._told_at = -interval_s

    def after_step(self, events: list[Event]) -> None:
        """Tell it, or leave it to a later step; before the engine rests everything is told."""
        boundaries = (Started, BlockStarted, BlockFinished, Finished)
        self._has_news = self._has_news or any(isinstance(event, boundaries) for event in events)
        is_due = time.monotonic() - self._told_at >= self._interval_s
        if self._has_news and (is_due or not self._engine.has_work):
            self.tell()

    def tell(self, *, with_all_prefixes: bool = False) -> None:
        """Tell it now."""
        self._has_news = False
        self._told_at = time.monotonic()
        self._callback(self._engine.load(with_all_prefixes=with_all_prefixes))


def _take_exception(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


class AsyncEngine:
    """Serves requests from any number of asyncio tasks on one Engine."""

    def __init__(self, engine: Engine, *, hang_timeout_s: float = 60.0) -> None:
        """`hang_timeout_s`: `check_health` fails when a pass takes longer."""
        self._engine = engine
        self._hang_timeout_s = hang_timeout_s
        self._commands: queue.SimpleQueue[_Command[Any]] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._is_closed = False
        self._subscriptions: dict[str, _Subscription] = {}
        self._is_stopping = threading.Event()
        self._failure: BaseException | None = None
        self._busy_since: float | None = None
        self._load_watch: _LoadWatch | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path,
        config: EngineConfig | None = None,
        *,
        recorder: Recorder | None = None,
        hang_timeout_s: float = 60.0,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Self:
        """Load a checkpoint folder, telling `progress` bytes of weights read and in all, and start the thread.

        Raises InvalidConfig or CheckpointError.
        """
        engine = Engine.from_checkpoint(path, config, recorder=recorder, progress=progress)
        return cls(engine, hang_timeout_s=hang_timeout_s)

    @property
    def model_config(self) -> ModelConfig:
        """Shape and special tokens of the loaded checkpoint."""
        return self._engine.model_config

    async def generate(self, request: GenerateRequest) -> AsyncIterator[tuple[Event, ...]]:
        """Serve one request: yields the events that are ready, never none, the last one Finished.

        Raises InvalidRequest or QueueFull before the first event, and EngineStopped if the engine ends. Closing or
        cancelling the iterator aborts the request within one engine step.
        """
        subscription = _Subscription()

        def add() -> str:
            request_id = self._engine.add_request(request)
            self._subscriptions[request_id] = subscription
            return request_id

        def leave() -> None:
            # A finished request's id may belong to another one by now.
            if adding.exception() is None and self._subscriptions.get(adding.result()) is subscription:
                self._engine.abort(adding.result())

        adding = self._submit(add)
        is_finished = False
        try:
            added = asyncio.wrap_future(adding)
            # A caller that leaves first reads no refusal, and asyncio would report it as an error that was lost.
            added.add_done_callback(_take_exception)
            await asyncio.shield(added)
            while not is_finished:
                events = await subscription.get()
                is_finished = isinstance(events[-1], Finished)
                yield events
        finally:
            # Commands run in order, so `add` is done before, also where the caller did not wait for it.
            self._submit(leave)

    def abort(self, request_id: str) -> None:
        """End a request within one engine step; unknown and finished ids are ignored."""
        self._submit(lambda: self._engine.abort(request_id))

    async def stats(self) -> EngineStats:
        """What is in use now; raises EngineStopped."""
        return await asyncio.wrap_future(self._submit(self._engine.stats))

    def watch_load(self, callback: Callable[[EngineLoad], None], *, interval_s: float = 0.02) -> None:
        """Have `callback` called with the load, all prefixes in it, now and then with what has changed.

        It is called in the engine's thread after steps in which a block or a lane changed, at most once an interval,
        and for the last time before the engine rests. It must be quick and may not raise. There is one watcher.
        """

        def watch() -> None:
            self._load_watch = _LoadWatch(self._engine, callback, interval_s)
            self._load_watch.tell(with_all_prefixes=True)

        self._submit(watch)

    def ask_load(self, *, with_all_prefixes: bool = False) -> None:
        """Have the watcher called before the next step; nothing happens once the engine has stopped."""

        def tell() -> None:
            if self._load_watch is not None:
                self._load_watch.tell(with_all_prefixes=with_all_prefixes)

        self._submit(tell)

    async def load(self) -> EngineLoad:
        """What is in use and for how long. For those who do not watch: prefixes are told to whoever asks first."""
        return await asyncio.wrap_future(self._submit(self._engine.load))

    async def concept_top_tokens(
        self, concept_id: int, k: int = 15, *, head: Head = "known"
    ) -> list[tuple[int, float]]:
        """(token id, alignment) of the tokens that a concept most promotes."""
        return await asyncio.wrap_future(
            self._submit(lambda: self._engine.concept_top_tokens(concept_id, k, head=head))
        )

    async def concept_neighbors(self, concept_id: int, k: int = 10, *, head: Head = "known") -> list[tuple[int, float]]:
        """(concept id, cosine) of the concepts of the same head that point most alike."""
        return await asyncio.wrap_future(self._submit(lambda: self._engine.concept_neighbors(concept_id, k, head=head)))

    async def analyze(self, analysis: Analysis) -> AnalysisResult:
        """Do an analysis, slice by slice between passes.

        Raises InvalidRequest, QueueFull or EngineStopped. Cancelling it ends the analysis within one slice.
        """
        beginning = self._submit(lambda: self._engine.begin_analysis(analysis))
        try:
            under_way = await asyncio.shield(asyncio.wrap_future(beginning))
        except asyncio.CancelledError:
            # Commands run in order, so it has begun by then, or was refused.
            self._submit(lambda: beginning.result().cancel())
            raise
        return await asyncio.wrap_future(under_way)

    def check_health(self) -> None:
        """Raise EngineStopped if the thread has ended or a pass hangs."""
        if self._failure is not None:
            raise EngineStopped(f"the engine's thread ended: {self._failure!r}") from self._failure
        if not self._thread.is_alive():
            raise EngineStopped("the engine's thread has ended")
        busy_since = self._busy_since
        if busy_since is not None and time.monotonic() - busy_since > self._hang_timeout_s:
            raise EngineStopped(f"a pass has run for more than {self._hang_timeout_s} s")

    def stop(self) -> None:
        """End the thread after the pass in flight; requests that still run get EngineStopped."""
        self._is_stopping.set()
        self._submit(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_STOP_TIMEOUT_S)

    def _submit(self, action: Callable[[], T]) -> Future[T]:
        """Run something in the engine's thread; its result or exception comes through the future."""
        # Not `_Command[T](...)`: that sets an attribute, which a frozen class with slots refuses.
        command: _Command[T] = _Command(action, Future())
        with self._closing:
            if not self._is_closed:
                self._commands.put(command)
                return command.result
        command.refuse(self._stopped())
        return command.result

    def _stopped(self) -> EngineStopped:
        cause = "it was stopped" if self._failure is None else f"{self._failure!r}"
        return EngineStopped(f"the engine no longer runs: {cause}")

    def _run(self) -> None:
        try:
            while not self._is_stopping.is_set():
                self._run_commands()
                if self._engine.has_work and not self._is_stopping.is_set():
                    self._busy_since = time.monotonic()
                    events = self._engine.step()
                    self._busy_since = None
                    self._deliver(events)
                    if self._load_watch is not None:
                        self._load_watch.after_step(events)
        except Exception as error:
            logger.exception("the engine's thread ended")
            self._failure = error
        finally:
            self._busy_since = None
            self._close()

    def _run_commands(self) -> None:
        """Run what has been asked; when there is nothing else to do, wait for it."""
        if not self._engine.has_work:
            self._commands.get().run()
        while not self._commands.empty():
            self._commands.get().run()

    def _deliver(self, events: list[Event]) -> None:
        by_request: dict[str, list[Event]] = {}
        for event in events:
            by_request.setdefault(event.request_id, []).append(event)
        for request_id, own in by_request.items():
            subscription = self._subscriptions.get(request_id)
            if subscription is not None and not subscription.put(own):
                self._engine.abort(request_id)
            if isinstance(own[-1], Finished):
                self._subscriptions.pop(request_id, None)

    def _close(self) -> None:
        """Answer everybody who still waits, and everybody who comes later."""
        with self._closing:
            self._is_closed = True
        error = self._stopped()
        for subscription in self._subscriptions.values():
            subscription.fail(error)
        self._subscriptions.clear()
        self._engine.end_analyses(error)
        while not self._commands.empty():
            self._commands.get().refuse(error)
