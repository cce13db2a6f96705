from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.catalogue import DRIVERS


def drive(folder: Path, lines: str) -> tuple[int, dict]:
    """Exit status and report of a driver with this body."""
    script = folder / "driver.py"
    script.write_text(f"from checks import Checks\nchecks = Checks('pytest')\n{lines}\nchecks.finish()\n")
    command = [sys.executable, str(script), "http://127.0.0.1:9", "model", str(folder), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(DRIVERS)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def test_a_driver_whose_checks_hold_ends_well(tmp_path: Path):
    status, report = drive(tmp_path, "with checks.part('one'):\n    checks.equal(1, 1, 'one is one')")
    assert (status, report["failures"], report["checks"], report["ran"]) == (0, [], 1, ["one"])


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("with checks.part('one'):\n    checks.equal(1, 2, 'one is two')", "one is two"),
        ("with checks.part('one'):\n    checks.that(True, 'yes')\n    raise OSError('gone')", "line 5: OSError: gone"),
        ("with checks.part('one'):\n    checks.that(checks.get('/'), 'nobody listens')", "refused"),
        ("", "nothing was checked"),
    ],
)
def test_a_driver_with_a_check_that_fails_or_with_none_ends_badly(tmp_path: Path, lines: str, words: str):
    status, report = drive(tmp_path, lines)
    assert status == 1
    assert words in report["failures"][0]
