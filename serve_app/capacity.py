"""How much one replica holds and how many are needed: `python -m serve_app.capacity deploy/config.yaml --gpu-gib 141`.

Pages and lanes come from the engine's own arithmetic over the checkpoint's shape; no GPU and no weights are needed.
Times of a pass are measured (`python -m load_tests.bench_engine --only pass`) and given as `--pass-ms 1:4.9,4:8.0`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from engine import EngineConfig, EngineError, MemoryPlan, ModelConfig, plan_memory

from .checkpoint import locate
from .config import BUILDER, AppConfig
from .routing.pass_times import PassTimes

_GIB = 1024**3


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The mean request, and how many come."""

    num_prompt_tokens: int
    num_new_tokens: int
    tokens_per_step: float = 1.0
    """Tokens that a pass of a request commits."""
    requests_per_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """What one replica can serve of a workload."""

    pages_per_request: int
    """At its end, when it holds most; sharing prefixes lowers it."""
    num_running: int
    """Requests that run at once: lanes, pages and rows allow no more."""
    limit: str
    """What of the three it is."""
    rows_per_request: float
    """Rows of all passes of one request: prefill, denoise and seal."""


def capacity(model: ModelConfig, engine: EngineConfig, plan: MemoryPlan, workload: Workload) -> Capacity:
    """Capacity of one replica. Raises ValueError where a request does not fit the context at all."""
    size = model.diff_block_size
    total = workload.num_prompt_tokens + workload.num_new_tokens
    if total > model.block_size:
        raise ValueError(f"a request of {total} tokens does not fit the context of {model.block_size}")
    pages = -(-total // size)
    limits = {"lanes": engine.num_lanes, "pages": plan.num_pages // pages, "rows": engine.max_rows}
    limit = min(limits, key=lambda name: limits[name])
    num_prefill = workload.num_prompt_tokens // size
    num_seals = max(pages - num_prefill - 1, 0)
    return Capacity(
        pages_per_request=pages,
        num_running=limits[limit],
        limit=limit,
        rows_per_request=num_prefill + workload.num_new_tokens / workload.tokens_per_step + num_seals,
    )


def replica_requests_per_s(pass_seconds: PassTimes, found: Capacity) -> float:
    """Requests a second of one replica that is full."""
    return found.num_running / (found.rows_per_request * pass_seconds(found.num_running))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what fits; returns the exit status."""
    options = _parse(arguments)
    try:
        app = _read(options.config)
        folder = options.checkpoint or locate(app.checkpoint, app.revision, with_weights=False)
        model = ModelConfig.from_json(folder)
        plan = plan_memory(model, app.engine, total=int(options.gpu_gib * _GIB))
        workload = Workload(
            num_prompt_tokens=options.prompt_tokens,
            num_new_tokens=options.new_tokens,
            tokens_per_step=options.tokens_per_step,
            requests_per_s=options.requests_per_s,
        )
        found = capacity(model, app.engine, plan, workload)
    except (EngineError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join([plan.table(), "", *_lines(found, workload, options.pass_ms, options.load)]))
    return 0


def _lines(found: Capacity, workload: Workload, pass_seconds: PassTimes | None, load: float) -> list[str]:
    lines = [
        f"request  {found.pages_per_request} pages at its end, {found.rows_per_request:.0f} rows in all",
        f"replica  {found.num_running} such requests at once, limited by {found.limit}",
    ]
    if pass_seconds is None:
        return [*lines, "         for tokens a second and replicas give --pass-ms"]
    rate = replica_requests_per_s(pass_seconds, found)
    pass_ms = 1000 * pass_seconds(found.num_running)
    tokens = rate * workload.num_new_tokens
    lines.append(f"         {tokens:.0f} tokens/s, {rate:.2f} requests/s when full, {pass_ms:.1f} ms a pass")
    if workload.requests_per_s is not None:
        num_replicas = math.ceil(workload.requests_per_s / (load * rate))
        lines.append(f"app      {num_replicas} replicas for {workload.requests_per_s:g} requests/s at {load:.0%} load")
    return lines


def _read(file: Path) -> AppConfig:
    content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    for application in content.get("applications") or []:
        if application.get("import_path") == BUILDER:
            return AppConfig.model_validate(application.get("args") or {})
    raise ValueError(f"{file} has no application with import_path {BUILDER}")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m serve_app.capacity", description=__doc__)
    parser.add_argument("config", type=Path, help="a deploy file; its engine settings count")
    parser.add_argument("--gpu-gib", type=_positive, required=True, help="memory of one GPU, GiB")
    parser.add_argument(
        "--checkpoint", type=Path, help="folder or config.json of the checkpoint, instead of the file's"
    )
    parser.add_argument("--prompt-tokens", type=int, default=256, help="of the mean request (256)")
    parser.add_argument("--new-tokens", type=int, default=256, help="of the mean request (256)")
    parser.add_argument("--tokens-per-step", type=_positive, default=1.0, help="tokens that a pass commits (1)")
    parser.add_argument("--pass-ms", type=_pass_times, help="measured passes, rows:milliseconds, as in 1:4.9,4:8.0")
    parser.add_argument("--requests-per-s", type=_positive, help="requests that come each second")
    parser.add_argument("--load", type=_positive, default=0.8, help="share of the capacity to use (0.8)")
    return parser.parse_args(arguments)


def _positive(text: str) -> float:
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text} must be a number greater than 0")
    return value


def _pass_times(text: str) -> PassTimes:
    times = {}
    for item in text.split(","):
        rows, _, milliseconds = item.partition(":")
        if not rows.isdecimal() or int(rows) < 1:
            raise argparse.ArgumentTypeError(f"{item!r} must be rows:milliseconds, as in 4:8.0")
        times[int(rows)] = _positive(milliseconds) / 1000
    return PassTimes(sorted(times.items()))


if __name__ == "__main__":
    sys.exit(main())
