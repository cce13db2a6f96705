"""Analyses that are under way, a slice of each in turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from concurrent.futures import Future
from typing import Any

from ..errors import QueueFull


class AnalysisDesk:
    """Takes turns between analyses, so that a long one holds up neither the others nor the passes between slices."""

    def __init__(self, max_waiting: int) -> None:
        """`max_waiting`: analyses at once before another is refused."""
        self._max_waiting = max_waiting
        self._under_way: deque[tuple[Generator[None, None, Any], Future[Any]]] = deque()

    @property
    def has_work(self) -> bool:
        """True while some analysis has slices left."""
        return bool(self._under_way)

    def check_room(self) -> None:
        """Raise QueueFull if no other may be added."""
        if len(self._under_way) >= self._max_waiting:
            raise QueueFull(
                f"{len(self._under_way)} analyses are under way and max_analyses is {self._max_waiting}; "
                "try again when some are done, or raise max_analyses"
            )

    def add(self, slices: Generator[None, None, Any]) -> Future[Any]:
        """Take an analysis on. Its result, or what it raises, comes through the future; cancelling that ends it."""
        self.check_room()
        result: Future[Any] = Future()
        self._under_way.append((slices, result))
        return result

    def advance(self) -> None:
        """Do one slice of the analysis whose turn it is. Its errors are its own."""
        if not self._under_way:
            return
        slices, result = self._under_way.popleft()
        if result.cancelled():
            slices.close()
            return
        try:
            next(slices)
        except StopIteration as done:
            _settle(result, done.value, None)
        except Exception as error:
            _settle(result, None, error)
        else:
            self._under_way.append((slices, result))

    def close(self, error: Exception) -> None:
        """End all of them with an error."""
        while self._under_way:
            slices, result = self._under_way.popleft()
            slices.close()
            _settle(result, None, error)


def _settle(result: Future[Any], value: Any, error: Exception | None) -> None:
    # Whoever asked may have left in the meantime.
    if not result.set_running_or_notify_cancel():
        return
    if error is None:
        result.set_result(value)
    else:
        result.set_exception(error)
