"""What several commands read from their command lines."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable


def numbers(text: str) -> tuple[int, ...]:
    """`1,2,4` as numbers of at least 1."""
    found = tuple(int(part) for part in text.split(","))
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text} holds {min(found)}; every number must be at least 1")
    return found


def interval(text: str) -> tuple[int, int]:
    """`60,250` as the ends of a range."""
    ends = numbers(text)
    if len(ends) != 2 or ends[0] > ends[1]:
        raise argparse.ArgumentTypeError(f"{text} must be two numbers, the smaller first")
    return ends[0], ends[1]


def some_of(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """A parser of names, with commas between them, that gives them in the order of `known` and refuses others."""
    order = tuple(known)

    def names(text: str) -> tuple[str, ...]:
        asked = text.split(",")
        if unknown := [name for name in asked if name not in order]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known are {', '.join(order)}")
        return tuple(name for name in order if name in asked)

    return names
