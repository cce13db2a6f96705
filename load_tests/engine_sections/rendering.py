"""Tables for people, made from the JSON line alone, as plain text and as markdown.

A column's unit and number of digits follow from its figure's name, so that every section looks the same.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .bars import bars_table

TITLES = {
    "ceilings": "What the machine can do",
    "gemms": "The model's matrix products alone",
    "pass": "A full pass",
    "parts": "What explaining, steering and sampling cost",
    "serve": "Serving a GSM8K-like load",
    "prefill": "Long prompts",
    "policies": "Policies",
    "ready": "Time to ready",
    "fp8": "fp8",
    "deterministic": "deterministic",
    "memory": "Memory and recompilations",
    "peer": "The public steerling package",
    "bars": "Bars",
}
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
"""Between these lines of an existing markdown file the command keeps its tables."""

# Ending of a figure's name -> unit in the heading, factor, most digits after the point.
_UNITS: tuple[tuple[str, str, float, int], ...] = (
    ("_tflop_per_s", "TFLOP/s", 1, 3),
    ("_tb_per_s", "TB/s", 1, 3),
    ("_per_s", "/s", 1, 2),
    ("_per_block", "/block", 1, 2),
    ("_per_pass", "/pass", 1, 2),
    ("_share", "%", 100, 1),
    ("_ratio", "x", 1, 3),
    ("_ms", "ms", 1, 3),
    ("_us", "us", 1, 1),
    ("_s", "s", 1, 2),
    ("_mb", "MB", 1, 2),
    ("_gb", "GB", 1, 2),
)
_WORDS = {"gemms": "GEMMs"}


class CannotWrite(ValueError):
    """A page without the marks that say where figures go."""


def heading(name: str) -> str:
    """`over_gemms_ratio` -> `over GEMMs, x`."""
    stem, unit = name, ""
    for ending, shown, _, _ in _UNITS:
        if name.endswith(ending):
            stem, unit = name.removesuffix(ending), shown
            break
    words = " ".join(_WORDS.get(word, word) for word in stem.split("_")).replace("p50", "p50 / p95")
    return words + (unit if unit.startswith("/") else f", {unit}" if unit else "")


def cells(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]], list[bool]]:
    """Headings, the text of every cell, and which columns hold numbers."""
    names = list(dict.fromkeys(name for row in rows for name in row if not _is_bound(name)))
    columns = [_column(name, rows) for name in names]
    is_number = [not any(isinstance(row.get(name), str) for row in rows) for name in names]
    return [heading(name) for name in names], [list(row) for row in zip(*columns, strict=True)], is_number


def text_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Aligned lines: a heading, a rule, the rows."""
    head, body, is_number = cells(rows)
    widths = [max(len(line[c]) for line in (head, *body)) for c in range(len(head))]

    def line(values: Sequence[str]) -> str:
        padded = (v.rjust(w) if n else v.ljust(w) for v, w, n in zip(values, widths, is_number, strict=True))
        return "  ".join(padded).rstrip()

    return [line(head), "  ".join("-" * width for width in widths), *map(line, body)]


