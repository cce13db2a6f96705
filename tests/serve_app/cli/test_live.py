"""The live picture: what a terminal is sent while a text comes into focus, and how it is left."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from serve_app.cli.api_client import ApiClient, ApiFailure
from serve_app.cli.generating import COMPLETIONS, watch
from serve_app.local import local_server

MASK = "\u2591\u2591"
HIDDEN, SHOWN = "\x1b[?25l", "\x1b[?25h"
NEW_FRAME = re.compile(r"\r(?:\x1b\[2K|\x1b\[1A)+")
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
WIDTH, HEIGHT = 100, 24
PATIENCE_S = 30


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with local_server() as served:
        yield served


class Terminal(Console):
    """A terminal whose frames can be looked at one by one."""

    def __init__(self, height: int = HEIGHT) -> None:
        self.written = io.StringIO()
        super().__init__(force_terminal=True, file=self.written, width=WIDTH, height=height, color_system="truecolor")

    @property
    def sent(self) -> str:
        return self.written.getvalue()

    def frames(self) -> list[str]:
        """As plain text; what follows the last one is printed and stays."""
        return [CONTROL.sub("", frame) for frame in NEW_FRAME.split(self.sent)]


class Shown(ApiClient):
    """A client of the real server that hands out a chunk only once the one before is drawn."""

    def __init__(self, url: str, terminal: Terminal, *, interrupt: Callable[[int], None] = lambda number: None) -> None:
        super().__init__(url)
        self._terminal = terminal
        self._interrupt = interrupt
        self.is_closed = False

    def stream(self, path: str, body: Any) -> Iterator[dict[str, Any]]:
        source = super().stream(path, body)
        try:
            for number, chunk in enumerate(source):
                self._interrupt(number)
                yield chunk
                self._wait_for_frame()
        finally:
            self.is_closed = True

    def _wait_for_frame(self) -> None:
        # The first of two may have been begun before the chunk was taken.
        before = len(NEW_FRAME.findall(self._terminal.sent))
        deadline = time.monotonic() + PATIENCE_S
        while len(NEW_FRAME.findall(self._terminal.sent)) < before + 2:
            assert time.monotonic() < deadline, "nothing is drawn"
            time.sleep(0.01)


def asked(num_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": "an animal that", "max_tokens": num_tokens, "seed": 1, **fields}


def test_a_block_comes_into_focus_token_by_token_and_the_text_stays(url: str):
    terminal = Terminal()
    with Shown(url, terminal) as client:
        generation = watch(client, COMPLETIONS, asked(8), terminal, explains=False)
    drawn = [frame for frame in terminal.frames() if "block 0" in frame]
    masks = [frame.count(MASK) for frame in drawn]
    assert masks == sorted(masks, reverse=True), "a token that was there is gone"
    assert set(masks) == set(range(9)), "each step was drawn, from masks alone to none"
    for frame, left in zip(drawn, masks, strict=True):
        assert f"{8 - left}/8  step {8 - left}" in frame
    # The panel around the canvas breaks lines; without it and without space the text is what was generated.
    assert "feeds" in drawn[-1] and all(word in drawn[-1] for word in generation.text.split())
    assert terminal.frames()[-1].rstrip("\n") == generation.text.rstrip("\n")


def test_tokens_of_the_last_step_stand_out(url: str):
    terminal = Terminal()
    with Shown(url, terminal) as client:
        generation = watch(client, COMPLETIONS, asked(4), terminal, explains=False)
    reverse = re.findall(r"\x1b\[7m([^\x1b]+)\x1b\[0m", terminal.sent)
    assert {text.strip() for text in reverse} == {
        cell.token.replace("\n", "\u21b5").strip() for cell in generation.cells.values()
    }


def test_explain_shows_the_concepts_of_the_tokens_that_have_just_landed(url: str):
    terminal = Terminal()
    body = asked(4, attribution={"level": "token", "top_k": 8})
    with Shown(url, terminal) as client:
        generation = watch(client, COMPLETIONS, body, terminal, explains=True)
    drawn = [frame for frame in terminal.frames() if "block 0" in frame and "step 0" not in frame]
    for cell in generation.cells.values():
        (frame, *_) = [frame for frame in drawn if f"step {cell.step}" in frame]
        name, _, contribution = cell.concepts[0]
        assert f"{cell.confidence:.0%}" in frame
        # A narrow column may break a name.
        assert name.split()[0] in frame and f"{contribution:+.1f}" in frame
        assert "concepts so far, logits" in frame
    assert "each token: known + discovered + epsilon = logit" in terminal.frames()[-1]


@pytest.mark.parametrize("explains", [False, True])
def test_a_long_text_does_not_outgrow_the_screen(url: str, explains: bool):
    """What has scrolled away cannot be drawn over: each frame left its first lines behind, again and again."""
    terminal = Terminal(height=14)
    body = asked(200, diffusion={"tokens_per_step": 16}, ignore_eos=True)
    body |= {"attribution": {"level": "token"}} if explains else {}
    with Shown(url, terminal) as client:
        generation = watch(client, COMPLETIONS, body, terminal, explains=explains)
    *drawn, last = terminal.frames()
    # The last line of a frame has no end, and the cursor needs a line below it once the picture is taken away.
    assert max(frame.rstrip("\n").count("\n") + 1 for frame in drawn) <= 13
    assert generation.text.count("\n") > 13
    final = drawn[-1]
    assert "block 3" in final and MASK not in final
    if not explains:
        assert generation.text.splitlines()[-2] in final and generation.text.splitlines()[0] not in final
        assert "".join(last.split()) == "".join(generation.text.split()), "all of it stays"


@pytest.mark.parametrize("failure", [ApiFailure("the engine has stopped"), KeyboardInterrupt()], ids=repr)
def test_a_stream_that_is_cut_leaves_the_cursor_and_what_was_certain(url: str, failure: BaseException):
    """The picture is erased at its end; what came before an error went with it."""

    def interrupt(number: int) -> None:
        if number == 40:
            raise failure

    terminal = Terminal()
    client = Shown(url, terminal, interrupt=interrupt)
    with client, pytest.raises(type(failure)):
        watch(client, COMPLETIONS, asked(64), terminal, explains=False)
    assert client.is_closed, "its generation would go on at the server"
    assert terminal.sent.rindex(SHOWN) > terminal.sent.rindex(HIDDEN)
    certain = terminal.frames()[-1]
    assert certain.strip() and MASK not in certain and "block 0" not in certain


def test_ctrl_c_in_a_terminal_ends_with_130_and_the_cursor_there(url: str):
    """In a real one, with the signal that the key sends."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "serve_app.cli.main", "generate", "an animal that"]
    command += ["--max-tokens", "900", "--server", url]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(WIDTH), "LINES": str(HEIGHT)}
    root = Path(__file__).resolve().parents[3]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment, cwd=root)
    os.close(slave)
    sent = bytearray()
    is_drawn = threading.Event()

    def read() -> None:
        try:
            while piece := os.read(master, 4096):
                sent.extend(piece)
                if b"step 2" in sent:
                    is_drawn.set()
        except OSError:
            # How Linux says that nobody has the other end any more.
            return

    reader = threading.Thread(target=read)
    reader.start()
    assert is_drawn.wait(PATIENCE_S), bytes(sent)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 130
    reader.join(PATIENCE_S)
    os.close(master)
    text = sent.decode()
    assert text.rindex(SHOWN) > text.rindex(HIDDEN)
    assert "Traceback" not in text
