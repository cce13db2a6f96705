"""CPU time of processes: what serving costs, and whether the client stood in its own way. Only where /proc exists."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path


def cpu_seconds(pids: Iterable[int]) -> dict[str, float]:
    """CPU seconds so far of each process that still runs, added up by name."""
    found: dict[str, float] = {}
    for pid in pids:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            # It has ended.
            continue
        # The name, in brackets, may hold spaces; user and system time are the 12th and 13th fields after it.
        fields = stat.rpartition(")")[2].split()
        name = process_name([word.decode("utf-8", "replace") for word in words if word])
        found[name] = found.get(name, 0.0) + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def process_name(words: list[str]) -> str:
    """What a process is for: a replica's or proxy's class, else the program's name."""
    if not words:
        return "unnamed"
    if words[0].startswith("ray::"):
        return words[0].removeprefix("ray::").partition(".")[0].partition(" ")[0]
    names = [Path(word).name for word in words]
    if names[0].startswith("python"):
        return next((name for name in names[1:] if not name.startswith("-")), names[0])
    return names[0]


class ClientCost:
    """Share of one CPU that this process uses while it is a client."""

    def __enter__(self) -> ClientCost:
        self._began = time.monotonic(), time.process_time()
        return self

    def __exit__(self, *exc: object) -> None:
        wall, cpu = (now - then for now, then in zip((time.monotonic(), time.process_time()), self._began, strict=True))
        self.cpu_s, self.share = cpu, cpu / max(wall, 1e-9)
