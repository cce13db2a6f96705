"""Measurements as Ray Serve metrics: `metrics_table` says what exists, and nothing else is exported.

Also what brings the engine's log into that of the replica, and keeps noise out of it.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import cast

from ray.serve import metrics

from .metrics_table import METRICS, PREFIX, is_exported

logger = logging.getLogger("ray.serve")


def show_engine_log() -> None:
    """Have what the engine logs, its memory table above all, appear in the replica's log. Only inside a replica."""
    # Serve sets up its own logger and no other, so that everybody else's messages below a warning are lost.
    engine_log = logging.getLogger("engine")
    engine_log.setLevel(logging.INFO)
    for handler in logger.handlers:
        engine_log.addHandler(handler)


def hide_calls_of(method: str) -> None:
    """Keep calls of `method` that went well out of the replica's access log. Only inside a replica."""

    def is_wanted(record: logging.LogRecord) -> bool:
        return not (hasattr(record, "serve_access_log") and record.getMessage().startswith(f"CALL {method} OK"))

    logger.addFilter(is_wanted)


class ServeRecorder:
    """A Recorder (see `engine.Recorder`) that exports through Ray. Only inside a replica.

    Ray drops a gauge that was not set since its last report, so those of an idle engine would vanish: a thread sets
    each of them again every `refresh_interval_s` until the recorder is gone. A dead replica's vanish all the same.
    """

    def __init__(self, *, refresh_interval_s: float = 1.0) -> None:
        """`refresh_interval_s`: well below Ray's reports, which are a second apart at the fastest; 0: no thread."""
        self._counters: dict[str, metrics.Counter] = {}
        self._gauges: dict[str, metrics.Gauge] = {}
        self._histograms: dict[str, metrics.Histogram] = {}
        self._refused: set[str] = set()
        self._setting = threading.Lock()
        self._last_values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
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
        if refresh_interval_s > 0:
            arguments = (weakref.ref(self), refresh_interval_s)
            threading.Thread(target=_keep_fresh, args=arguments, name="gauges", daemon=True).start()

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter. Zero adds nothing."""
        if self._accepts(name, "counter", amount, labels) and amount > 0:
            self._counters[name].inc(amount, labels)

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        if self._accepts(name, "gauge", value, labels):
            with self._setting:
                self._gauges[name].set(value, labels)
                self._last_values[name, tuple(labels.items())] = value

    def refresh(self) -> None:
        """Set every gauge again to what it was set to last."""
        with self._setting:
            for (name, labels), value in self._last_values.items():
                self._gauges[name].set(value, dict(labels))

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add an observation to a histogram."""
        if self._accepts(name, "histogram", value, labels):
            self._histograms[name].observe(value, labels)

    def _accepts(self, name: str, kind: str, value: float, labels: dict[str, str]) -> bool:
        """Whether the table has it so; a recorder must never raise, so what it lacks is logged, once."""
        if is_exported(name, kind, value, labels):
            return True
        if name not in self._refused:
            self._refused.add(name)
            logger.warning(
                "measurement %s (%s, labels %s, value %s) is not exported", name, kind, sorted(labels), value
            )
        return False


def _keep_fresh(recorder: weakref.ref[ServeRecorder], interval_s: float) -> None:
    """Refresh a recorder's gauges for as long as somebody else holds it."""
    pause = threading.Event()
    while (alive := recorder()) is not None:
        alive.refresh()
        del alive
        pause.wait(interval_s)
