"""How the routing policy does against other ways to balance load, in a simulated deployment.

    python -m load_tests.simulate_router --json routing.json          about five minutes of one core
    python -m load_tests.simulate_router --quick                      the same in small, half a minute
    python -m load_tests.simulate_router --from routing.json --markdown docs/routing.md --plots docs

Needs no GPU, no Ray, and no packages but matplotlib for the plots. The same version gives the same figures everywhere.
Progress goes to standard error; standard output gets the tables.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .router_simulation import page, study


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate or read, then show; 0 unless something cannot be read or written."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _options(given)
    result = (
        json.loads(options.source.read_text(encoding="utf-8")) if options.source else simulate(options.quick, given)
    )
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(page.text(result))
    if options.markdown:
        page.write_markdown(result, options.markdown)
    if options.plots:
        # matplotlib is not installed where nobody draws.
        for file in importlib.import_module(".router_simulation.plots", __package__).draw(result, options.plots):
            print(f"wrote {file}", file=sys.stderr)
    return 0


def simulate(is_quick: bool, arguments: Sequence[str]) -> dict[str, Any]:
    """Run everything."""
    scale = study.QUICK if is_quick else study.FULL
    begun_s = time.monotonic()

    def progress(line: str) -> None:
        print(f"{time.monotonic() - begun_s:6.0f} s  {line}", file=sys.stderr, flush=True)

    result: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "load_tests.simulate_router", *arguments]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "saturation_per_s": study.saturation_rate(),
        "balance": study.balance(scale, progress),
        "overload": study.overload(scale, progress),
        "prefixes": study.prefixes(scale, progress),
    }
    return result | {"took_s": time.monotonic() - begun_s}


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare routers in a simulated deployment.")
    parser.add_argument("--quick", action="store_true", help="fewer replicas, requests and seeds")
    parser.add_argument("--from", dest="source", type=Path, help="show the figures of this file and simulate nothing")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--markdown", type=Path, help="write tables between the marks of this page")
    parser.add_argument("--plots", type=Path, help="write plots into this folder (needs matplotlib)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
