"""What a second replica brings: tokens a second of N replicas, each on a GPU of its own, over those of one.

    python -m load_tests.replicas                           one replica a GPU, the 8B shape with random weights
    python -m load_tests.replicas --shape tiny --device cpu --replicas 2 --clients 2 --seconds 5

Starts the application on a Ray cluster of its own, with engines whose random weights are made where they run, so that
no checkpoint has to lie on a disk. All replicas come up at once and are measured first; then all but one are taken
away and the one that is left is measured. Each is measured with and without the router, and only the ingress is
replaced in between. The load is a closed loop of steered and explained streams over HTTP, so many
clients for each replica; tokens count from when all clients have had a first block until the time is over.

Progress goes to standard error; standard output gets tables and, as its last line, one JSON object. What was measured
is in the JSON file after every part, whatever happens later.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from .engine_sections.report import Section, percentile
from .options import interval
from .serving_sections import figures
from .serving_sections.client import Client, Outcome, wait_ready
from .serving_sections.cost import ClientCost
from .serving_sections.description import SHAPES, write_description
from .serving_sections.hosting import MODES, Host
from .serving_sections.pacing import closed_loop
from .serving_sections.session import Session, say
from .serving_sections.traffic import Traffic

AIM_RATIO = 1.9
PAGES_PER_CLIENT = 16
"""At least: prompts and texts of the load take up to eight blocks."""
WARM_UP_S = 4.0


@dataclass(frozen=True)
class Measured:
    """One load."""

    tokens_per_s: float
    outcomes: list[Outcome]
    client_share: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    session = Session("load_tests.replicas", arguments, json_file=options.json, commit=options.commit)
    session.run("replicas", lambda section: replicas(section, options, session))
    return session.end()


def replicas(section: Section, options: argparse.Namespace, session: Session) -> None:
    """All replicas, then one; each with and without the router."""
    rates: dict[tuple[str, int], float] = {}
    with tempfile.TemporaryDirectory(prefix="replicas-") as folder:
        description = write_description(Path(folder) / options.shape, options.shape)
        say("starting Ray")
        with Host(mode=options.mode, num_gpus=options.replicas if options.device == "cuda" else 0) as host:
            for count, with_router in order(options):
                way = "router" if with_router else "no router"
                say(f"deploying {count} replicas, {way}")
                seconds = host.deploy(
                    settings(options, description),
                    timeout_s=options.start_timeout_s,
                    maker="random",
                    with_router=with_router,
                    num_replicas=count,
                )
                say(f"deployed in {seconds:.0f} s; measuring for {options.seconds:g} s")
                asyncio.run(wait_ready(host.url, 60.0))
                measured = measure(host.url, options, count)
                rates[way, count] = measured.tokens_per_s
                _add(section, way, count, seconds, measured)
                _add_ratio(section, way, rates, options.replicas)
                session.keep(section)
                say(f"{measured.tokens_per_s:,.0f} tokens/s")
            say("ending Ray")
    section.note(
        f"{options.clients} clients for each replica, prompts of {options.prompt_tokens[0]} to "
        f"{options.prompt_tokens[1]} tokens, {options.new_tokens[0]} to {options.new_tokens[1]} new, all steered and "
        f"explained, one token a pass; {options.shape} shape on {options.device}, HTTP: {options.mode}"
    )
    section.note(f"aim: {AIM_RATIO} times the tokens of one replica from {options.replicas}")


def order(options: argparse.Namespace) -> list[tuple[int, bool]]:
    """(replicas, with router) in the order that loads no engine twice: replicas only ever leave."""
    ways = {"both": [True, False], "on": [True], "off": [False]}[options.router]
    return [(options.replicas, way) for way in ways] + [(1, way) for way in reversed(ways) if options.replicas > 1]


def settings(options: argparse.Namespace, description: Path) -> dict[str, Any]:
    """The application's settings: as shipped, with room for the clients."""
    rows = options.max_rows or 2 * options.clients
    return {
        "model": str(description),
        "engine": {
            "device": options.device,
            "max_rows": rows,
            "max_lanes": options.clients + 2,
            "num_pages": (options.clients + 2) * PAGES_PER_CLIENT,
        },
        "engine_server": {
            "num_replicas": options.replicas,
            "ray_actor_options": {"num_cpus": 0, "num_gpus": 1 if options.device == "cuda" else 0},
            "warm_up_tokens": options.warm_up_tokens,
            "graceful_shutdown_timeout_s": 5.0,
        },
        # So that no event loop in front of the engines is what limits them.
        "ingress": {"num_replicas": options.ingresses},
    }


