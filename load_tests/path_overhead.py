"""What the whole path costs a single request: HTTP, ingress, router where there is one, and replica, over the engine.

    python -m load_tests.path_overhead                     an engine that answers at once, then the demo model
    python -m load_tests.path_overhead --engines instant --requests 300

The same requests are served one after another, in turn by an engine in this process and by the application over HTTP,
so that whatever else the machine does slows both. Overhead is the difference of the medians.

Progress goes to standard error; standard output gets tables and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import torch

from engine import AsyncEngine, Committed, EngineConfig, GenerateRequest, SamplingParams
from serve_app.config import DEMO_CHECKPOINT

from .engine_sections.report import Section, median, percentile
from .options import some_of
from .serving_sections.client import Client
from .serving_sections.description import write_description
from .serving_sections.engines import paced_engine
from .serving_sections.hosting import MODES, Host
from .serving_sections.session import Session

DEPLOY_TIMEOUT_S = 180.0
WARM_UPS = 10
PROMPT = list(range(300, 332))
ENGINES = {"instant": 300, "demo": 40}
"""Requests for each unless told otherwise."""


@dataclass
class Timed:
    """Seconds of each request."""

    first_commit: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each engine; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    torch.set_grad_enabled(False)
    session = Session("load_tests.path_overhead", arguments, json_file=options.json, commit=options.commit)
    session.run("overhead", lambda section: overhead(section, options))
    return session.end()


def overhead(section: Section, options: argparse.Namespace) -> None:
    """Three rows for each way of HTTP and engine: engine alone, whole path, difference."""
    with tempfile.TemporaryDirectory(prefix="path-overhead-") as folder:
        description = write_description(Path(folder) / "paced", "8b")
        for mode in options.modes:
            section.say(f"{mode}: starting")
            with Host(mode=mode) as host:
                for name in options.engines:
                    section.say(f"{mode}, {name}")
                    model = description if name == "instant" else DEMO_CHECKPOINT
                    args = {"model": str(model), "engine": {"device": "cpu", "num_pages": 64, "max_rows": 4}}
                    changes: dict[str, Any] = {"maker": "paced", "step_s": 0.0} if name == "instant" else {}
                    host.deploy(args, timeout_s=DEPLOY_TIMEOUT_S, **changes)
                    engine = _engine(name, model)
                    try:
                        count = options.requests or ENGINES[name]
                        alone, path, http = asyncio.run(_in_turn(engine, host.url, count, options.tokens))
                    finally:
                        engine.stop()
                    _add(section, mode, name, alone, path, http)
    section.note(
        f"one request at a time, {len(PROMPT)} prompt tokens and {options.tokens} new ones, streamed; "
        "first commit: until the client, or the caller of the engine, has it"
    )
    section.note("engine alone: an AsyncEngine of its own in the client's process")
    section.note("events leave a replica every 50 ms after a stream's first, which the end of a short answer waits for")


def _engine(name: str, model: Path) -> AsyncEngine:
    if name == "instant":
        return paced_engine(0.0, model)
    return AsyncEngine.from_checkpoint(model, EngineConfig(device="cpu", num_pages=64, max_rows=4))


async def _in_turn(engine: AsyncEngine, url: str, count: int, num_tokens: int) -> tuple[Timed, Timed, list[float]]:
    """Engine alone, the whole path, and seconds of an HTTP request that asks no engine."""
    alone, path, health = Timed(), Timed(), []
    async with Client(url) as client, aiohttp.ClientSession() as session:
        for index in range(WARM_UPS + count):
            await _alone(engine, index, num_tokens, alone)
            await _over_http(client, index, num_tokens, path)
            began = time.monotonic()
            async with session.get(url + "/health") as response:
                await response.read()
            health.append(time.monotonic() - began)
    for values in (alone.first_commit, alone.whole, path.first_commit, path.whole, health):
        del values[:WARM_UPS]
    return alone, path, health


async def _alone(engine: AsyncEngine, seed: int, num_tokens: int, timed: Timed) -> None:
    sampling = SamplingParams(seed=seed, ignore_eos=True)
    began, first = time.monotonic(), None
    async for events in engine.generate(
        GenerateRequest(prompt_token_ids=PROMPT, max_tokens=num_tokens, sampling=sampling)
    ):
        if first is None and any(isinstance(event, Committed) for event in events):
            first = time.monotonic()
    assert first is not None
    timed.first_commit.append(first - began)
    timed.whole.append(time.monotonic() - began)


async def _over_http(client: Client, seed: int, num_tokens: int, timed: Timed) -> None:
    body = {
        "prompt": PROMPT,
        "max_tokens": num_tokens,
        "seed": seed,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_diffusion": "steps"},
    }
    outcome = (await client.send(body)).read()
    if not outcome.is_ok or outcome.stream.first_commit is None:
        raise RuntimeError(f"a request ended with {outcome.code or 'a cut stream'}")
    timed.first_commit.append(outcome.stream.first_commit - outcome.sent)
    timed.whole.append(outcome.ended - outcome.sent)


def _add(section: Section, mode: str, engine: str, alone: Timed, path: Timed, health: list[float]) -> None:
    for name, timed in (("engine alone", alone), ("whole path", path)):
        section.add(
            f"engine: {engine}",
            http=mode,
            what=name,
            **_p50("first_commit", timed.first_commit),
            **_p50("whole_answer", timed.whole),
        )
    section.add(
        f"engine: {engine}",
        http=mode,
        what="overhead",
        first_commit_ms=1e3 * (median(path.first_commit) - median(alone.first_commit)),
        whole_answer_ms=1e3 * (median(path.whole) - median(alone.whole)),
    )
    section.add(f"engine: {engine}", http=mode, what="GET /health, no engine", **_p50("whole_answer", health))


def _p50(name: str, seconds: list[float]) -> dict[str, float]:
    """Median with the 10th and 90th percentile, in milliseconds."""
    return {
        f"{name}_ms": 1e3 * median(seconds),
        f"{name}_ms_low": 1e3 * percentile(seconds, 0.1),
        f"{name}_ms_high": 1e3 * percentile(seconds, 0.9),
    }


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", type=some_of(MODES), default=("default", "haproxy"), help=f"of {', '.join(MODES)}")
    parser.add_argument("--engines", type=some_of(ENGINES), default=tuple(ENGINES), help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--requests", type=int, help="for each engine (300 at once, 40 of the demo)")
    parser.add_argument("--tokens", type=int, default=8, help="of each answer (8)")
    parser.add_argument("--commit", help="what is being measured, where no git can tell")
    parser.add_argument("--json", type=Path, help="write the JSON object here too")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
