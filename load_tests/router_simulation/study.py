"""Which routers are run on which loads, and what is taken from each run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import Any

from .block_router import BlockRouter
from .routers import Ideal, PowerOfTwo, RoundRobin, ShortestQueue
from .workload import SimRequest, SystemPrompts, draw_requests
from .world import Deployment, Router, World

OLD_S = 0.3
ROUTERS: dict[str, Callable[[], Router]] = {
    "block_router": BlockRouter,
    "shortest_queue": ShortestQueue,
    "shortest_queue_old": lambda: ShortestQueue(OLD_S),
    "power_of_two": PowerOfTwo,
    "power_of_two_old": lambda: PowerOfTwo(OLD_S),
    "round_robin": RoundRobin,
    "ideal": Ideal,
}
PREFIX_ROUTERS = ("block_router", "power_of_two", "shortest_queue", "ideal")
SYSTEMS = {
    "256 prompts, popularity 1/k^0.8": SystemPrompts(num_prompts=256, zipf=0.8),
    "1,024 prompts, popularity 1/k^0.8": SystemPrompts(num_prompts=1024, zipf=0.8),
    "1,024 prompts, equally popular": SystemPrompts(num_prompts=1024),
    "4,096 prompts, popularity 1/k^0.8": SystemPrompts(num_prompts=4096, zipf=0.8),
}
"""All prompts together are 0.7, 2.7, 2.7 and 11 times what one replica's pages hold."""
LOADS = (0.6, 0.8, 0.95)
MAIN_LOAD = 0.8
OVERLOAD = 1.2

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is run."""

    num_replicas: tuple[int, ...] = (2, 8, 64)
    requests_per_run: int = 2000
    """Measured ones of a run, on average, or more. The time that passes follows from it."""
    main_seeds: int = 20
    """Runs of every router at 80 % load with Poisson arrivals."""
    other_seeds: int = 4
    """Runs of other loads."""
    prefix_seeds: int = 4
    prefix_replicas: int = 64
    overload_seeds: int = 4
    least_measured_s: float = 8.0
    warm_up_s: float = 5.0
    saturation_requests: int = 4000
    """From which the saturation rate is taken."""


FULL = Scale()
QUICK = Scale(num_replicas=(2, 8), requests_per_run=500, main_seeds=3, other_seeds=1, prefix_seeds=1, prefix_replicas=8)


@dataclass(frozen=True, kw_only=True)
class Load:
    """One deployment under one load."""

    deployment: Deployment
    rate: float
    measured_s: float
    warm_up_s: float
    is_bursty: bool = False

    def run(self, router: Router, seed: int) -> dict[str, float]:
        """What is measured: requests that arrive between warm-up and the last seconds, which keep the load up."""
        end_s = self.warm_up_s + self.measured_s
        requests = draw_requests(
            seed, self.rate, end_s + self.warm_up_s / 2, is_bursty=self.is_bursty, system=self.deployment.system
        )
        World(self.deployment, router, seed).run(requests)
        return measure(requests, self.warm_up_s, end_s)


def measure(requests: Sequence[SimRequest], begin_s: float, end_s: float) -> dict[str, float]:
    """Figures of a run that is over."""
    measured = [r for r in requests if begin_s <= r.arrival_s < end_s]
    first_s = sorted(r.first_block_s - r.arrival_s for r in measured if r.first_block_s is not None)
    total_s = [r.finished_s - r.arrival_s for r in measured if r.finished_s is not None]
    assert len(first_s) == len(total_s) == len(measured), "a request is not finished"
    tokens = sum(r.num_tokens for r in requests if r.finished_s is not None and begin_s <= r.finished_s < end_s)
    num_shared = sum(r.num_shared_blocks for r in measured)
    return {
        "num_requests": float(len(measured)),
        "first_block_p50_s": quantile(first_s, 0.5),
        "first_block_p95_s": quantile(first_s, 0.95),
        "total_mean_s": fmean(total_s) if total_s else 0.0,
        "tokens_per_s": tokens / (end_s - begin_s),
        "hit_share": sum(r.num_found_blocks for r in measured) / num_shared if num_shared else 0.0,
        "refusals_per_request": sum(r.num_refusals for r in measured) / max(len(measured), 1),
    }


def quantile(rising: Sequence[float], share: float) -> float:
    """The smallest value that so large a share does not exceed."""
    return rising[min(int(share * len(rising)), len(rising) - 1)] if rising else 0.0


def saturation_rate(system: SystemPrompts | None = None, num_requests: int = 4000) -> float:
    """Requests a second of one replica whose queue is never empty. What it has cached is left to chance."""
    requests = draw_requests(0, 1e6, num_requests / 1e6, system=system)
    for request in requests:
        request.arrival_s = 0.0
    World(Deployment(num_replicas=1, system=system), RoundRobin()).run(requests)
    ends_s = sorted(r.finished_s for r in requests if r.finished_s is not None)
    # Neither while the lanes fill for the first time nor while they run empty.
    first, last = len(ends_s) // 10, len(ends_s) * 9 // 10
    return (last - first) / (ends_s[last] - ends_s[first])


def load_of(
    scale: Scale, num_replicas: int, share: float, *, is_bursty: bool = False, system: SystemPrompts | None = None
) -> Load:
    """A share of the saturation rate of so many replicas."""
    rate = share * num_replicas * saturation_rate(system, scale.saturation_requests)
    measured_s = max(scale.requests_per_run / rate, scale.least_measured_s)
    return Load(
        deployment=Deployment(num_replicas=num_replicas, system=system),
        rate=rate,
        measured_s=measured_s,
        # Few replicas at high load take long to forget that they began empty.
        warm_up_s=max(scale.warm_up_s, measured_s / 5),
        is_bursty=is_bursty,
    )


def run_all(load: Load, names: Sequence[str], num_seeds: int) -> dict[str, list[dict[str, float]]]:
    """Every router on the same requests of each seed."""
    return {name: [load.run(ROUTERS[name](), seed) for seed in range(num_seeds)] for name in names}


def mean_of(runs: Sequence[dict[str, float]], figure: str) -> float:
    """The mean over seeds."""
    return fmean(run[figure] for run in runs)


def ratio_of(above: Sequence[dict[str, float]], below: Sequence[dict[str, float]], figure: str) -> tuple[float, float]:
    """Mean over seeds of a ratio of two routers' figures on the same requests, and its standard error."""
    ratios = [a[figure] / b[figure] for a, b in zip(above, below, strict=True)]
    return fmean(ratios), stdev(ratios) / sqrt(len(ratios)) if len(ratios) > 1 else 0.0


