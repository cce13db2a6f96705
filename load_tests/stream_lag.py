"""How late events reach a client: 64 streams at once, one commit of each every 10 ms, and nothing computed.

    python -m load_tests.stream_lag                        both ways in which Ray Serve takes HTTP, three runs of each
    python -m load_tests.stream_lag --modes default --detail steps --runs 5 --client-cpu 1

The real application runs on Ray with an engine that only keeps time: the real AsyncEngine around steps of a fixed
length. Each token's text is the moment at which it was committed, on the clock that the client reads too, so every
event carries it. Lag is arrival at the client minus that moment; a token that waits to be sent together with others
is late by what it waited.

Progress goes to standard error; standard output gets tables and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .engine_sections.report import Section, median, percentile
from .options import some_of
from .serving_sections.client import Answer, Client
from .serving_sections.cost import ClientCost
from .serving_sections.description import NUM_NUMBERS, write_description
from .serving_sections.events import DONE, payloads
from .serving_sections.hosting import MODES, Host
from .serving_sections.session import Session

TARGET_MS = 80.0
MOST_LAG_MS = NUM_NUMBERS / 2
DEPLOY_TIMEOUT_S = 120.0
DETAILS = {"text": "off", "steps": "steps"}
"""What is asked for: text alone, or an event for every denoising step beside it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each mode; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    if options.client_cpu is not None:
        os.sched_setaffinity(0, {options.client_cpu})
    session = Session("load_tests.stream_lag", arguments, json_file=options.json, commit=options.commit)
    session.run("lag", lambda section: lag(section, options))
    return session.end()


def lag(section: Section, options: argparse.Namespace) -> None:
    """One row a mode, detail and run."""
    with tempfile.TemporaryDirectory(prefix="stream-lag-") as folder:
        description = write_description(Path(folder) / "paced", "8b")
        for mode in options.modes:
            section.say(f"{mode}: starting")
            with Host(mode=mode) as host:
                host.deploy(
                    app_args(description, options.coalesce_ms),
                    timeout_s=DEPLOY_TIMEOUT_S,
                    maker="paced",
                    step_s=options.step_ms / 1e3,
                )
                # The first streams find a cold path.
                asyncio.run(streams(host.url, "off", min(options.streams, 8), 20))
                for detail in options.detail:
                    runs = []
                    for run in range(options.runs):
                        section.say(f"{mode}, {detail}, run {run + 1} of {options.runs}")
                        runs.append(measure(host, options, detail))
                    add(section, mode, detail, runs)
    nominal = options.streams / options.step_ms * 1e3
    section.note(
        f"{options.streams} streams of {options.tokens} tokens, one commit of each every {options.step_ms:g} ms: "
        f"{nominal:,.0f} tokens a second; medians of {options.runs} runs, brackets hold the smallest and the largest"
    )
    where = "any CPU" if options.client_cpu is None else f"CPU {options.client_cpu}"
    section.note(f"the client is one process on {where} of the same {os.cpu_count()}; the server may use all of them")
    section.note(f"target: p50 of at most {TARGET_MS:.0f} ms; events leave an engine every {options.coalesce_ms:g} ms")


def app_args(description: Path, coalesce_ms: float) -> dict[str, Any]:
    """Settings that ship, but for the model and the interval that is measured."""
    return {
        "model": str(description),
        "engine": {"device": "cpu"},
        "engine_server": {"coalesce_interval_s": coalesce_ms / 1e3},
    }


def measure(host: Host, options: argparse.Namespace, detail: str) -> dict[str, Any]:
    """One run: lags in milliseconds, and what it cost whom."""
    before = host.cpu_seconds()
    with ClientCost() as cost:
        began = time.monotonic()
        answers = asyncio.run(streams(host.url, DETAILS[detail], options.streams, options.tokens))
        wall_s = time.monotonic() - began
    after = host.cpu_seconds()
    lags = [value for answer in answers for value in lags_ms(answer, detail)]
    num_tokens = options.streams * options.tokens
    if len(lags) != num_tokens:
        broken = [answer for answer in answers if answer.failure or answer.status != 200]
        raise RuntimeError(f"{len(lags)} tokens came of {num_tokens}; {len(broken)} streams broke")
    used = {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}
    return {
        "p50": percentile(lags, 0.5),
        "p95": percentile(lags, 0.95),
        "p99": percentile(lags, 0.99),
        "wall_s": wall_s,
        "client_share": cost.share,
        "chunks": sum(len(answer.chunks) for answer in answers),
        "cpu_us": {name: 1e6 * seconds / num_tokens for name, seconds in used.items()},
    }


