"""The page's pure modules under Node's own test runner."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
NODE = shutil.which("node")


def node_version() -> int:
    """Major version of the Node that is here, 0 without one."""
    if NODE is None:
        return 0
    said = subprocess.run([NODE, "--version"], capture_output=True, text=True, check=False).stdout
    return int(said.removeprefix("v").partition(".")[0] or 0)


needs_node = pytest.mark.skipif(node_version() < 20, reason="no Node of version 20 or later")


@needs_node
@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.test.mjs")), ids=lambda file: file.name.partition(".")[0])
def test_the_pure_modules_of_the_page_do_what_their_tests_say(file):
    done = subprocess.run([str(NODE), "--test", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# fail 0" in done.stdout and "# pass 0" not in done.stdout, done.stdout


def test_modules_with_tests_touch_neither_page_nor_network():
    """What makes them testable without a browser."""
    tested = {"attribution", "capabilities", "player", "raw", "replay", "request", "share", "snippets", "sse", "text"}
    folder = FOLDER.parents[1] / "serve_app" / "playground"
    for name in tested:
        source = (folder / f"{name}.js").read_text(encoding="utf-8")
        found = [word for word in ("document.", "window.", "fetch(", "localStorage") if word in source]
        assert not found, f"{name}.js uses {found}"


def test_modules_are_short_and_say_first_what_they_know():
    for file in (FOLDER.parents[1] / "serve_app" / "playground").glob("*.js"):
        source = file.read_text(encoding="utf-8")
        assert source.startswith("// "), file.name
        assert source.isascii(), file.name
        assert source.count("\n") <= 300, file.name
