"""Every example of the README and of docs/ that shows what it prints is run, and prints that.

An example is a fenced block of `sh` or `python` with a plain fenced block behind it. A line `...` in what is shown
stands for any number of lines. Numbers with a fraction may differ in their last digits, which depend on the order in
which a machine adds.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pytest

from serve_app.local import local_server

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
SERVER = "http://127.0.0.1:8000"
TIMEOUT_S = 120
INSIDE = r"((?:(?!```).)*?)"
EXAMPLE = re.compile(rf"^```(sh|python)\n{INSIDE}^```\n+^```\n{INSIDE}^```$", flags=re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
ANYTHING = "..."


@dataclass(frozen=True)
class Example:
    page: str
    line: int
    language: str
    code: str
    shown: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def examples() -> list[Example]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in EXAMPLE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Example(str(page.relative_to(ROOT)), line, *match.groups()))
    return found


def agrees(printed: str, shown: str) -> bool:
    """Whether the lines shown are those printed, with anything at all in place of `...` lines."""
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
    if NUMBER.sub("#", printed).split() != NUMBER.sub("#", shown).split():
        return False
    pairs = zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True)
    return all(float(a) == pytest.approx(float(b), abs=1e-3, rel=1e-3) for a, b in pairs)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        # Presets that examples save are not the user's.
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        with local_server() as served:
            yield served


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `glassblock` and `python3` as they are once the package is installed."""
    folder = tmp_path_factory.mktemp("commands")
    for name, arguments in (("glassblock", "-m serve_app.cli.main"), ("python3", ""), ("python", "")):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        script.chmod(0o755)
    return folder


@pytest.mark.parametrize("example", examples(), ids=str)
def test_an_example_prints_what_its_page_shows(example: Example, url: str, commands: Path, tmp_path: Path):
    if "--json" not in subprocess.run(["curl", "--help", "all"], capture_output=True, text=True, check=False).stdout:
        pytest.skip("the examples need curl 7.82")
    code = example.code.replace(SERVER, url)
    # `glassblock` asks the default server where an example names none.
    code = re.sub(r"^(.*\bglassblock (?:generate|chat|concepts|bench)\b)", rf"\1 --server {url}", code, flags=re.M)
    code = code.replace(".venv/bin/", "")
    command = ["bash", "-ec", code] if example.language == "sh" else [sys.executable, "-c", code]
    environment = os.environ | {
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "100",
        "OMP_NUM_THREADS": "1",
    }
    # What an example writes stays out of the checkout.
    for entry in ROOT.iterdir():
        (tmp_path / entry.name).symlink_to(entry)
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=tmp_path, env=environment
    )
    assert ran.returncode == 0, ran.stderr
    assert agrees(ran.stdout, example.shown), f"it prints:\n{ran.stdout}"


def test_pages_have_examples():
    assert {example.page for example in examples()} >= {"README.md"}


def test_a_gap_stands_for_any_lines_and_nothing_else_does():
    assert agrees("a\nb\nc\n", "a\n...\nc\n")
    assert agrees("a\nc\n", "a\n...\nc\n")
    assert agrees("a 1.00001\n", "a 1.00002\n")
    assert not agrees("a\nb\nc\n", "a\nc\n")
    assert not agrees("a\nb\n", "a\n")
    assert not agrees("a 1.1\n", "a 1.2\n")
    assert not agrees("a\n", "a\nb\n")
