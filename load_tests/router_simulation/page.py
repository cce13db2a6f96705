"""Tables and verdicts, made from the JSON alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..engine_sections.rendering import markdown_table, text_table, write_figures
from .study import MAIN_LOAD, PREFIX_ROUTERS, ROUTERS

Row = dict[str, Any]


def bars(result: dict[str, Any]) -> list[Row]:
    """What the router has to reach, and whether it does."""
    cells = result["balance"]
    main = [cell for cell in cells if cell["load"] == MAIN_LOAD and cell["arrivals"] == "Poisson"]
    largest = max(main, key=lambda cell: cell["replicas"])
    worst = max(main, key=lambda cell: cell["ratios"]["over_shortest_queue"]["mean"])
    everywhere = max(cells, key=lambda cell: cell["ratios"]["over_shortest_queue"]["mean"])
    perfect = largest["ratios"]["power_of_two_over"]
    old = largest["ratios"]["power_of_two_old_over"]
    rows = [
        _bar(
            f"p95 over shortest queue's, 80 %, worst: {worst['replicas']} replicas", worst, "over_shortest_queue", 1.02
        ),
        _bar(f"the same at any load, worst: {_name(everywhere)}", everywhere, "over_shortest_queue", 1.02),
        _row(f"power of two's p95 over it, {largest['replicas']} replicas, 80 %", perfect, 1.12, is_least=True),
        _row("the same with lengths 0.3 s old: more than that", old, perfect["mean"], is_least=True),
        _row(
            f"tokens a second at {result['overload']['load']:.0%} load over power of two's",
            result["overload"]["over_power_of_two"],
            1.0,
            is_least=True,
        ),
    ]
    for cell in result["prefixes"]:
        name = f"prefix hit rate over power of two's, {cell['system_prompts']}"
        rows.append(_row(name, cell["hits_over_power_of_two"], 2.0, is_least=True))
    return rows


def _name(cell: dict[str, Any]) -> str:
    return f"{cell['replicas']} replicas, {cell['load']:.0%}, {cell['arrivals']}"


def _bar(name: str, cell: dict[str, Any], ratio: str, limit: float) -> Row:
    return _row(name, cell["ratios"][ratio], limit, is_least=False)


def _row(name: str, ratio: dict[str, float], limit: float, *, is_least: bool) -> Row:
    is_met = ratio["mean"] >= limit if is_least else ratio["mean"] <= limit
    error = f" +- {ratio['error']:.3f}" if ratio.get("error") else ""
    return {
        "bar": name,
        "limit": f"{'>=' if is_least else '<='} {limit:.3f}",
        "measured": f"{ratio['mean']:.3f}{error}",
        "verdict": "met" if is_met else "**missed**",
    }


def tables(result: dict[str, Any]) -> list[tuple[str, list[Row]]]:
    """(title, rows) of everything."""
    found: list[tuple[str, list[Row]]] = [("Bars", bars(result))]
    for num_replicas in dict.fromkeys(cell["replicas"] for cell in result["balance"]):
        cells = [cell for cell in result["balance"] if cell["replicas"] == num_replicas]
        found.append((f"p95 of the time to the first block, {num_replicas} replicas", [_p95_row(c) for c in cells]))
    found.append(("The same as ratios, with standard errors over seeds", [_ratio_row(c) for c in result["balance"]]))
    found.append(("Shared system prompts, 80 % load", [r for c in result["prefixes"] for r in _prefix_rows(c)]))
    tokens = result["overload"]["tokens_per_s"]
    title = f"Tokens a second at {result['overload']['load']:.0%} load, {result['overload']['replicas']} replicas"
    found.append((title, [{"router": _words(name), "tokens_per_s": rate} for name, rate in tokens.items()]))
    return found


def _p95_row(cell: dict[str, Any]) -> Row:
    row: Row = {"load": f"{cell['load']:.0%}", "arrivals": cell["arrivals"]}
    return row | {f"{name}_ms": 1000 * cell["routers"][name]["first_block_p95_s"] for name in ROUTERS}


def _ratio_row(cell: dict[str, Any]) -> Row:
    row: Row = {name: cell[name] for name in ("replicas", "arrivals", "seeds", "requests")}
    row["load"] = f"{cell['load']:.0%}"
    for name, ratio in cell["ratios"].items():
        row[name] = f"{ratio['mean']:.3f} +- {ratio['error']:.3f}"
    row["refusals_per_request"] = cell["routers"]["block_router"]["refusals_per_request"]
    return row


def _prefix_rows(cell: dict[str, Any]) -> list[Row]:
    return [
        {
            "system prompts": cell["system_prompts"],
            "router": _words(name),
            "hit_share": figures["hit_share"],
            "first_block_p50_ms": 1000 * figures["first_block_p50_s"],
            "first_block_p95_ms": 1000 * figures["first_block_p95_s"],
            "total_mean_s": figures["total_mean_s"],
        }
        for name in PREFIX_ROUTERS
        for figures in [cell["routers"][name]]
    ]


def _words(name: str) -> str:
    return name.replace("_", " ")


def text(result: dict[str, Any]) -> str:
    """For a terminal."""
    lines: list[str] = []
    for title, rows in tables(result):
        lines += ["", title, "=" * len(title), *text_table(rows)]
    return "\n".join(lines)


def write_markdown(result: dict[str, Any], file: Path) -> None:
    """Write the figures between the marks of the page. Raises CannotWrite where it has none."""
    lines = [f"`{result['command']}`, {result['date']}, Python {result['python']}.", ""]
    rate = result["saturation_per_s"]
    lines += [
        f"One replica serves {rate:.2f} of these requests a second when its queue is never empty: 100 % load.",
        "",
    ]
    for title, rows in tables(result):
        lines += [f"### {title}", "", *markdown_table(rows), ""]
    write_figures("\n".join(lines), file)
