"""`glassblock bench`: what a server gives under a steady number of clients. Closed loop: a client asks again at once.

For a server's behaviour under an arrival rate it does not set, see `load_tests/serve_load.py`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from statistics import quantiles
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from .api_client import ApiClient, ApiFailure
from .asking import request_body
from .generating import COMPLETIONS


@dataclass(frozen=True, slots=True)
class Sample:
    """One request, as its client saw it."""

    seconds: float
    first_text_s: float
    """Until the first text."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Result:
    """All requests of a run."""

    clients: int
    requests: int
    failed: int
    seconds: float
    tokens_per_s: float
    requests_per_s: float
    first_text_p50_s: float | None
    first_text_p95_s: float | None
    request_p50_s: float | None
    request_p95_s: float | None


def bench(options: argparse.Namespace, client: ApiClient, console: Console) -> int:
    """Measure and print; returns the exit status, 1 if a request failed."""
    shared = {"prompt": options.prompt, **request_body(options)}
    samples: list[Sample] = []
    failures: list[str] = []
    started = time.monotonic()
    with Progress(console=console, transient=True, disable=options.json) as progress:
        task = progress.add_task(f"{options.clients} clients", total=options.requests)
        pool = ThreadPoolExecutor(options.clients)
        try:
            # A seed each: the same text again would come from the prefix cache.
            bodies = [{**shared, "seed": (options.seed or 0) + number} for number in range(options.requests)]
            for done in as_completed([pool.submit(_ask, client, body) for body in bodies]):
                progress.advance(task)
                try:
                    samples.append(done.result())
                except ApiFailure as failure:
                    failures.append(str(failure))
        finally:
            # After Ctrl-C the requests that wait are not to be sent, nor those under way waited for.
            pool.shutdown(wait=False, cancel_futures=True)
    result = summarise(samples, len(failures), options.clients, time.monotonic() - started)
    if options.json:
        print(json.dumps(asdict(result)))
    else:
        console.print(_table(result))
    for text in dict.fromkeys(failures):
        Console(stderr=True).print(f"{failures.count(text)} failed: {text}", style="red", markup=False)
    return 1 if failures else 0


def summarise(samples: Sequence[Sample], failed: int, clients: int, seconds: float) -> Result:
    """The figures of a run; None where no request gave one."""
    num_tokens = sum(sample.num_tokens for sample in samples)
    first, whole = [s.first_text_s for s in samples], [s.seconds for s in samples]
    return Result(
        clients=clients,
        requests=len(samples) + failed,
        failed=failed,
        seconds=seconds,
        tokens_per_s=num_tokens / seconds,
        requests_per_s=len(samples) / seconds,
        first_text_p50_s=percentile(first, 50),
        first_text_p95_s=percentile(first, 95),
        request_p50_s=percentile(whole, 50),
        request_p95_s=percentile(whole, 95),
    )


def percentile(values: Sequence[float], percent: int) -> float | None:
    """Linear between the two nearest values; None without any."""
    if len(values) < 2:
        return values[0] if values else None
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def _ask(client: ApiClient, body: dict[str, Any]) -> Sample:
    started = time.monotonic()
    first: float | None = None
    num_tokens = 0
    for chunk in client.stream(COMPLETIONS, {**body, "stream_options": {"include_usage": True}}):
        if first is None and any(choice.get("text") for choice in chunk.get("choices", ())):
            first = time.monotonic() - started
        if chunk.get("usage"):
            num_tokens = chunk["usage"]["completion_tokens"]
    seconds = time.monotonic() - started
    return Sample(seconds, seconds if first is None else first, num_tokens)


def _table(result: Result) -> Table:
    table = Table(title=f"{result.requests} requests by {result.clients} clients", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    rows = (
        ("tokens a second", f"{result.tokens_per_s:.1f}"),
        ("requests a second", f"{result.requests_per_s:.2f}"),
        ("to the first text, p50", _milliseconds(result.first_text_p50_s)),
        ("to the first text, p95", _milliseconds(result.first_text_p95_s)),
        ("whole request, p50", _milliseconds(result.request_p50_s)),
        ("whole request, p95", _milliseconds(result.request_p95_s)),
        ("failed", str(result.failed)),
    )
    for row in rows:
        table.add_row(*row)
    return table


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.0f} ms"
