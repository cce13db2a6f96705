"""Pictures of the JSON. Needs matplotlib, which nothing else does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

LINES = {
    "round_robin": ("round robin", "C7", "v", "--"),
    "shortest_queue_old": ("shortest queue, 0.3 s old", "C2", "s", "--"),
    "power_of_two_old": ("power of two, 0.3 s old", "C1", "o", "--"),
    "power_of_two": ("power of two", "C1", "o", "-"),
    "shortest_queue": ("shortest queue", "C2", "s", "-"),
    "ideal": ("ideal", "black", "x", ":"),
    "block_router": ("block router", "C0", "D", "-"),
}
"""Label, colour, marker and stroke of each; the last drawn lies on top."""


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write routing.png and routing_prefixes.png."""
    matplotlib.use("agg")
    return [_balance(result, folder / "routing.png"), _prefixes(result, folder / "routing_prefixes.png")]


def _balance(result: dict[str, Any], target: Path) -> Path:
    cells = [cell for cell in result["balance"] if cell["arrivals"] == "Poisson"]
    sizes = sorted({cell["replicas"] for cell in cells})
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    panels = figure.subplots(1, len(sizes), squeeze=False)[0]
    for axes, num_replicas in zip(panels, sizes, strict=True):
        _panel(axes, [cell for cell in cells if cell["replicas"] == num_replicas])
        axes.set_title(f"{num_replicas} replicas", fontsize=10)
    panels[0].set_ylabel("p95 of the time to the first block (s)")
    figure.legend(*panels[-1].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(target, dpi=110)
    return target


def _panel(axes: Axes, cells: list[dict[str, Any]]) -> None:
    loads = [100 * cell["load"] for cell in cells]
    for name, (label, color, marker, stroke) in LINES.items():
        seconds = [cell["routers"][name]["first_block_p95_s"] for cell in cells]
        axes.plot(
            loads, seconds, label=label, color=color, marker=marker, markersize=5, linewidth=1.2, linestyle=stroke
        )
    axes.set_yscale("log")
    lowest, highest = axes.get_ylim()
    ticks = [tick for tick in (0.3, 0.4, 0.5, 0.7, 1, 1.5, 2, 3, 5) if lowest <= tick <= highest]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.set_xticks(loads, [f"{load:.0f}" for load in loads])
    axes.set_xlabel("load (% of saturation)")
    axes.grid(alpha=0.3)


def _prefixes(result: dict[str, Any], target: Path) -> Path:
    cells = result["prefixes"]
    names = ("power_of_two", "shortest_queue", "block_router", "ideal")
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    hits, times = figure.subplots(1, 2)
    for offset, name in enumerate(names):
        label, color, _, _ = LINES[name]
        places = [group + (offset - 1.5) * 0.2 for group in range(len(cells))]
        figures = [cell["routers"][name] for cell in cells]
        hits.bar(places, [100 * f["hit_share"] for f in figures], width=0.19, color=color, label=label)
        times.bar(places, [f["first_block_p95_s"] for f in figures], width=0.19, color=color)
    labels = [cell["system_prompts"].replace(", ", "\n").replace("popularity ", "popularity\n") for cell in cells]
    for axes in (hits, times):
        axes.set_xticks(range(len(cells)), labels, fontsize=8)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    hits.set_ylabel("system prompt blocks found cached (%)")
    times.set_ylabel("p95 of the time to the first block (s)")
    figure.legend(*hits.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(target, dpi=110)
    return target