async def streams(url: str, detail: str, count: int, num_tokens: int) -> list[Answer]:
    """Run so many streams at once."""
    body = {
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_diffusion": detail},
    }
    async with Client(url, timeout_s=120.0) as client:
        return await asyncio.gather(*(client.send({**body, "prompt": [300 + i], "seed": i}) for i in range(count)))


def lags_ms(answer: Answer, detail: str) -> list[float]:
    """One value a token of the stream, in milliseconds: when it came minus when it was made."""
    lags = []
    for arrived, payload in payloads(answer.chunks):
        if payload != DONE:
            lags += [late(arrived, moment) for moment in moments(json.loads(payload), detail)]
    return lags


def moments(event: dict[str, Any], detail: str) -> list[int]:
    """When the tokens in an event were made, in milliseconds modulo NUM_NUMBERS.

    Tokens of denoising steps count where these were asked for: their text, which follows, is not counted again.
    """
    if detail == "steps":
        piece = event.get("diffusion", {})
        return [int(commit["token"]) for commit in piece["commits"]] if piece.get("type") == "step" else []
    return [int(word) for choice in event.get("choices", ()) for word in choice["text"].split()]


def late(arrived: float, made_ms: int) -> float:
    """Milliseconds from the moment made to the arrival. The first is known modulo NUM_NUMBERS only."""
    lag = (arrived * 1e3 - made_ms) % NUM_NUMBERS
    return lag if lag < MOST_LAG_MS else lag - NUM_NUMBERS


def add(section: Section, mode: str, detail: str, runs: list[dict[str, Any]]) -> None:
    """Add what the runs of one mode and detail say."""

    def over_runs(name: str, key: str) -> dict[str, float]:
        values = [run[key] for run in runs]
        spread = {f"{name}_low": min(values), f"{name}_high": max(values)} if len(values) > 1 else {}
        return {name: median(values), **spread}

    p50 = over_runs("lag_at_p50_ms", "p50")
    section.add(
        "",
        http=mode,
        detail=detail,
        **p50,
        **over_runs("lag_at_p95_ms", "p95"),
        lag_at_p99_ms=median([run["p99"] for run in runs]),
        took_s=median([run["wall_s"] for run in runs]),
        chunks=int(median([run["chunks"] for run in runs])),
        client_cpu_share=median([run["client_share"] for run in runs]),
        target="met" if p50["lag_at_p50_ms"] <= TARGET_MS else "missed",
    )
    names = {name for run in runs for name, used in run["cpu_us"].items() if used >= 1}
    for name in sorted(names, key=lambda name: -median([run["cpu_us"].get(name, 0.0) for run in runs])):
        per_token = median([run["cpu_us"].get(name, 0.0) for run in runs])
        section.add(
            "CPU time of the server's processes", http=mode, detail=detail, process=name, per_token_us=per_token
        )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", type=some_of(MODES), default=("default", "haproxy"), help=f"of {', '.join(MODES)}")
    parser.add_argument("--detail", type=some_of(DETAILS), default=tuple(DETAILS), help=f"of {', '.join(DETAILS)}")
    parser.add_argument("--streams", type=int, default=64, help="at once (64)")
    parser.add_argument("--tokens", type=int, default=300, help="of each stream (300)")
    parser.add_argument("--step-ms", type=float, default=10.0, help="length of an engine step (10)")
    parser.add_argument("--coalesce-ms", type=float, default=50.0, help="the application's interval (50)")
    parser.add_argument("--runs", type=int, default=3, help="behind each figure (3)")
    parser.add_argument("--client-cpu", type=int, help="keep the client on this CPU")
    parser.add_argument("--commit", help="what is being measured, where no git can tell")
    parser.add_argument("--json", type=Path, help="write the JSON object here too")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
