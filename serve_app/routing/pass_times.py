"""How long a pass of so many rows takes, from the few sizes that a replica has measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class PassTimes:
    """Seconds of a pass as a function of its rows: linear between what was measured, and never falling."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        """`points` are (rows, seconds), rising by rows, at least one."""
        assert points and points[0][0] >= 1, points
        self._rows = [rows for rows, _ in points]
        self._seconds: list[float] = []
        for _, seconds in points:
            # A larger pass that was measured quicker is noise: believed, it would draw all requests there.
            self._seconds.append(max(seconds, self._seconds[-1]) if self._seconds else seconds)
        self._table: list[float] = [self._seconds[0]]  # by whole rows, grown on demand

    def __call__(self, rows: float) -> float:
        """Seconds of a pass; `rows` may be a mean."""
        whole = int(rows)
        if whole + 1 >= len(self._table):
            self._grow(whole + 1)
        below = self._table[whole]
        return below + (rows - whole) * (self._table[whole + 1] - below)

    def _grow(self, rows: int) -> None:
        for size in range(len(self._table), rows + 1):
            self._table.append(self._at(size))

    def _at(self, rows: int) -> float:
        """Interpolated at a whole number of rows."""
        if rows <= self._rows[0]:
            return self._seconds[0]
        for i in range(1, len(self._rows)):
            if rows <= self._rows[i]:
                share = (rows - self._rows[i - 1]) / (self._rows[i] - self._rows[i - 1])
                return self._seconds[i - 1] + share * (self._seconds[i] - self._seconds[i - 1])
        return self._seconds[-1] + (rows - self._rows[-1]) * self._slope_beyond()

    def _slope_beyond(self) -> float:
        """Seconds of each row past the largest size measured.

        The first rows of a pass are nearly free, the later ones are not, so small sizes promise too much: a row is
        taken to cost at least half of the mean.
        """
        mean = self._seconds[-1] / self._rows[-1]
        if len(self._rows) == 1:
            return mean / 2
        last = (self._seconds[-1] - self._seconds[-2]) / (self._rows[-1] - self._rows[-2])
        return max(last, mean / 2)


UNMEASURED = PassTimes(((1, 0.01), (2, 0.011), (4, 0.016), (8, 0.03)))
"""Used until some replica has measured a pass. Only the shape matters: it is the same for all."""


class Busy(Protocol):
    """A replica's report, or its engine's load."""

    @property
    def num_lanes(self) -> int:
        """Lanes in all."""

    @property
    def num_lanes_free(self) -> int:
        """Lanes that nobody has."""

    @property
    def num_lanes_waiting(self) -> int:
        """Lanes that requests without one want; a guided one wants two."""

    @property
    def pass_seconds(self) -> Sequence[tuple[int, float]]:
        """(rows, seconds), measured, rising by rows."""


def num_rows_to_come(busy: Busy) -> int:
    """Rows of the passes to come, one a lane: what runs, and what waits as far as there are lanes; at least 1."""
    return max(min(busy.num_lanes - busy.num_lanes_free + busy.num_lanes_waiting, busy.num_lanes), 1)


def coming_pass_s(busy: Busy) -> float:
    """Seconds of one of these passes, by its own measurements where it has some."""
    seconds = PassTimes(busy.pass_seconds) if busy.pass_seconds else UNMEASURED
    return seconds(num_rows_to_come(busy))
