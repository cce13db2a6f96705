"""The recorder interface: what the engine counts, without saying where the numbers go."""

from __future__ import annotations

from typing import Protocol


class Recorder(Protocol):
    """Takes measurements. Implementations must be cheap and must not raise."""

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