def measure(url: str, options: argparse.Namespace, count: int) -> Measured:
    """A closed loop from as many processes as there are replicas, so that none of them is short of a CPU."""
    # The first requests fill lanes that were empty and compile nothing, but find caches cold.
    context = get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=context) as pool:
        jobs = [pool.submit(_clients, url, options, number) for number in range(count)]
        results = [job.result(timeout=options.seconds + options.drain_timeout_s + 60) for job in jobs]
    outcomes = [outcome for found, _ in results for outcome in found]
    wrong = [outcome for outcome in outcomes if not outcome.is_ok]
    if not outcomes or len(wrong) > len(outcomes) / 20:
        raise RuntimeError(f"{len(wrong)} of {len(outcomes)} requests failed: {dict(figures.error_counts(outcomes))}")
    begin = max(found[0].sent for found, _ in results) + WARM_UP_S * min(1.0, options.seconds / 20)
    end = min(min(outcome.sent for outcome in found) for found, _ in results) + options.seconds
    return Measured(figures.rate(outcomes, begin, end), outcomes, max(share for _, share in results))


def _clients(url: str, options: argparse.Namespace, number: int) -> tuple[list[Outcome], float]:
    """One process's clients; returns what they saw, in order of sending, and the share of a CPU they took."""

    async def run() -> list[Outcome]:
        traffic = Traffic(
            prompt_tokens=options.prompt_tokens,
            new_tokens=options.new_tokens,
            steered_share=1.0,
            attributed_share=1.0,
            shared_share=0.0,
            seed=1000 * time.monotonic_ns() + number,
        )
        async with Client(url, timeout_s=options.seconds + options.drain_timeout_s) as client:
            answers = await closed_loop(
                client.send, traffic.bodies(), num_clients=options.clients, seconds=options.seconds
            )
        return sorted((answer.read() for answer in answers), key=lambda outcome: outcome.sent)

    with ClientCost() as cost:
        outcomes = asyncio.run(run())
    return outcomes, cost.share


def _add(section: Section, way: str, count: int, deployed_s: float, measured: Measured) -> None:
    waits = figures.waits(measured.outcomes)
    section.add(
        "",
        choice=way,
        replicas=count,
        tokens_per_s=measured.tokens_per_s,
        **{
            f"first_block_{name}_ms": 1e3 * percentile(waits["first block"], share)
            for name, share in (("p50", 0.5), ("p95", 0.95))
        },
        **{
            f"between_blocks_{name}_ms": 1e3 * percentile(waits["between blocks"], share)
            for name, share in (("p50", 0.5), ("p95", 0.95))
            if waits["between blocks"]
        },
        requests=len(measured.outcomes),
        failed=sum(not outcome.is_ok for outcome in measured.outcomes),
        client_cpu_share=measured.client_share,
        deployed_s=deployed_s,
    )


def _add_ratio(section: Section, way: str, rates: dict[tuple[str, int], float], most: int) -> None:
    if most > 1 and (way, 1) in rates and (way, most) in rates:
        ratio = rates[way, most] / rates[way, 1]
        verdict = "met" if ratio >= AIM_RATIO else "missed"
        section.add("over one replica", choice=way, replicas=most, over_one_ratio=ratio, aim=verdict)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--shape", choices=tuple(SHAPES), default="8b" if has_gpu else "tiny")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if has_gpu else "cpu")
    parser.add_argument("--replicas", type=int, default=max(2, torch.cuda.device_count()), help="one a GPU")
    parser.add_argument("--clients", type=int, default=16, help="for each replica (16)")
    parser.add_argument("--seconds", type=float, default=40.0, help="in which requests are sent, each time (40)")
    parser.add_argument("--prompt-tokens", type=interval, default=(60, 250), help="fewest and most (60,250)")
    parser.add_argument("--new-tokens", type=interval, default=(64, 256), help="fewest and most (64,256)")
    parser.add_argument(
        "--router", choices=("both", "on", "off"), default="both", help="with it, without it or both (both)"
    )
    parser.add_argument("--mode", choices=tuple(MODES), default="haproxy", help="how Ray Serve takes HTTP (haproxy)")
    parser.add_argument("--ingresses", type=int, default=2, help="replicas of the ingress (2)")
    parser.add_argument("--max-rows", type=int, help="of a pass (two for each client)")
    parser.add_argument("--warm-up-tokens", type=int, default=8, help="before a replica is ready (8)")
    parser.add_argument("--start-timeout-s", type=float, default=240.0, help="of each deployment (240)")
    parser.add_argument("--drain-timeout-s", type=float, default=60.0, help="for requests that were sent in time (60)")
    parser.add_argument("--commit", help="what is being measured, where no git can tell")
    parser.add_argument("--json", type=Path, help="write the JSON object here too, after every part")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
