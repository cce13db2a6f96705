"""Whole sections of several runs in one result, where the runs are comparable."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ALIKE = ("machine", "driver", "torch", "cuda", "triton", "commit", "sources", "model", "dtype")
"""What has to be equal: ratios and bars must not come from different machines or builds."""


class CannotMerge(ValueError):
    """The files do not belong together."""


def read(file: Path) -> dict[str, Any]:
    """The result in a file: its last line that holds anything. Raises CannotMerge where that is no result."""
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        result = json.loads(lines[-1])
        missing = [key for key in ("environment", "runs", "sections") if key not in result]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CannotMerge(f"{file} holds no result of this benchmark: {error!r}") from error
    if missing:
        raise CannotMerge(f"{file} holds no result of this benchmark: it lacks {', '.join(missing)}")
    return dict(result)


def merge(files: Sequence[Path], order: Sequence[str]) -> dict[str, Any]:
    """One result with the sections of all files, in the given order.

    A section that failed or was skipped gives way to the same section of another file. Raises CannotMerge where
    machines or builds differ, or where two files measured one section.
    """
    results = [(file, read(file)) for file in files]
    first_file, first = results[0]
    sections: dict[str, tuple[Path, Any]] = {}
    for file, result in results:
        for name in ALIKE:
            ours, theirs = first["environment"].get(name), result["environment"].get(name)
            if ours != theirs:
                raise CannotMerge(
                    f"{file} has {name} {theirs!r}, {first_file} has {ours!r}; measure both again with one build"
                )
        for name, section in result["sections"].items():
            known = sections.get(name)
            if known is None or known[1]["status"] != "ok":
                sections[name] = (file, section)
            elif section["status"] == "ok":
                raise CannotMerge(f"{known[0]} and {file} both have the section {name}; leave one of them out")
    return {
        "environment": first["environment"],
        "runs": [run for _, result in results for run in result["runs"]],
        "sections": {name: sections[name][1] for name in order if name in sections},
    }