def markdown_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The same as a markdown table, aligned in its source too."""
    head, body, is_number = cells(rows)
    body = [[value.replace("|", "\\|") for value in line] for line in body]
    widths = [max(3, *(len(line[c]) for line in (head, *body))) for c in range(len(head))]

    def line(values: Sequence[str]) -> str:
        padded = (v.rjust(w) if n else v.ljust(w) for v, w, n in zip(values, widths, is_number, strict=True))
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * (width - 1) + ":" if n else "-" * width for width, n in zip(widths, is_number, strict=True)]
    return [line(head), "| " + " | ".join(rule) + " |", *map(line, body)]


def text_section(name: str, section: dict[str, Any], titles: Mapping[str, str] = TITLES) -> list[str]:
    """One section for a terminal."""
    title = f"{titles[name]}  [{name}, {section['took_s']:.0f} s]"
    lines = ["", title, "=" * len(title)]
    if section["status"] != "ok":
        lines.append(f"{section['status']}: {section['reason']}")
    for table in section["tables"]:
        lines += ["", *([table["name"]] if table["name"] else []), *text_table(table["rows"])]
    notes = [line for note in section["notes"] for line in _wrapped(note)]
    return [*lines, "", *notes] if notes else lines


def text_bars(result: dict[str, Any]) -> list[str]:
    """The bars for a terminal, or why there are none."""
    rows, why_none = bars_table(result)
    return ["", TITLES["bars"], "====", "", *text_table(rows)] if rows else ["", f"Bars: {why_none}"]


def text_environment(result: dict[str, Any]) -> list[str]:
    """What was measured on what."""
    return [f"{name:<10} {value}" for name, value in _environment(result).items()]


def markdown(result: dict[str, Any]) -> str:
    """The whole result as a part of a markdown page."""
    environment = [{"": name, "measured on": value} for name, value in _environment(result).items()]
    lines = [*markdown_table(environment), ""]
    for run in result["runs"]:
        lines += [f"`{run['command']}`, {run['date']}  "]
    rows, why_none = bars_table(result)
    lines += ["", f"### {TITLES['bars']}", "", *(markdown_table(rows) if rows else [f"No verdicts: {why_none}."])]
    for name, section in result["sections"].items():
        lines += ["", f"### {TITLES[name]}", *markdown_section(name, section)]
    return "\n".join(lines) + "\n"


def markdown_section(name: str, section: dict[str, Any]) -> list[str]:
    """One section's tables and notes below its heading."""
    lines: list[str] = []
    if section["status"] != "ok":
        lines += ["", f"`{name}` {section['status']}: {section['reason']}"]
    for table in section["tables"]:
        lines += ["", *([f"{table['name'].capitalize()}:", ""] if table["name"] else [])]
        lines += markdown_table(table["rows"])
    return lines + (["", *(f"- {note}" for note in section["notes"])] if section["notes"] else [])


def page_around(file: Path) -> tuple[str, str]:
    """What a page has before and after its figures; empty for a file that is not there. Raises CannotWrite."""
    if not file.is_file():
        return "", ""
    before, begin, rest = file.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise CannotWrite(f"{file} has no lines {BEGIN!r} and {END!r} to write between; add them or name a new file")
    return before, after


def write_markdown(result: dict[str, Any], file: Path) -> None:
    """Write the result between the marks of the page."""
    write_figures(markdown(result), file)


def write_figures(figures: str, file: Path) -> None:
    """Put whole lines between the marks of a page, which is made if it is not there. Raises CannotWrite."""
    before, after = page_around(file)
    file.write_text(f"{before}{BEGIN}\n{figures}{END}{after or chr(10)}", encoding="utf-8")


def _environment(result: dict[str, Any]) -> dict[str, str]:
    """What a reader wants to know of it."""
    hidden = ("device", "is_8b")
    return {k: str(v) for k, v in result["environment"].items() if v is not None and k not in hidden}


def _wrapped(note: str) -> list[str]:
    return textwrap.wrap(note, 116, initial_indent="- ", subsequent_indent="  ")


def _is_bound(name: str) -> bool:
    """Shown in the cell of the figure that it belongs to."""
    return name.endswith(("_low", "_high")) or "_p95_" in name


def _column(name: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """One column's cells, all with as many digits as its largest value deserves."""
    _, _, factor, most = next((unit for unit in _UNITS if name.endswith(unit[0])), ("", "", 1, 2))
    values = [row.get(name) for row in rows]
    floats = [abs(value * factor) for value in values if isinstance(value, float)]
    largest = max(floats, default=0.0)
    digits = min(most, 0 if largest >= 1000 else 1 if largest >= 100 else 2 if largest >= 1 else 3)

    def shown(value: object) -> str:
        if value is None:
            return "-"
        return f"{value * factor:,.{digits}f}" if isinstance(value, float) else str(value)

    return [shown(row.get(name)) + _range(name, row, shown) for row in rows]


def _range(name: str, row: dict[str, Any], shown: Callable[[object], str]) -> str:
    if "_p50_" in name:
        return f" / {shown(row.get(name.replace('_p50_', '_p95_')))}"
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    return "" if low is None or high is None else f" [{shown(low)} {shown(high)}]"
