"""Section `memory`: what lies in memory, and that a mixed load compiles nothing."""

from __future__ import annotations

import random
import resource
from dataclasses import replace
from typing import Any, get_args

import torch

from engine import Engine, GenerateRequest, SamplingParams, request
from engine.runner.kv_cache import page_bytes

from .bench import Bench
from .loops import closed_loop
from .report import Section

GIGABYTE = 1e9
MEGABYTE = 1e6


def memory(bench: Bench, section: Section) -> None:
    """Sizes first, then a load of every kind of request."""
    engine, device = bench.engine, bench.device
    weights = sum(p.numel() * p.element_size() for p in bench.model.parameters())
    lanes = lane_bytes(engine)
    page = page_bytes(bench.config, bench.dtype)
    section.add(
        "sizes",
        weights_gb=weights / GIGABYTE,
        lane_mb=lanes / MEGABYTE,
        lanes=engine.config.num_lanes,
        page_mb=page / MEGABYTE,
        pages=engine.runner.cache.num_pages,
        cache_gb=page * engine.runner.cache.num_pages / GIGABYTE,
    )
    section.note("lane: all that a running request keeps on the device beside its pages; what concepts need is in it")
    if bench.is_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    before = bench.compiles.count
    for round_number, clients in enumerate(bench.clients):
        section.say(f"mixed load, {clients} clients")
        count = max(bench.requests, 2 * clients)
        closed_loop(engine, mixed_requests(bench, count, round_number), clients, bench.replays())
    section.add("mixed load", compiled=bench.compiles.count - before, **_peak(bench))
    policies = ", ".join(get_args(request.Policy))
    section.note(
        f"mixed load: steered and not, explained and not, greedy and sampled, 1, 2 or 4 tokens a step, policies "
        f"{policies}; compiled: Triton kernels, traced graphs and graph breaks in it"
    )


def lane_bytes(engine: Engine) -> float:
    """Bytes of the lanes' tensors for each request that may run; the idle lane is shared out among them."""
    tensors = [value for value in vars(engine.runner.lanes).values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / engine.config.num_lanes


def mixed_requests(bench: Bench, count: int, seed: int) -> list[GenerateRequest]:
    """A served load in which every option is drawn."""
    drawn = random.Random(seed)
    requests = []
    for item in bench.load.served(count, 900 + seed):
        choices: dict[str, Any] = {"policy": drawn.choice(get_args(request.Policy))}
        if choices["policy"] == "confidence":
            choices["tokens_per_step"] = drawn.choice((1, 2, 4))
        if drawn.random() < 0.5:
            choices["temperature"] = 0.0
        sampling = SamplingParams(seed=item.sampling.seed, ignore_eos=True, **choices)
        changes: dict[str, Any] = {"sampling": sampling}
        if drawn.random() < 0.5:
            changes["steering"] = None
        if drawn.random() < 0.5:
            changes["attribution"] = None
        requests.append(replace(item, **changes))
    return requests


def _peak(bench: Bench) -> dict[str, float]:
    if not bench.is_gpu:
        kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"peak_of_process_gb": kibibytes * 1024 / GIGABYTE}
    free, total = torch.cuda.mem_get_info(bench.device)
    return {
        "peak_allocated_gb": torch.cuda.max_memory_allocated(bench.device) / GIGABYTE,
        "peak_reserved_gb": torch.cuda.max_memory_reserved(bench.device) / GIGABYTE,
        "used_on_gpu_gb": (total - free) / GIGABYTE,
    }
