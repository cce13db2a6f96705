"""What a terminal shows while a model loads in the command's own process."""

from __future__ import annotations

import io
import re

from rich.console import Console

from serve_app.cli.in_process import served_here
from serve_app.cli.waiting import Waiting

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


def test_loading_shows_how_much_of_the_weights_is_read_and_then_what_is_waited_for():
    """There was a spinner alone, however long it took."""
    written = io.StringIO()
    told: list[tuple[int, int]] = []
    with Waiting(Console(force_terminal=True, file=written, width=100)) as waiting:

        def advance(done: int, total: int) -> None:
            told.append((done, total))
            waiting.advance(done, total)

        with served_here(None, "cpu", advance):
            pass
    sent = CONTROL.sub("", written.getvalue())
    total = told[-1][1]
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[0][0] == 0 and told[-1][0] == total > 2**20
    amount = f"{total / 2**20:,.1f}"
    assert "starting " in sent and "weights" in sent and f"{amount} of {amount} MiB" in sent
    assert sent.index("starting ") < sent.index("weights") < sent.index("starting the engine")
    assert "-:--:--" not in sent, "time goes by in each part"
    assert written.getvalue().rindex("\x1b[?25h") > written.getvalue().rindex("\x1b[?25l")


def test_without_a_terminal_nothing_is_shown():
    written = io.StringIO()
    with Waiting(Console(file=written, force_terminal=False)) as waiting:
        waiting.advance(1, 2)
        waiting.advance(2, 2)
    assert written.getvalue() == ""
