"""Sections `pass` and `parts`: a whole pass against its GEMMs and its floor, and what its parts cost."""

from __future__ import annotations

from typing import Any

import torch

from engine import SamplingParams
from engine.decoding import steering

from .bench import Bench
from .hardware import note_floor
from .loops import run_block, seal_prompts
from .report import Section, median, with_spread
from .timing import device_seconds

GREEDY = SamplingParams(seed=0, temperature=0.0)
VARIANTS: dict[str, dict[str, Any]] = {
    "all on": {},
    "attribution off": {"attribution": None},
    "steering off": {"steering": None},
    "both off": {"attribution": None, "steering": None},
    "greedy": {"sampling": GREEDY},
}


def passes(bench: Bench, section: Section) -> None:
    """Running requests fill a block: time on the device and of the engine's step."""
    for keys in bench.keys:
        for rows in bench.rows:
            section.say(f"{rows} rows x {keys} keys")
            # Before and after, because clocks follow the load: a burst of GEMMs on a cool device is faster.
            before = bench.fresh_gemms(rows)
            block = bench.block(rows, keys)
            gemms_s, floor = median(before + bench.fresh_gemms(rows)), bench.floor(rows)
            # Without graphs nothing tells the device's time apart.
            pass_s = median(block.device_s) if block.has_device else median(block.step_s)
            section.add(
                "",
                rows=rows,
                keys=keys,
                **with_spread("device_ms", block.device_s, 1e3),
                **with_spread("step_ms", block.step_s, 1e3),
                idle_share=max(0.0, 1 - pass_s / median(block.step_s)) if block.has_device else None,
                gemms_ms=1e3 * gemms_s,
                over_gemms_ratio=pass_s / gemms_s,
                floor_ms=1e3 * floor.seconds,
                over_floor_ratio=pass_s / floor.seconds,
                peak_share=bench.operations(rows) / pass_s / bench.flop_per_s,
            )
    note_floor(bench, section)
    section.note("GEMMs: measured right before and after the pass, at the clocks that the device then has")
    section.note("step: one Engine.step of running requests, host included; every request steered and explained")
    if bench.is_gpu and not bench.options.no_graphs:
        section.note(
            "device: the pass's captured graphs (steering, layers, sampler, commits), by events; ratios use it; "
            "explaining is in the step and in the section parts"
        )
        section.note("idle: 1 - device / step, so explaining and copies count as idle")
    else:
        section.note("no device time without captured graphs: ratios use the step")
    peak = "the stated 750 TFLOP/s" if bench.is_gpu else "the measured rate"
    section.note(f"peak: the GEMMs' operations over the pass's time, as a share of {peak}")


def parts(bench: Bench, section: Section) -> None:
    """The same requests with parts left out, in turns, over whole blocks, so that batched explaining is counted."""
    keys = bench.few_keys()
    num_rounds = 3 + 2 * bench.repeats if bench.is_gpu else 1 + bench.repeats
    for rows in [rows for rows in bench.rows if rows in (1, 4, 16)]:
        seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
        for turn in range(num_rounds):
            for name, choices in VARIANTS.items():
                section.say(f"{rows} rows, {name}, round {turn + 1} of {num_rounds}")
                requests = [bench.load.block_request(row, keys, **choices) for row in range(rows)]
                if turn == 0:
                    seal_prompts(bench.engine, requests)
                seconds[name].append(run_block(bench.engine, requests, bench.replays()).whole_s)
        always_s = always_there(bench, rows)
        for name, values in seconds.items():
            # Of one round each, so that a clock that drifts does not count.
            saved = [1 - less / full for less, full in zip(values, seconds["all on"], strict=True)]
            is_bare = name == "both off"
            section.add(
                "",
                rows=rows,
                variant=name,
                **with_spread("mean_step_ms", values, 1e3),
                **with_spread("saved_share", saved),
                standing_us=1e6 * always_s if is_bare else None,
                concepts_share=median(saved) + always_s / median(seconds["all on"]) if is_bare else None,
            )
    section.note("standing: the sums of steering vectors, which every pass makes, whoever asks for them")
    section.note("concepts: what both off saves, plus standing, as a share of all on")
    section.note(f"{keys} keys; mean over whole blocks; saved: against all on in the same round")


@torch.no_grad()
def always_there(bench: Bench, rows: int) -> float:
    """Seconds of the steering work that stands in every pass, also of requests that do not steer."""
    lanes = bench.engine.runner.lanes
    chosen = slice(0, rows)

    def work() -> None:
        steering.added_by_layer(
            lanes.vector_NGD[chosen],
            lanes.layer_NG[chosen],
            lanes.cutoff_NG[chosen],
            lanes.num_committed_N[chosen],
            bench.config.n_layers,
        )

    return median(device_seconds(work, bench.device))
