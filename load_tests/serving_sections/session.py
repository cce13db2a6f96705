"""What every load test does around its measuring: say on what, show tables as they come, and end in one JSON line."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..engine_sections import rendering
from ..engine_sections.environment import git_commit, machine
from ..engine_sections.report import NotAvailable, Progress, Section

WATCHED = ("engine", "serve_app")
TITLES = {
    "load": "A load over HTTP",
    "lag": "How late events reach their client",
    "overhead": "What the path costs a single request",
    "replicas": "Replicas",
}


class Session:
    """One run of one command: its environment and its sections."""

    def __init__(self, module: str, arguments: Sequence[str], *, json_file: Path | None, commit: str | None) -> None:
        """Prints what is measured on what."""
        self.progress = Progress()
        self._json_file = json_file
        self.result: dict[str, Any] = {
            "environment": describe(commit),
            "runs": [
                {
                    "command": shlex.join(["python", "-m", module, *without_files(arguments)]),
                    "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
                }
            ],
            "sections": {},
        }
        show(rendering.text_environment(self.result))

    def run(self, name: str, measure: Callable[[Section], None]) -> Section:
        """Measure one section; what goes wrong in it is its own. Its tables are shown and kept at once."""
        section, began = Section(name, self.progress), time.monotonic()
        try:
            measure(section)
        except NotAvailable as error:
            section.status, section.reason = "skipped", str(error)
        except Exception as error:
            section.status, section.reason = "failed", f"{type(error).__name__}: {error}"
            self.progress.clear()
            traceback.print_exc()
        section.took_s = time.monotonic() - began
        self.progress.clear()
        self.keep(section)
        show(rendering.text_section(name, section.as_json(), TITLES))
        return section

    def keep(self, section: Section) -> None:
        """Write what is known so far to the JSON file."""
        self.result["sections"][section.name] = section.as_json()
        if self._json_file is not None:
            self._json_file.write_text(json.dumps(self.result) + "\n", encoding="utf-8")

    def end(self) -> int:
        """Print the JSON line; returns the exit status."""
        print(json.dumps(self.result), flush=True)
        return int(any(section["status"] == "failed" for section in self.result["sections"].values()))


def describe(commit: str | None) -> dict[str, Any]:
    """Machine, libraries and build. `commit` stands in where there is no git."""
    num_gpus = torch.cuda.device_count()
    device = torch.device("cuda" if num_gpus else "cpu")
    return {
        "machine": machine(device),
        "gpus": num_gpus,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ray": version("ray"),
        "commit": git_commit(WATCHED) or commit,
    }


def without_files(arguments: Sequence[str]) -> list[str]:
    """The arguments that decide what is measured; where results go does not."""
    names = {"--json"}
    return [
        argument
        for before, argument in zip(("", *arguments), arguments, strict=False)
        if not {before, argument.partition("=")[0]} & names
    ]


def show(lines: Sequence[str]) -> None:
    """Print lines for people."""
    print("\n".join(lines), flush=True)


def say(text: str) -> None:
    """A line about what goes on, with the time, for whoever waits."""
    print(f"[{datetime.now().strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)
