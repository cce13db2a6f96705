"""What one ingress process measured, as text for Prometheus.

Ray exports the same measurements, those of all processes of a node on one port; this is for whoever reaches only HTTP.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder

from engine import Recorder

from .metrics_table import INGRESS_METRICS, PREFIX, is_exported


class PrometheusRecorder:
    """A Recorder that keeps what an ingress measures; anything else is not its own and passes by."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for name, metric in INGRESS_METRICS.items():
            description = f"{metric.description} Unit: {metric.unit}."
            if metric.kind == "counter":
                self._counters[name] = Counter(PREFIX + name, description, metric.labels, registry=self._registry)
            elif metric.kind == "gauge":
                self._gauges[name] = Gauge(PREFIX + name, description, metric.labels, registry=self._registry)
            else:
                self._histograms[name] = Histogram(
                    PREFIX + name, description, metric.labels, registry=self._registry, buckets=metric.buckets
                )
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        if name in self._counters and is_exported(name, "counter", amount, labels) and amount > 0:
            (self._counters[name].labels(**labels) if labels else self._counters[name]).inc(amount)

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        if name in self._gauges and is_exported(name, "gauge", value, labels):
            (self._gauges[name].labels(**labels) if labels else self._gauges[name]).set(value)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add an observation to a histogram."""
        if name in self._histograms and is_exported(name, "histogram", value, labels):
            (self._histograms[name].labels(**labels) if labels else self._histograms[name]).observe(value)

    def value(self, name: str) -> float:
        """What a gauge without labels was set to last; 0 before."""
        return self._registry.get_sample_value(PREFIX + name) or 0.0

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The text and its media type, in the form that an `accept` header asks for."""
        encode, media_type = choose_encoder(accept)
        return encode(self._registry), media_type


class TeeRecorder:
    """A Recorder that hands each measurement to several, so that one measurement feeds every export."""

    def __init__(self, *recorders: Recorder) -> None:
        self._recorders = recorders

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        for each in self._recorders:
            each.count(name, amount, **labels)

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        for each in self._recorders:
            each.gauge(name, value, **labels)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add an observation to a histogram."""
        for each in self._recorders:
            each.observe(name, value, **labels)
