"""The fenced blocks of the README and of docs/, and whether what one prints is what its page shows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
LANGUAGES = ("sh", "python", "console")
"""Of what a reader is meant to run. `console` is written as a terminal shows it and has to say `sh` to be run."""
FENCE = re.compile(r"^```(\w*)\n((?:(?!^```).*\n)*?)^```$", flags=re.MULTILINE)
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
ANYTHING = "..."


@dataclass(frozen=True)
class Example:
    """A block that a reader is meant to run."""

    page: str
    line: int
    language: str
    code: str
    shown: str | None
    """What the plain block right behind it shows; None where there is none."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def examples() -> list[Example]:
    """Every block of a language that is run, page by page."""
    found = []
    for page in PAGES:
        found += examples_in(page.read_text(encoding="utf-8"), str(page.relative_to(ROOT)))
    return found


def examples_in(text: str, page: str) -> list[Example]:
    """The same of one page's text."""
    found = []
    for block, behind in pairwise([*FENCE.finditer(text), None]):
        assert block is not None
        language, code = block.groups()
        if language not in LANGUAGES:
            continue
        is_output = behind is not None and not behind[1] and not text[block.end() : behind.start()].strip()
        line = text.count("\n", 0, block.start()) + 1
        found.append(Example(page, line, language, code, behind[2] if behind is not None and is_output else None))
    return found


def agrees(printed: str, shown: str) -> bool:
    """Whether the lines shown are those printed, with anything at all in place of `...`: as a line, any lines."""
    lines, at = printed.split("\n"), 0
    is_open = False
    for is_gap, group in groupby(shown.rstrip("\n").split("\n"), key=lambda line: line.strip() == ANYTHING):
        if is_gap:
            is_open = True
            continue
        wanted = list(group)
        starts = range(at, len(lines) - len(wanted) + 1) if is_open else range(at, min(at + 1, len(lines)))
        fitting = [s for s in starts if all(map(same_line, lines[s : s + len(wanted)], wanted))]
        if not fitting or len(lines[fitting[0] :]) < len(wanted):
            return False
        at, is_open = fitting[0] + len(wanted), False
    return is_open or not "".join(lines[at:]).strip()


def same_line(printed: str, shown: str) -> bool:
    """Whether one line is the other, but for space, `...` in it, and the last digits of numbers with a fraction."""
    if ANYTHING in shown:
        parts = [re.escape(" ".join(part.split())) for part in shown.split(ANYTHING)]
        return re.fullmatch(".*".join(parts), " ".join(printed.split())) is not None
    if NUMBER.sub("#", printed).split() != NUMBER.sub("#", shown).split():
        return False
    pairs = zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True)
    return all(float(a) == pytest.approx(float(b), abs=1e-3, rel=1e-3) for a, b in pairs)
