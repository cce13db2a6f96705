"""What a run found: sections of tables of named figures, and the one line that tells how far it is.

A figure's name ends in its unit (`step_ms`, `idle_share`), so that the JSON line needs no legend. A figure with a
spread is three: `step_ms` is the median, `step_ms_low` and `step_ms_high` are the 10th and 90th percentiles.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

Figure = str | int | float | None
Row = dict[str, Figure]


class NotAvailable(Exception):
    """What a section measures does not exist here: its figures are left out, and that is no failure."""


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, linear between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def median(values: Sequence[float]) -> float:
    """The middle value."""
    return percentile(values, 0.5)


def with_spread(name: str, values: Sequence[float], scale: float = 1.0) -> Row:
    """Median, 10th and 90th percentile of measured values times `scale`; one value has no spread."""
    if not values:
        return {name: None}
    if len(values) == 1:
        return {name: values[0] * scale}
    return {
        name: median(values) * scale,
        f"{name}_low": percentile(values, 0.1) * scale,
        f"{name}_high": percentile(values, 0.9) * scale,
    }


def tail(name: str, values: Sequence[float]) -> Row:
    """p50 and p95 of seconds, in milliseconds."""
    return {
        f"{name}_p50_ms": 1e3 * percentile(values, 0.5) if values else None,
        f"{name}_p95_ms": 1e3 * percentile(values, 0.95) if values else None,
    }


LEAST_INTERVAL_S = 5.0
"""Between two lines of one section in a file."""


class Progress:
    """One line on a terminal that is rewritten; elsewhere a line at each section's start and every few seconds."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._started = clock()
        self._last = ("", 0.0)
        """The section and the moment of the last line that was written."""

    def show(self, section: str, text: str) -> None:
        """Say what is being measured now."""
        now = self._clock()
        elapsed = int(now - self._started)
        line = f"[{elapsed // 60:3d}:{elapsed % 60:02d}] {section:<13} {text}"
        if self._stream.isatty():
            self._stream.write(f"\r\x1b[2K{line[:118]}")
        elif self._last[0] != section or now - self._last[1] >= LEAST_INTERVAL_S:
            self._stream.write(line + "\n")
            self._last = (section, now)
        self._stream.flush()

    def clear(self) -> None:
        """Leave an empty line for what comes next."""
        if self._stream.isatty():
            self._stream.write("\r\x1b[2K")
            self._stream.flush()


@dataclass
class Section:
    """The figures of one section."""

    name: str
    progress: Progress = field(default_factory=Progress)
    tables: list[dict[str, Any]] = field(default_factory=list)
    """Each a name and its rows."""
    notes: list[str] = field(default_factory=list)
    status: str = "ok"
    """ok, skipped or failed."""
    reason: str = ""
    """Why it was skipped or how it failed."""
    took_s: float = 0.0
    recompilations: int = 0
    """Kernels and graphs that were compiled after an engine said that it was ready."""

    def say(self, text: str) -> None:
        """Show what is being measured now."""
        self.progress.show(self.name, text)

    def add(self, table: str, **figures: Figure) -> None:
        """Add a row to a table; figures keep their order."""
        for known in self.tables:
            if known["name"] == table:
                break
        else:
            known = {"name": table, "rows": []}
            self.tables.append(known)
        known["rows"].append({key: _rounded(value) for key, value in figures.items()})

    def note(self, text: str) -> None:
        """Add a sentence that readers of the figures need; once."""
        if text not in self.notes:
            self.notes.append(text)

    def as_json(self) -> dict[str, Any]:
        """What goes into the JSON line."""
        return {
            "status": self.status,
            **({"reason": self.reason} if self.reason else {}),
            "took_s": round(self.took_s, 1),
            "recompilations": self.recompilations,
            "tables": self.tables,
            "notes": self.notes,
        }


def _rounded(value: Figure) -> Figure:
    """Six significant digits: more were never measured."""
    return float(f"{value:.6g}") if isinstance(value, float) else value
