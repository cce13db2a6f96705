"""Sections `serve` and `prefill`: what clients see."""

from __future__ import annotations

from typing import Any

from engine import BlockStarted, Engine

from .bench import Bench
from .loops import Driver, Served, closed_loop, drain, open_loop, seconds_to_canvas
from .report import NotAvailable, Row, Section, median, tail, with_spread

LONG_PROMPT = 4000
STEPS_TO_REST = 40
"""Engine steps between the canvas of one long prompt and the arrival of the next."""


def serve(bench: Bench, section: Section) -> None:
    """Closed loop, open loop, and lockstep against independent requests."""
    most = max(bench.clients)
    requests_per_s = 0.0
    for clients in bench.clients:
        runs = [_closed(bench, section, clients, repeat) for repeat in range(bench.repeats)]
        section.add(
            "closed loop",
            clients=clients,
            **with_spread("tokens_per_s", [run.tokens_per_s for run in runs]),
            **_latencies(runs),
        )
        if clients == most:
            mean_tokens = sum(run.num_tokens for run in runs) / sum(run.num_requests for run in runs)
            requests_per_s = median([run.tokens_per_s for run in runs]) / mean_tokens
    _open(bench, section, requests_per_s)
    low, high = bench.load.prompt_tokens
    fewest, longest = bench.load.new_tokens
    section.note(f"prompts of {low} to {high} tokens, {fewest} to {longest} new, one token a pass, steered, explained")
    section.note("tokens/s of a closed loop: while all clients had a request running")
    section.note("idle: share of the time in which no captured graph ran; copies count as idle")
    try:
        lockstep(bench, section)
    except NotAvailable as error:
        section.note(f"lockstep against independent: {error}")


def _closed(bench: Bench, section: Section, clients: int, repeat: int) -> Served:
    section.say(f"closed loop, {clients} clients, run {repeat + 1} of {bench.repeats}")
    requests = bench.load.served(max(bench.requests, 2 * clients), seed=1000 * clients + repeat)
    return closed_loop(bench.engine, requests, clients, bench.replays())


def _open(bench: Bench, section: Section, full_requests_per_s: float) -> None:
    most, share = max(bench.clients), bench.options.arrival_share
    rate = share * full_requests_per_s
    count = max(bench.requests, 2 * most)
    section.say(f"open loop, {count} requests at {rate:.2f} a second, {count / rate:.0f} s")
    requests = bench.load.served(count, seed=77)
    served = open_loop(bench.engine, requests, rate, bench.replays())
    section.add(
        "open loop",
        arrivals_per_s=rate,
        requests=count,
        tokens_per_s=served.num_tokens / served.seconds,
        **_latencies([served]),
    )
    section.note(
        f"open loop: Poisson arrivals of a fixed seed at {share:g} of the closed loop's rate with {most} clients, "
        "from arrival to the end of the last one"
    )


def _latencies(runs: list[Served]) -> Row:
    idle = [run.idle_share for run in runs if run.idle_share is not None]
    return {
        **tail("first_block", [value for run in runs for value in run.first_block_s]),
        **tail("between_blocks", [value for run in runs for value in run.between_blocks_s]),
        **tail("last_block", [value for run in runs for value in run.last_block_s]),
        "idle_share": median(idle) if idle else None,
    }


def lockstep(bench: Bench, section: Section) -> None:
    """Four requests at a time whose tokens_per_step is 1, 2 or 4: all wait at each block, or nobody does."""
    clients = 4
    changes: dict[str, Any] = {"max_rows": 2 * clients, "max_lanes": clients}
    tokens_per_s: dict[str, list[float]] = {}
    for batching in ("independent", "lockstep"):
        section.say(f"{clients} requests, {batching}")
        engine = bench.make_engine(batching=batching, **changes)
        for repeat in range(bench.repeats):
            requests = bench.load.served(max(bench.requests, 4 * clients), 500 + repeat, (1, 2, 4))
            served = closed_loop(engine, requests, clients, bench.replays())
            tokens_per_s.setdefault(batching, []).append(served.tokens_per_s)
    section.note("lockstep wastes rows, so it costs where a pass of fewer rows is not shorter in proportion: on a GPU")
    slow = median(tokens_per_s["lockstep"])
    for batching, values in tokens_per_s.items():
        section.add(
            "four requests, 1, 2 or 4 tokens a step",
            batching=batching,
            **with_spread("tokens_per_s", values),
            over_lockstep_ratio=median(values) / slow,
        )


def prefill(bench: Bench, section: Section) -> None:
    """Tokens of long prompts a second, and what running requests notice of one."""
    block_size, context = bench.config.diff_block_size, bench.config.block_size
    longest = min(LONG_PROMPT, context - block_size) // block_size * block_size
    for length in sorted({min(1024, longest // 2 // block_size * block_size), longest}):
        for count in (1, 4):
            seconds = []
            for repeat in range(2 + bench.repeats):
                section.say(f"{count} prompts of {length} tokens, run {repeat + 1}")
                seeds = [10_000_000 + length * 1000 + count * 100 + 10 * repeat + n for n in range(count)]
                prompts = [bench.load.tokens(seed, length) for seed in seeds]
                requests = [bench.load.request(prompt, 1, n) for n, prompt in enumerate(prompts)]
                seconds.append(seconds_to_canvas(bench.engine, requests))
            # The first run pays for what later ones find ready.
            seconds = seconds[1:]
            section.add(
                "prompts alone",
                prompts=count,
                prompt_tokens=length,
                **with_spread("to_canvas_ms", seconds, 1e3),
                tokens_per_s=count * length / median(seconds),
            )
    num_running = min(8, max(bench.clients))
    num_new = min(max(2 * bench.load.new_tokens[1], 3 * block_size), context - 2 * block_size)
    for has_arrivals in (False, True):
        section.say(f"{num_running} running requests, long prompts {'arrive' if has_arrivals else 'do not arrive'}")
        served, num_arrived = _running_beside(bench, num_running, num_new, longest if has_arrivals else None)
        section.add(
            "running requests",
            long_prompts=num_arrived,
            running=num_running,
            **tail("between_blocks", served.between_blocks_s),
            **tail("step", served.step_s),
            longest_step_ms=1e3 * max(served.step_s),
        )
    section.note(f"running requests: prompts of 128 tokens, {num_new} new; long prompts have {longest} tokens")


def _running_beside(bench: Bench, running: int, num_new: int, long_prompt: int | None) -> tuple[Served, int]:
    """What running requests see, long prompts arriving one after another or none; and how many arrived."""
    engine: Engine = bench.engine
    driver = Driver(engine)
    prompts = [bench.load.tokens(20_000_000 + 100 * (long_prompt or 0) + n, 128) for n in range(running)]
    ours = {driver.send(bench.load.request(prompt, num_new, n)) for n, prompt in enumerate(prompts)}
    longs: set[str] = set()
    num_steps, next_arrival, num_arrived = 0, STEPS_TO_REST, 0
    while ours & driver.running.keys():
        if long_prompt is not None and num_steps >= next_arrival and not longs:
            prompt = bench.load.tokens(30_000_000 + num_arrived, long_prompt)
            longs = {driver.send(bench.load.request(prompt, 1, num_arrived))}
            num_arrived += 1
        for event in driver.step():
            if isinstance(event, BlockStarted) and event.request_id in longs:
                longs, next_arrival = set(), num_steps + STEPS_TO_REST
        num_steps += 1
    drain(engine)
    return driver.served, num_arrived
