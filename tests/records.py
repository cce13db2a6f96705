"""A recorder that keeps what it is given, and a clock that goes when it is told to."""

from __future__ import annotations

from collections import defaultdict


class Clock:
    """Seconds that only the test moves."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Records:
    """A Recorder. Keys are a name, and its labels' values where it has some: `("block_seconds", "confidence")`."""

    def __init__(self) -> None:
        self.counts: dict[object, float] = defaultdict(float)
        self.gauges: dict[object, float] = {}
        self.observed: dict[object, list[float]] = defaultdict(list)
        self.kinds: dict[str, set[tuple[str, tuple[str, ...]]]] = defaultdict(set)
        """Name -> (kind, names of labels) of every call."""

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        self.counts[self._key("counter", name, labels)] += amount

    def gauge(self, name: str, value: float, **labels: str) -> None:
        self.gauges[self._key("gauge", name, labels)] = value

    def observe(self, name: str, value: float, **labels: str) -> None:
        self.observed[self._key("histogram", name, labels)].append(value)

    def _key(self, kind: str, name: str, labels: dict[str, str]) -> object:
        self.kinds[name].add((kind, tuple(labels)))
        return (name, *labels.values()) if labels else name
