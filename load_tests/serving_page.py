"""Puts what the serving load tests found onto a page: `python -m load_tests.serving_page lag.json replicas.json`.

Each file holds the JSON object of one command. The tables go between the marks of docs/serving_performance.md, in
place of those that are there; a section that two files have is refused.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .engine_sections.environment import ROOT
from .engine_sections.rendering import CannotWrite, markdown_section, write_figures
from .serving_sections.session import TITLES

PAGE = ROOT / "docs" / "serving_performance.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="of --json of the load tests")
    parser.add_argument("--markdown", type=Path, default=PAGE, help="the page")
    options = parser.parse_args(arguments)
    try:
        lines = page([json.loads(file.read_text(encoding="utf-8")) for file in options.files])
        write_figures("\n".join([*lines, ""]), options.markdown)
    except (CannotWrite, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def page(results: Sequence[dict[str, Any]]) -> list[str]:
    """The sections of all results, each with what it was measured on. Raises ValueError for one that comes twice."""
    lines: list[str] = []
    seen: set[str] = set()
    for result in results:
        for name, section in result["sections"].items():
            if name in seen:
                raise ValueError(f"two files have the section {name!r}; give one of them")
            seen.add(name)
            lines += ["", f"### {TITLES[name]}", "", *_measured_on(result), *markdown_section(name, section)]
    return lines


def _measured_on(result: dict[str, Any]) -> list[str]:
    on = ", ".join(f"{name} {value}" for name, value in result["environment"].items() if value is not None)
    return [*(f"`{run['command']}`, {run['date']}  " for run in result["runs"]), on]


if __name__ == "__main__":
    sys.exit(main())