def balance(scale: Scale, progress: Progress) -> list[dict[str, Any]]:
    """Time to the first block, a cell for each number of replicas, load and kind of arrivals."""
    cells = []
    for num_replicas in scale.num_replicas:
        for share in LOADS:
            for is_bursty in (False, True):
                num_seeds = scale.main_seeds if share == MAIN_LOAD and not is_bursty else scale.other_seeds
                arrivals = "bursty" if is_bursty else "Poisson"
                progress(f"{num_replicas} replicas, load {share:.0%}, {arrivals}, {num_seeds} seeds")
                load = load_of(scale, num_replicas, share, is_bursty=is_bursty)
                cells.append(_cell(run_all(load, list(ROUTERS), num_seeds), num_replicas, share, arrivals, num_seeds))
    return cells


def _cell(
    runs: dict[str, list[dict[str, float]]], num_replicas: int, share: float, arrivals: str, num_seeds: int
) -> dict[str, Any]:
    ours = runs["block_router"]
    ratios = {
        "over_shortest_queue": ratio_of(ours, runs["shortest_queue"], "first_block_p95_s"),
        "power_of_two_over": ratio_of(runs["power_of_two"], ours, "first_block_p95_s"),
        "power_of_two_old_over": ratio_of(runs["power_of_two_old"], ours, "first_block_p95_s"),
        "tokens_over_power_of_two": ratio_of(ours, runs["power_of_two"], "tokens_per_s"),
    }
    return {
        "replicas": num_replicas,
        "load": share,
        "arrivals": arrivals,
        "seeds": num_seeds,
        "requests": int(sum(run["num_requests"] for run in ours)),
        "routers": {name: {figure: mean_of(found, figure) for figure in found[0]} for name, found in runs.items()},
        "ratios": {name: {"mean": mean, "error": error} for name, (mean, error) in ratios.items()},
    }


def overload(scale: Scale, progress: Progress) -> dict[str, Any]:
    """Tokens a second where more comes than can be served."""
    num_replicas = max(scale.num_replicas)
    progress(f"{num_replicas} replicas, load {OVERLOAD:.0%}, {scale.overload_seeds} seeds")
    load = load_of(scale, num_replicas, OVERLOAD)
    runs = run_all(load, list(ROUTERS), scale.overload_seeds)
    mean, error = ratio_of(runs["block_router"], runs["power_of_two"], "tokens_per_s")
    return {
        "replicas": num_replicas,
        "load": OVERLOAD,
        "seeds": scale.overload_seeds,
        "tokens_per_s": {name: mean_of(found, "tokens_per_s") for name, found in runs.items()},
        "over_power_of_two": {"mean": mean, "error": error},
    }


def prefixes(scale: Scale, progress: Progress) -> list[dict[str, Any]]:
    """How much of the shared system prompts is found cached, and what that is worth."""
    cells = []
    for name, system in SYSTEMS.items():
        progress(f"{scale.prefix_replicas} replicas, {name}, {scale.prefix_seeds} seeds")
        load = load_of(scale, scale.prefix_replicas, MAIN_LOAD, system=system)
        runs = run_all(load, PREFIX_ROUTERS, scale.prefix_seeds)
        hits, error = ratio_of(runs["block_router"], runs["power_of_two"], "hit_share")
        faster, faster_error = ratio_of(runs["power_of_two"], runs["block_router"], "first_block_p95_s")
        cells.append(
            {
                "system_prompts": name,
                "replicas": scale.prefix_replicas,
                "seeds": scale.prefix_seeds,
                "requests": int(sum(run["num_requests"] for run in runs["block_router"])),
                "routers": {r: {figure: mean_of(found, figure) for figure in found[0]} for r, found in runs.items()},
                "hits_over_power_of_two": {"mean": hits, "error": error},
                "power_of_two_over": {"mean": faster, "error": faster_error},
            }
        )
    return cells
