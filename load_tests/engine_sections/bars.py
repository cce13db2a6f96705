"""What the engine is meant to reach on one H200 with the 8B shape in bfloat16, and whether a run did.

Each bar reads one figure of the JSON line. Several sections may have to be merged before all can be judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Sections = dict[str, Any]


@dataclass(frozen=True)
class Bar:
    """One figure with a limit."""

    name: str
    section: str
    limit: float
    unit: str
    is_least: bool
    """The figure has to be at least the limit; otherwise at most."""
    aim: float | None
    value: Callable[[Sections], float | None]

    def is_met(self, value: float) -> bool:
        """True when a figure reaches the limit."""
        return value >= self.limit if self.is_least else value <= self.limit


def rows_of(sections: Sections, section: str, table: str = "", **wanted: Any) -> Iterator[dict[str, Any]]:
    """Rows of one table in which each of the wanted figures has the wanted value."""
    for known in sections.get(section, {}).get("tables", []):
        if known["name"] == table:
            yield from (row for row in known["rows"] if all(row.get(key) == v for key, v in wanted.items()))


def _figure(section: str, figure: str, table: str = "", **wanted: Any) -> Callable[[Sections], float | None]:
    def value(sections: Sections) -> float | None:
        return next((row.get(figure) for row in rows_of(sections, section, table, **wanted)), None)

    return value


def _largest(section: str, figure: str, **wanted: Any) -> Callable[[Sections], float | None]:
    """The largest over a table's rows, for a bar that holds for all of them."""

    def value(sections: Sections) -> float | None:
        found = [row[figure] for row in rows_of(sections, section, **wanted) if row.get(figure) is not None]
        return max(found, default=None)

    return value


def _over_gemms_up_to_16(sections: Sections) -> float | None:
    found = {row["rows"]: row.get("over_gemms_ratio") for row in rows_of(sections, "pass", keys=256)}
    ratios = [found.get(rows) for rows in (1, 2, 3, 4, 8, 16)]
    known = [ratio for ratio in ratios if ratio is not None]
    return max(known) if len(known) == len(ratios) else None


def _recompilations(sections: Sections) -> float | None:
    """Of every section that ran; judged once the mixed load of `memory` is among them."""
    if sections.get("memory", {}).get("status") != "ok":
        return None
    return float(sum(section.get("recompilations", 0) for section in sections.values()))


BARS = (
    Bar("pass over its GEMMs, 1 to 16 rows, 256 keys", "pass", 1.15, "x", False, 1.06, _over_gemms_up_to_16),
    Bar(
        "pass over its GEMMs, 1 row, 4096 keys",
        "pass",
        1.30,
        "x",
        False,
        1.15,
        _figure("pass", "over_gemms_ratio", rows=1, keys=4096),
    ),
    Bar(
        "pass over its GEMMs, 4 rows, 4096 keys",
        "pass",
        1.45,
        "x",
        False,
        1.25,
        _figure("pass", "over_gemms_ratio", rows=4, keys=4096),
    ),
    Bar(
        "pass over the floor, 1 row, 256 keys",
        "pass",
        1.35,
        "x",
        False,
        1.15,
        _figure("pass", "over_floor_ratio", rows=1, keys=256),
    ),
    Bar(
        "pass over the floor, 4 rows, 256 keys",
        "pass",
        1.50,
        "x",
        False,
        1.25,
        _figure("pass", "over_floor_ratio", rows=4, keys=256),
    ),
    Bar(
        "share of 750 TFLOP/s, 16 rows, 256 keys",
        "pass",
        0.80,
        "%",
        True,
        0.88,
        _figure("pass", "peak_share", rows=16, keys=256),
    ),
    Bar(
        "GPU idle between passes, 1 row",
        "pass",
        0.03,
        "%",
        False,
        0.01,
        _figure("pass", "idle_share", rows=1, keys=256),
    ),
    Bar(
        "explaining and steering, share of a pass",
        "parts",
        0.02,
        "%",
        False,
        0.005,
        _largest("parts", "concepts_share", variant="both off"),
    ),
    Bar(
        "tokens/s, 4 requests, one token a pass",
        "serve",
        450.0,
        "/s",
        True,
        600.0,
        _figure("serve", "tokens_per_s", "closed loop", clients=4),
    ),
    Bar(
        "independent over lockstep, 4 requests",
        "serve",
        1.3,
        "x",
        True,
        None,
        _figure("serve", "over_lockstep_ratio", "four requests, 1, 2 or 4 tokens a step", batching="independent"),
    ),
    Bar(
        "lossless over one token a pass, 1 request",
        "policies",
        1.3,
        "x",
        True,
        1.7,
        _figure("policies", "speedup_ratio", policy="lossless", requests=1),
    ),
    Bar(
        "ready with a warm compile cache",
        "ready",
        60.0,
        "s",
        False,
        30.0,
        _figure("ready", "ready_s", compile_cache="warm"),
    ),
    Bar("fp8 over bf16 throughput, 8 rows", "fp8", 1.5, "x", True, 1.8, _figure("fp8", "over_default_ratio", rows=8)),
    Bar(
        "over the public package, 1 request",
        "peer",
        7.0,
        "x",
        True,
        9.0,
        _figure("peer", "over_peer_ratio", generator="this engine"),
    ),
    Bar(
        "memory for concepts, each running request",
        "memory",
        16.0,
        "MB",
        False,
        4.0,
        _figure("memory", "lane_mb", "sizes"),
    ),
    Bar("recompilations after warm-up", "memory", 0.0, "", False, None, _recompilations),
)


def bars_table(result: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """Every bar with what was measured and the verdict; or no rows and the reason."""
    environment = result["environment"]
    if not environment["is_8b"] or environment["device"] != "cuda":
        return [], f"they are set for the 8B shape on a GPU; this is {environment['model']} on {environment['machine']}"
    if environment["dtype"] != "bfloat16":
        return [], f"they are set for bfloat16; this ran in {environment['dtype']}"
    return [_judged(bar, result["sections"]) for bar in BARS], ""


def _judged(bar: Bar, sections: Sections) -> dict[str, Any]:
    value = bar.value(sections)
    sign = ">=" if bar.is_least else "<="
    verdict = f"not measured ({bar.section})" if value is None else "met" if bar.is_met(value) else "MISSED"
    if value is not None and bar.aim is not None and _reaches_aim(bar, value):
        verdict = "met, and the aim"
    return {
        "bar": bar.name,
        "limit": f"{sign} {_shown(bar.limit, bar.unit)}",
        "aim": "" if bar.aim is None else _shown(bar.aim, bar.unit),
        "measured": "" if value is None else _shown(value, bar.unit, digits=1),
        "verdict": verdict,
    }


def _reaches_aim(bar: Bar, value: float) -> bool:
    assert bar.aim is not None
    return value >= bar.aim if bar.is_least else value <= bar.aim


def _shown(value: float, unit: str, digits: int = 0) -> str:
    """A figure with its unit; `digits` more than its limit is written with, so that a near miss looks like one."""
    match unit:
        case "%":
            return f"{100 * value:.{1 + digits}f} %"
        case "x":
            return f"{value:.{2 + digits}f}x"
        case "":
            return f"{value:.0f}"
        case "/s":
            return f"{value:.{digits}f}/s"
        case _:
            return f"{value:.{digits}f} {unit}"
