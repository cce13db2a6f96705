"""How fast the engine is on this machine, against what the machine could do at best.

    python -m load_tests.bench_engine                      the 8B shape with random weights on a GPU, the demo on a CPU
    python -m load_tests.bench_engine --only pass,serve --rows 1,4 --contexts 256,4096 --json pass.json
    python -m load_tests.bench_engine --merge pass.json ready.json --markdown docs/performance.md

Every request is steered, explained and sampled with the default sampler. Random weights do not change the time of a
pass with one commit a row. Each section measures the floor and the GEMMs that its ratios need in its own process, and
merging only puts whole sections of one machine and build side by side. Brackets hold the 10th and 90th percentiles.

Progress goes to standard error; standard output gets each section's tables as soon as they are there and, as its last
line, one JSON object. The exit status is 1 when a section failed; one that does not apply here is skipped.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from .engine_sections import environment, rendering
from .engine_sections.bench import Bench
from .engine_sections.hardware import ceilings, gemms
from .engine_sections.memory import memory
from .engine_sections.merging import CannotMerge, merge
from .engine_sections.passes import parts, passes
from .engine_sections.peer import peer
from .engine_sections.policies import policies
from .engine_sections.readiness import ready
from .engine_sections.report import NotAvailable, Progress, Section
from .engine_sections.serving import prefill, serve
from .engine_sections.variants import deterministic, fp8
from .options import interval, numbers, some_of

SECTIONS: dict[str, Callable[[Bench, Section], None]] = {
    "ceilings": ceilings,
    "gemms": gemms,
    "pass": passes,
    "parts": parts,
    "serve": serve,
    "prefill": prefill,
    "policies": policies,
    "fp8": fp8,
    "deterministic": deterministic,
    "memory": memory,
    "peer": peer,
    "ready": ready,
}
POLICY_STEPS = environment.ROOT / "demo_model" / "policy_steps.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen sections, or merge results; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    try:
        if options.markdown is not None:
            rendering.page_around(options.markdown)  # not after an hour
        if options.merge:
            result = merge(options.merge, tuple(SECTIONS))
            for name, section in result["sections"].items():
                _print(rendering.text_section(name, section))
        else:
            result = measure(options, command_of(arguments))
    except (CannotMerge, rendering.CannotWrite) as error:
        print(error, file=sys.stderr)
        return 2
    _print([*rendering.text_bars(result), ""])
    if options.markdown is not None:
        rendering.write_markdown(result, options.markdown)
    write_json(result, options.json)
    print(json.dumps(result))
    return int(any(section["status"] == "failed" for section in result["sections"].values()))


def measure(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Run sections one after another; each result is on paper before the next one starts."""
    bench, progress = Bench(options), Progress()
    sections: dict[str, Any] = {}
    result = {
        "environment": environment.describe(bench.device, bench.dtype, bench.config, options.commit),
        "runs": [{"command": command, "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")}],
        "sections": sections,
    }
    _print(rendering.text_environment(result))
    try:
        for name in options.only:
            section = run_section(SECTIONS[name], Section(name, progress), bench)
            progress.clear()
            sections[name] = section.as_json()
            _print(rendering.text_section(name, sections[name]))
            write_json(result, options.json)
    finally:
        bench.close()
    return result


def run_section(measured: Callable[[Bench, Section], None], section: Section, bench: Bench) -> Section:
    """Fill one section; whatever goes wrong in it is its own, and the others go on."""
    started, compiled = time.perf_counter(), bench.compiles.count
    try:
        section.say("making ready")
        measured(bench, section)
    except NotAvailable as error:
        section.status, section.reason = "skipped", str(error)
    except Exception as error:
        section.status, section.reason = "failed", f"{type(error).__name__}: {error}"
        section.progress.clear()
        traceback.print_exc()
    section.took_s = time.perf_counter() - started
    section.recompilations = bench.compiles.count - compiled
    bench.free()
    return section


def command_of(arguments: Sequence[str]) -> str:
    """The command that measures the same; where results were written changes nothing."""
    kept = [
        argument
        for before, argument in zip(("", *arguments), arguments, strict=False)
        if not {before, argument.partition("=")[0]} & {"--json", "--markdown"}
    ]
    return shlex.join(["python", "-m", "load_tests.bench_engine", *kept])


def write_json(result: dict[str, Any], file: Path | None) -> None:
    """Keep what is known so far."""
    if file is not None:
        file.write_text(json.dumps(result) + "\n", encoding="utf-8")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=some_of(SECTIONS), default=tuple(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--checkpoint", type=Path, help="default: random weights of the 8B shape, or the demo on a CPU")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--rows", type=numbers, help="requests that run together")
    parser.add_argument("--contexts", type=numbers, help="keys that a row attends to")
    parser.add_argument("--clients", type=numbers, help="clients of the sections serve and memory")
    parser.add_argument("--requests", type=int, help="requests of a load, at least two a client (16, 4 on a CPU)")
    parser.add_argument("--prompt-tokens", type=interval, default=(60, 250), help="of a served request (60,250)")
    parser.add_argument("--new-tokens", type=interval, default=(64, 256), help="of a served request (64,256)")
    parser.add_argument("--arrival-share", type=float, default=0.7, help="open loop: of the closed loop's rate (0.7)")
    parser.add_argument("--repeats", type=int, help="runs behind a median (3 on a GPU, 1 on a CPU)")
    parser.add_argument("--policy-steps", type=Path, default=POLICY_STEPS, help="passes of each policy on the demo")
    parser.add_argument("--no-graphs", action="store_true", help="kernel by kernel instead of captured graphs")
    parser.add_argument("--commit", help="what is being measured, where no git can tell")
    parser.add_argument("--json", type=Path, help="write the JSON object here too, after every section")
    parser.add_argument("--markdown", type=Path, help="write the tables here, or between the marks of this page")
    parser.add_argument(
        "--merge", type=Path, nargs="+", help="measure nothing: put the sections of JSON files together"
    )
    return parser.parse_args(arguments)


def _print(lines: Sequence[str]) -> None:
    print("\n".join(lines), flush=True)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main())
