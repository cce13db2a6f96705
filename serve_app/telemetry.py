"""The engine's measurements as Ray Serve metrics: one table says what exists, and nothing else is exported.

Also what brings the engine's log into that of the replica.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Literal, cast

from ray.serve import metrics

logger = logging.getLogger("ray.serve")

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_ROWS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One exported number. Ray adds a prefix, `_total` to counters, and labels for application and replica."""

    kind: Literal["counter", "gauge", "histogram"]
    description: str
    unit: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Of a histogram: upper bounds, rising."""


METRICS: dict[str, Metric] = {
    "engine_passes": Metric(kind="counter", description="Forward passes.", unit="passes"),
    "engine_rows": Metric(kind="histogram", description="Rows in a pass.", unit="rows", buckets=_ROWS),
    "engine_pass_seconds": Metric(
        kind="histogram", description="Device time of a pass.", unit="seconds", buckets=_SECONDS
    ),
    "engine_wait_seconds": Metric(
        kind="histogram", description="Time that the host waited for a pass.", unit="seconds", buckets=_SECONDS
    ),
    "engine_commits": Metric(kind="counter", description="Tokens committed.", unit="tokens"),
    "drafts": Metric(kind="counter", description="Draft rows of the lossless policy.", unit="rows"),
    "drafts_position_right": Metric(
        kind="counter", description="Drafts whose expected commit came at the expected position.", unit="rows"
    ),
    "drafts_token_right": Metric(kind="counter", description="Of these, with the expected token.", unit="rows"),
    "drafts_committed": Metric(kind="counter", description="Drafts whose own commit counted.", unit="rows"),
    "pages_free": Metric(kind="gauge", description="Pages without content.", unit="pages"),
    "pages_cached": Metric(kind="gauge", description="Pages kept for prefixes to come.", unit="pages"),
    "pages_held": Metric(kind="gauge", description="Pages of running sequences.", unit="pages"),
    "lanes_in_use": Metric(kind="gauge", description="Running sequences.", unit="lanes"),
    "requests_waiting": Metric(kind="gauge", description="Requests without a lane.", unit="requests"),
    "preemptions": Metric(kind="counter", description="Sequences that gave their pages back.", unit="sequences"),
    "aborts": Metric(kind="counter", description="Requests that were cancelled.", unit="requests"),
}
PREFIX = "glassblock_"


def show_engine_log() -> None:
    """Have what the engine logs, its memory table above all, appear in the replica's log. Only inside a replica."""
    # Serve sets up its own logger and no other, so that everybody else's messages below a warning are lost.
    engine_log = logging.getLogger("engine")
    engine_log.setLevel(logging.INFO)
    for handler in logger.handlers:
        engine_log.addHandler(handler)


class ServeRecorder:
    """A Recorder (see `engine.Recorder`) that exports through Ray. Only inside a replica."""

    def __init__(self) -> None:
        self._counters: dict[str, metrics.Counter] = {}
        self._gauges: dict[str, metrics.Gauge] = {}
        self._histograms: dict[str, metrics.Histogram] = {}
        self._refused: set[str] = set()
        for name, metric in METRICS.items():
            description = f"{metric.description} Unit: {metric.unit}."
            # Ray's annotation means a tuple of any length.
            labels = cast(tuple[str], metric.labels)
            if metric.kind == "counter":
                self._counters[name] = metrics.Counter(PREFIX + name, description, labels)
            elif metric.kind == "gauge":
                self._gauges[name] = metrics.Gauge(PREFIX + name, description, labels)
            else:
                self._histograms[name] = metrics.Histogram(PREFIX + name, description, list(metric.buckets), labels)

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter. Zero adds nothing."""
        if self._accepts(name, "counter", amount, labels) and amount > 0:
            self._counters[name].inc(amount, labels)

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        if self._accepts(name, "gauge", value, labels):
            self._gauges[name].set(value, labels)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add an observation to a histogram."""
        if self._accepts(name, "histogram", value, labels):
            self._histograms[name].observe(value, labels)

    def _accepts(self, name: str, kind: str, value: float, labels: dict[str, str]) -> bool:
        """Whether the table has it so; a recorder must never raise, so what it lacks is logged, once."""
        metric = METRICS.get(name)
        if metric is not None and metric.kind == kind and set(labels) == set(metric.labels) and math.isfinite(value):
            return True
        if name not in self._refused:
            self._refused.add(name)
            logger.warning(
                "measurement %s (%s, labels %s, value %s) is not exported", name, kind, sorted(labels), value
            )
        return False
