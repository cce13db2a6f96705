"""The recorder interface: what the engine counts, without saying where the numbers go."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger(__name__)


class Recorder(Protocol):
    """Takes measurements. Implementations must be cheap; what they raise is logged once and costs no request."""

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter."""

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add an observation to a histogram."""


class NullRecorder:
    """Records nothing."""

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Ignore it."""

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Ignore it."""

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Ignore it."""


class GuardedRecorder:
    """Passes measurements on to a recorder and outlives its failures."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._has_failed = False

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        self._pass_on(lambda: self._recorder.count(name, amount, **labels))

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        self._pass_on(lambda: self._recorder.gauge(name, value, **labels))

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add an observation to a histogram."""
        self._pass_on(lambda: self._recorder.observe(name, value, **labels))

    def _pass_on(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            # Foreign code: a metrics back end that is down must not end the engine's thread.
            if not self._has_failed:
                self._has_failed = True
                logger.exception("the recorder failed; measurements are lost, requests go on")
