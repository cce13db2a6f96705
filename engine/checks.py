"""What counts as a whole number, a number, a list; how a refused value is shown. Knows no field and no error.

Strict on purpose: a bool is no number, and a numpy or torch scalar is no int. They would be refused later, by a
tensor in the middle of a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

LARGEST = 1e30
"""Largest magnitude of a number: what passes compute from it in float32 (up to 3.4e38) stays finite."""
_MOST_SHOWN = 80


def is_whole(value: object, low: int | None = None, high: int | None = None) -> TypeGuard[int]:
    """True for an int in [low, high]; None: no limit."""
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return (low is None or low <= value) and (high is None or value <= high)


def is_number(value: object, low: float = -LARGEST, high: float = LARGEST) -> TypeGuard[float]:
    """True for an int or float in [low, high]; never for NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def is_list(value: object) -> TypeGuard[Sequence[object]]:
    """True for a list, a tuple or the like; a string, a set and an array are none."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def shown(value: object) -> str:
    """The value for an error message, cut where it is long."""
    try:
        text = repr(value)
    except Exception:  # a foreign __repr__, or an int of too many digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
