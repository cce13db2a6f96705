"""A load on a running server: closed loop, open loop, or both, with a mix of every kind of request.

    python -m load_tests.serve_load http://127.0.0.1:8000
    python -m load_tests.serve_load URL --loop closed --clients 32 --seconds 60
    python -m load_tests.serve_load URL --loop open --rate 4 --policies confidence,lossless,threshold --shared 0.8

Closed loop: so many clients, each sends its next request when its last one has ended. Open loop: requests arrive at
random moments of a constant rate (a Poisson process of a fixed seed), however slow the answers are; without --rate, at
0.7 of what the closed loop reached. Waits count from the moment at which a request was due.

Progress goes to standard error; standard output gets tables and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import aiohttp

from engine import Policy

from .engine_sections.report import NotAvailable, Section
from .options import interval, some_of
from .serving_sections import figures
from .serving_sections.client import Answer, Client, Outcome, wait_ready
from .serving_sections.cost import ClientCost
from .serving_sections.pacing import arrivals, closed_loop, open_loop
from .serving_sections.session import Session
from .serving_sections.traffic import Traffic

LOOPS = {"closed": True, "open": True}
READY_TIMEOUT_S = 30.0
BUSY_CLIENT = 0.7
"""Share of a CPU above which the client's own time is in the figures."""
OPEN_SHARE = 0.7


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen loops; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    session = Session("load_tests.serve_load", arguments, json_file=options.json, commit=options.commit)
    session.run("load", lambda section: asyncio.run(load(section, options)))
    return session.end()


async def load(section: Section, options: argparse.Namespace) -> None:
    """One loop after the other on one server."""
    section.say(f"waiting for {options.url}")
    await wait_ready(options.url, READY_TIMEOUT_S)
    traffic = await mix(options)
    rate = options.rate
    async with Client(options.url, timeout_s=options.timeout_s) as client:
        if "closed" in options.loop:
            section.say(f"closed loop, {options.clients} clients, {options.seconds:g} s")
            with ClientCost() as cost:
                answers = await closed_loop(
                    client.send, traffic.bodies(), num_clients=options.clients, seconds=options.seconds
                )
            outcomes = _show(section, f"closed loop, {options.clients} clients", answers, cost.share)
            took = max(item.ended for item in outcomes) - min(item.sent for item in outcomes)
            rate = rate or OPEN_SHARE * sum(item.is_ok for item in outcomes) / took
        if "open" in options.loop:
            if not rate:
                raise NotAvailable("the open loop needs a --rate, or a closed loop before it that served something")
            section.say(f"open loop, {rate:.2f} requests a second, {options.seconds:g} s")
            moments = arrivals(rate, options.seconds, options.seed)
            with ClientCost() as cost:
                answers = await open_loop(client.send, traffic.bodies(first=1_000_000), moments)
            _show(section, f"open loop, {rate:.2f} requests/s", answers, cost.share)
    section.note(
        f"prompts of {traffic.prompt_tokens[0]} to {traffic.prompt_tokens[1]} tokens, {traffic.shared_share:.0%} "
        f"behind one of {traffic.num_shared} system prompts of {traffic.shared_tokens}; {traffic.new_tokens[0]} to "
        f"{traffic.new_tokens[1]} new; {traffic.steered_share:.0%} steered, {traffic.attributed_share:.0%} explained; "
        f"policies {', '.join(traffic.policies)}"
    )
    section.note("cut: streams that began and ended without their end marker")
    section.note("prompts are token ids: the server puts texts together, but takes none apart")


def _show(section: Section, loop: str, answers: list[Answer], client_share: float) -> list[Outcome]:
    outcomes = [answer.read() for answer in answers]
    figures.describe(section, outcomes, loop=loop, client_cpu_share=client_share)
    if client_share > BUSY_CLIENT:
        section.note(f"{loop}: the client used {client_share:.0%} of a CPU, so it may have been late itself")
    return outcomes


async def mix(options: argparse.Namespace) -> Traffic:
    """The traffic asked for, steered by concepts that the server has."""
    concepts: list[int] = []
    if options.steered > 0:
        timeout = aiohttp.ClientTimeout(total=READY_TIMEOUT_S)
        query = {"head": "known", "steerable": "true", "limit": "32"}
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(options.url.rstrip("/") + "/v1/concepts", params=query) as response,
        ):
            concepts = [item["id"] for item in (await response.json())["data"]]
    return Traffic(
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        policies=options.policies,
        steered_share=options.steered if concepts else 0.0,
        attributed_share=options.explained,
        concepts=concepts or (0,),
        shared_share=options.shared,
        num_shared=options.system_prompts,
        shared_tokens=options.system_tokens,
        seed=options.seed,
    )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="where the server is")
    parser.add_argument("--loop", type=some_of(LOOPS), default=tuple(LOOPS), help="closed, open or both")
    parser.add_argument("--clients", type=int, default=8, help="of the closed loop (8)")
    parser.add_argument("--rate", type=float, help="requests a second of the open loop")
    parser.add_argument("--seconds", type=float, default=30.0, help="in which requests are sent, for each loop (30)")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="of one request (600)")
    parser.add_argument("--prompt-tokens", type=interval, default=(60, 250), help="fewest and most (60,250)")
    parser.add_argument("--new-tokens", type=interval, default=(64, 256), help="fewest and most (64,256)")
    parser.add_argument("--policies", type=some_of(get_args(Policy)), default=("confidence",))
    parser.add_argument("--steered", type=share, default=0.5, help="share of requests (0.5)")
    parser.add_argument("--explained", type=share, default=0.5, help="share of requests with attributions (0.5)")
    parser.add_argument("--shared", type=share, default=0.5, help="share that begins with a system prompt (0.5)")
    parser.add_argument("--system-prompts", type=int, default=4, help="how many there are (4)")
    parser.add_argument("--system-tokens", type=int, default=128, help="tokens of each (128)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="what is being measured, where no git can tell")
    parser.add_argument("--json", type=Path, help="write the JSON object here too")
    return parser.parse_args(arguments)


def share(text: str) -> float:
    """A number from 0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} must be from 0 to 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
