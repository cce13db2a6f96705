"""Every `sh` and `python` block of the README and of docs/ is run, and prints what its page shows.

What a plain block right behind shows is compared. A line `...` in it stands for any number of lines, and within a line
for anything. Numbers with a fraction may differ in their last digits, which depend on the order in which a machine
adds. A block without one has to be in `exceptions.py`, which says whether it is run at all, and why not.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.config import TelemetrySettings
from serve_app.local import local_server
from serve_app.tracing import make_tracer
from tests.clients.catalogue import CLIENTS
from tests.clients.page import examples_of
from tests.docs.exceptions import EXCEPTIONS, Exempt
from tests.docs.pages import LANGUAGES, PAGES, ROOT, Example, agrees, examples, examples_in

SERVER = "http://127.0.0.1:8000"
TIMEOUT_S = 200


def entries_of(example: Example) -> list[Exempt]:
    return [entry for entry in EXCEPTIONS if entry.matches(example)]


def is_run_here(example: Example) -> bool:
    return all(entry.how == "output not compared" for entry in entries_of(example))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        # Presets that examples save are not the user's.
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        with local_server() as served:
            yield served


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `glassblock` and `python3` as they are once the package is installed."""
    folder = tmp_path_factory.mktemp("commands")
    for name, arguments in (("glassblock", "-m serve_app.cli.main"), ("python3", ""), ("python", "")):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        script.chmod(0o755)
    return folder


@pytest.mark.parametrize("example", [example for example in examples() if is_run_here(example)], ids=str)
def test_an_example_runs_and_prints_what_its_page_shows(example: Example, url: str, commands: Path, tmp_path: Path):
    if "--json" not in subprocess.run(["curl", "--help", "all"], capture_output=True, text=True, check=False).stdout:
        pytest.skip("the examples need curl 7.82")
    code = example.code.replace(SERVER, url)
    # `glassblock` asks the default server where an example names none.
    code = re.sub(r"^(.*\bglassblock (?:generate|chat|concepts|bench)\b)", rf"\1 --server {url}", code, flags=re.M)
    code = code.replace(".venv/bin/", "")
    # Of a pipe each part has to end well.
    command = ["bash", "-eo", "pipefail", "-c", code] if example.language == "sh" else [sys.executable, "-c", code]
    environment = os.environ | {
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "100",
        "OMP_NUM_THREADS": "1",
    }
    # What an example writes stays out of the checkout.
    for entry in ROOT.iterdir():
        (tmp_path / entry.name).symlink_to(entry)
    ran = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        cwd=tmp_path,
        env=environment,
    )
    assert ran.returncode == 0, ran.stderr
    if example.shown is not None:
        assert agrees(ran.stdout, example.shown), f"it prints:\n{ran.stdout}"


@pytest.mark.parametrize("example", examples(), ids=str)
def test_an_example_shows_what_it_prints_or_has_its_reason_not_to(example: Example):
    """A block that lost its output, or was written without one, was run nowhere and nobody noticed."""
    assert example.language != "console", "say `sh`, with what is typed only, and show the output in a plain block"
    entries = entries_of(example)
    if example.shown is None:
        assert len(entries) == 1, "show what it prints in a plain block behind it, or add it to exceptions.py"
    else:
        assert not entries, "it shows what it prints, so nothing has to be excepted"


@pytest.mark.parametrize("entry", EXCEPTIONS, ids=lambda entry: f"{entry.page}: {entry.start}")
def test_an_exception_is_of_one_block_and_has_a_reason(entry: Exempt):
    matching = [example for example in examples() if entry.matches(example)]
    assert len(matching) == 1, f"blocks that it is of: {list(map(str, matching))}; more than one: say more of the start"
    assert entry.reason


@pytest.mark.parametrize(
    "entry", [entry for entry in EXCEPTIONS if entry.how == "run by a client"], ids=lambda entry: str(entry.page)
)
def test_what_a_client_is_said_to_run_is_what_it_runs(entry: Exempt):
    (example,) = [example for example in examples() if entry.matches(example)]
    (client,) = [client for client in CLIENTS if client.name == entry.reason]
    assert (example.language, example.code) in examples_of(client)


def test_the_example_that_reads_spans_prints_those_of_its_request(tmp_path: Path):
    """No example writes spans, so that none is there to be read: this test writes some first."""
    tracer = make_tracer(TelemetrySettings(trace_dir=str(tmp_path)), "engine")
    for request, name in (("roll-300-64", "queue"), ("another", "queue"), ("roll-300-64", "block")):
        tracer.start_span(name, attributes={"request_id": request}).end()
    assert tracer.span_processor.force_flush()
    (example,) = [e for e in examples() if e.code.startswith("cat /var/log/glassblock/traces/")]
    code = example.code.replace("/var/log/glassblock/traces", str(tmp_path))
    ran = subprocess.run(["bash", "-eo", "pipefail", "-c", code], capture_output=True, text=True, check=True)
    tracer.span_processor.shutdown()
    assert [line.split()[1] for line in ran.stdout.splitlines()] == ["queue", "block"]


def test_no_fence_escapes_the_search():
    """An indented fence, or one of another form, would hide its block."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        fences = re.findall(r"^[ \t>]*(?:```|~~~).*$", text, flags=re.MULTILINE)
        assert all(re.fullmatch(r"```\w*", fence) for fence in fences), page.name
        opened = [fence.removeprefix("```") for fence in fences[::2]]
        assert not any(fences[1::2]) or set(fences[1::2]) == {"```"}, page.name
        wanted = sum(language in LANGUAGES for language in opened)
        assert len(examples_in(text, page.name)) == wanted, page.name
    assert {example.page for example in examples()} >= {"README.md", "docs/api.md"}


def test_a_block_s_output_is_the_plain_block_right_behind_it():
    page = "```sh\na\n```\n\n```\n1\n```\n```python\nb\n```\ntext\n```\n2\n```\n"
    page += "```sh\nc\n```\n```json\n3\n```\n```sh\n```\n"
    found = [(example.line, example.code, example.shown) for example in examples_in(page, "page")]
    assert found == [(1, "a\n", "1\n"), (8, "b\n", None), (15, "c\n", None), (21, "", None)]


def test_a_gap_stands_for_any_lines_and_nothing_else_does():
    assert agrees("a\nb\nc\n", "a\n...\nc\n")
    assert agrees("a\nc\n", "a\n...\nc\n")
    assert agrees("a 1.00001\n", "a 1.00002\n")
    assert not agrees("a\nb\nc\n", "a\nc\n")
    assert not agrees("a\nb\n", "a\n")
    assert not agrees("a 1.1\n", "a 1.2\n")
    assert not agrees("a\n", "a\nb\n")


def test_a_gap_within_a_line_stands_for_anything_there_and_the_rest_has_to_be_so():
    assert agrees('{"id": "x1", "n": 3}\n', '{"id": "...", "n": 3}\n')
    assert agrees("| rate |   28.0 |\n", "| rate | ... |\n")
    assert not agrees('{"id": "x1", "n": 4}\n', '{"id": "...", "n": 3}\n')
    assert not agrees("a b\nc d\n", "a ... d\n")
