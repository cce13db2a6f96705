"""Draw docs/policies.png from policy_quality.json: loss against passes per block, a line a policy.

    python -m demo_model.plot_policies

Needs matplotlib, which nothing else does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .policy_page import NAMES

HERE = Path(__file__).parent
MARKERS = dict(zip(NAMES, "osD^", strict=True))
OFFSETS = dict(zip(NAMES, ((6, 3), (-6, 8), (4, -13), (-6, -14)), strict=True))
"""Where a point's parameter stands, in typographic points, so that neighbours do not cover each other."""
CROWD = 48
"""From so many passes on, points lie so close that they get a panel of their own."""


def draw(axes: Axes, rows: list[dict[str, Any]], *, is_crowd: bool) -> None:
    """One panel: every policy's line; the points of the other panel have no labels."""
    for policy, marker in MARKERS.items():
        own = sorted((row for row in rows if row["policy"] == policy), key=lambda row: row["passes_per_block"])
        axes.errorbar(
            [row["passes_per_block"] for row in own],
            [row["loss"] for row in own],
            yerr=None if is_crowd else [row["loss_error"] for row in own],
            marker=marker,
            markersize=5,
            capsize=2,
            linewidth=1.2,
            label=policy,
        )
        for row in own:
            if (row["passes_per_block"] >= CROWD) == is_crowd:
                place = row["passes_per_block"], row["loss"]
                axes.annotate(f"{row['value']:g}", place, OFFSETS[policy], textcoords="offset points", fontsize=8)
    axes.set_xlabel("denoising passes per block of 64 tokens")
    axes.grid(alpha=0.3)


def main(source: Path = HERE / "policy_quality.json", target: Path = HERE.parent / "docs" / "policies.png") -> None:
    matplotlib.use("agg")
    rows = json.loads(source.read_text(encoding="utf-8"))["rows"]
    figure = Figure(figsize=(9.5, 4), layout="constrained")
    whole, crowd = figure.subplots(1, 2)
    draw(whole, rows, is_crowd=False)
    whole.set_xscale("log", base=2)
    ticks = [8, 16, 32, 64]
    whole.set_xticks(ticks, [str(tick) for tick in ticks])
    whole.set_ylabel("loss, left to right (nats); lower is better")
    whole.set_title("all settings, with standard errors", fontsize=10)
    whole.legend(title="policy; points by parameter", fontsize=8, title_fontsize=8)
    draw(crowd, rows, is_crowd=True)
    careful = [row for row in rows if row["passes_per_block"] >= CROWD]
    losses, error = [row["loss"] for row in careful], max(row["loss_error"] for row in careful)
    crowd.set_xlim(CROWD, 65.5)
    crowd.set_ylim(min(losses) - 0.05, max(losses) + 0.1)
    crowd.set_title(f"the careful end; standard errors are {error:.2f} at most", fontsize=10)
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main()
