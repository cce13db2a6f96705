"""How a generation looks in a terminal: text that is certain above, the canvas below, concepts at the side."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from .generation import Cell, Generation

HEAD_STYLES = {"known": "#675BF2", "discovered": "#ceb4fe", "epsilon": "#e2bc26"}
HEAD_MARKS = {"known": "K", "discovered": "D", "epsilon": "e"}
"""Colour alone would leave out those who do not see it."""
_MASK = "\u2591\u2591"
_NEWLINE = "\u21b5"
_SHOWN_CONCEPTS = 5
"""Of each head: discovered ones often weigh more, known ones can be read."""
_BAR_WIDTH = 12
_SHADES = ((0.9, "bold"), (0.6, ""), (0.0, "dim"))
_SHOWN_TEXT = 1200
"""Characters of finished text above the canvas that are laid out for a frame, of which the last lines are shown."""


def shown(token: str) -> str:
    """A token on one line, whatever it holds."""
    return "".join(_visible(character) for character in token)


def _visible(character: str) -> str:
    if character == "\n":
        return _NEWLINE
    # What a model writes must not steer the terminal.
    return character if character.isprintable() else "\ufffd"


def draw(generation: Generation, *, explains: bool) -> RenderableType:
    """The picture of this moment."""
    has_canvas = generation.end > generation.start
    canvas = Panel(_canvas(generation), title=_title(generation), title_align="left", border_style="dim")
    main = _Page(Text(safe(generation.text)[-_SHOWN_TEXT:]), canvas if has_canvas else None)
    if not explains:
        return _Fitting(main)
    layout = Table.grid(padding=(0, 2), expand=True)
    layout.add_column(ratio=3)
    layout.add_column(ratio=2)
    layout.add_row(main, Group(_landed(generation), Text(""), concept_table(generation)))
    return _Fitting(layout)


class _Page:
    """Text above the canvas, its first lines left out where both would be higher than the screen."""

    def __init__(self, text: Text, canvas: Panel | None) -> None:
        self._text = text
        self._canvas = canvas

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The lines that fit."""
        canvas = [] if self._canvas is None else console.render_lines(self._canvas, options)
        room = max(_most_lines(options) - len(canvas), 0)
        text = console.render_lines(self._text, options, pad=False)
        for line in text[len(text) - min(room, len(text)) :] + canvas:
            yield from line
            yield Segment.line()


class _Fitting:
    """Something, its last lines left out where it is higher than the screen."""

    def __init__(self, inner: RenderableType) -> None:
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The lines that fit."""
        for line in console.render_lines(self._inner, options)[: _most_lines(options)]:
            yield from line
            yield Segment.line()


def _most_lines(options: ConsoleOptions) -> int:
    # What scrolls away cannot be drawn over, and each frame would leave it behind. One line is the cursor's at the end.
    return max(options.max_height - 1, 1)


def safe(text: str) -> str:
    """Text without what would steer the terminal; newlines and tabs stay."""
    return "".join(c if c in "\n\t" else _visible(c) for c in text)


def _title(generation: Generation) -> str:
    filled = sum(generation.start <= position < generation.end for position in generation.cells)
    return f"block {generation.block}  {filled}/{generation.end - generation.start}  step {generation.num_steps}"


def _canvas(generation: Generation) -> Text:
    canvas = Text(overflow="fold")
    for position in range(generation.start, generation.end):
        cell = generation.cells.get(position)
        if cell is None:
            canvas.append(_MASK, style="dim")
        else:
            canvas.append(shown(cell.token), style=_style(cell, generation))
    return canvas


def _style(cell: Cell, generation: Generation) -> str:
    if cell.step == generation.num_steps:
        return "reverse"
    return next(style for least, style in _SHADES if cell.confidence >= least)


def _landed(generation: Generation) -> Text:
    lines = Text()
    for position in generation.landed[-6:]:
        cell = generation.cells[position]
        lines.append(f"{shown(cell.token).strip() or shown(cell.token)}", style="bold")
        lines.append(f"  {cell.confidence:.0%}  ", style="dim")
        for name, head, contribution in cell.concepts[:2]:
            lines.append(f"{HEAD_MARKS[head]} {safe(name)} {contribution:+.1f}  ", style=HEAD_STYLES[head])
        lines.append("\n")
    return lines


def concept_table(generation: Generation) -> Table:
    """The concepts that have moved the tokens so far most, by the sum of their contributions."""
    table = Table(box=None, padding=(0, 1), title="concepts so far, logits", title_style="dim", title_justify="left")
    for name in ("", "concept", "sum", ""):
        table.add_column(name, justify="right" if name == "sum" else "left", no_wrap=True)
    ranked = []
    for wanted in ("known", "discovered"):
        own = [item for item in generation.concept_totals.items() if item[0][1] == wanted]
        ranked += sorted(own, key=lambda item: -abs(item[1]))[:_SHOWN_CONCEPTS]
    largest = max((abs(total) for _, total in ranked), default=1.0) or 1.0
    for (name, head), total in ranked:
        bar = "\u2588" * max(1, round(_BAR_WIDTH * abs(total) / largest))
        style = HEAD_STYLES[head]
        table.add_row(Text(HEAD_MARKS[head], style=style), Text(safe(name)), f"{total:+.1f}", Text(bar, style=style))
    return table
