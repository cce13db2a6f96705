"""The `glassblock` command against a real server in this process with the demo model, and without one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file

from serve_app.cli.api_client import ApiClient, ApiFailure, read_answer
from serve_app.cli.bench import bench
from serve_app.cli.main import BROKEN_PIPE, main, make_parser
from serve_app.config import DEMO_CHECKPOINT
from serve_app.local import local_server
from tests.clients.checkpoint import write_instruct_variant


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with local_server() as url:
        yield url


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(list(arguments))
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_generate_prints_the_text_alone_on_standard_output(server, capsys):
    asked = ("generate", "an animal that", "--max-tokens", "12", "--seed", "1", "--server", server)
    status, text, said = run(capsys, *asked)
    _, answer, _ = run(capsys, *asked, "--json")
    assert status == 0
    assert text == json.loads(answer)["choices"][0]["text"] + "\n"
    assert "12 tokens in 12 steps" in said and "seed 1" in said


def test_steering_by_a_label_reaches_the_model(server, capsys):
    asked = ("generate", "", "--max-tokens", "24", "--seed", "3", "--json", "--server", server)
    _, plain, _ = run(capsys, *asked)
    status, steered, _ = run(capsys, *asked, "--steer", "animal=8", "--suppress", "plant")
    answer = json.loads(steered)
    assert status == 0
    assert answer["choices"][0]["text"] != json.loads(plain)["choices"][0]["text"]
    assert answer["steering"]["resolved"][0]["concepts"][0]["name"] == "animal"
    assert answer["steering"]["suppress"][0]["strength"] == 20.0


def test_explain_shows_parts_that_sum_to_the_logit(server, capsys):
    status, printed, _ = run(
        capsys, "generate", "a plant with", "--max-tokens", "3", "--seed", "1", "--explain", "--server", server
    )
    rows = [line.split("\u2502") for line in printed.splitlines() if line.count("\u2502") == 7]
    parts = [[float(cell) for cell in row[2:6]] for row in rows if row[2].strip()]
    assert status == 0 and len(parts) == 3
    for logit, known, discovered, epsilon in parts:
        assert known + discovered + epsilon == pytest.approx(logit, abs=0.02)


def test_concepts_are_found_by_word_and_shown_by_id(server, capsys):
    status, found, _ = run(capsys, "concepts", "animal", "--json", "--server", server)
    first = json.loads(found)["data"][0]
    assert status == 0 and first["name"] == "animal"
    status, shown, _ = run(capsys, "concepts", "--id", str(first["id"]), "--server", server)
    assert status == 0 and "promotes" in shown
    status, said, _ = run(capsys, "concepts", "zzzzqq", "--server", server)
    assert status == 1 and "no concept matches" in said


def test_bench_counts_what_was_asked_for(server, capsys):
    status, printed, _ = run(
        capsys, "bench", "--clients", "2", "--requests", "4", "--max-tokens", "6", "--json", "--server", server
    )
    result = json.loads(printed)
    assert status == 0
    assert (result["requests"], result["failed"]) == (4, 0)
    assert result["tokens_per_s"] * result["seconds"] == pytest.approx(24)
    assert result["first_text_p50_s"] <= result["request_p50_s"]


def test_an_interrupted_bench_sends_nothing_more():
    """After Ctrl-C the pool of threads still sent every request that waited before the command ended."""
    asked, is_over = [], threading.Event()

    class Interrupted:
        def stream(self, path, body):
            asked.append(body["seed"])
            if len(asked) == 1:
                raise KeyboardInterrupt
            is_over.wait(0.5)
            yield from ()

    options = make_parser().parse_args(["bench", "--clients", "1", "--requests", "9", "--json"])
    with pytest.raises(KeyboardInterrupt):
        bench(options, Interrupted(), Console())
    is_over.set()
    assert len(asked) <= 2, "the one that was under way, and no other"


@pytest.mark.parametrize(
    "arguments", [["--temperature", "nan"], ["--top-p", "inf"], ["--guidance", "-inf"], ["--steer", "food=nan"]]
)
def test_what_json_has_no_number_for_is_a_usage_error(arguments, capsys):
    """`float` takes nan and inf, and encoding the body failed with a traceback."""
    with pytest.raises(SystemExit) as ended:
        main(["generate", "x", *arguments])
    assert ended.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_an_error_of_the_server_is_said_with_its_code_and_ends_with_1(server, capsys):
    status, text, said = run(capsys, "generate", "x", "--steer", "nosuchconcept=4", "--server", server)
    assert (status, text) == (1, "")
    assert "nosuchconcept" in said and "concept_not_found" in said


def test_no_server_is_said_with_the_way_out(capsys):
    status, _, said = run(capsys, "generate", "x", "--server", "http://127.0.0.1:9")
    assert status == 1
    assert "make serve" in said and "--local" in said


def test_an_address_that_is_none_is_said(capsys):
    """httpx's InvalidURL is none of its HTTPErrors: it came out as a traceback."""
    status, _, said = run(capsys, "generate", "x", "--server", "http://[::1")
    assert status == 1
    assert "'http://[::1' is no address" in said and "http://127.0.0.1:8000" in said


def test_a_prompt_that_is_not_utf_8_is_refused_with_a_sentence(capsys):
    """Python turns such bytes of a command line into surrogates, and encoding the body failed with a traceback."""
    status, text, said = run(capsys, "generate", "a\udcff", "--server", "http://127.0.0.1:9")
    assert (status, text) == (1, "")
    assert "not UTF-8" in said


def test_a_terminal_without_a_character_shows_another(tmp_path: Path):
    """A model's first accent ended `generate` with a UnicodeEncodeError where the terminal is no UTF-8 one."""
    ended = _process(["check", str(tmp_path / "\u00fc")], PYTHONIOENCODING="ascii")
    text, said = ended.communicate()
    assert (ended.returncode, said) == (1, b"")
    assert b"no config.json" in text


def test_a_reader_that_leaves_ends_the_command_without_a_word():
    """`glassblock ... | head -1` said `[Errno 32] Broken pipe`, as if something had failed."""
    ended = _process(["check", "--json", str(DEMO_CHECKPOINT)])
    assert ended.stdout is not None and ended.stderr is not None
    ended.stdout.close()
    assert ended.stderr.read() == b""
    assert ended.wait() == BROKEN_PIPE


def _process(arguments: list[str], **environment: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "serve_app.cli.main", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **environment}, cwd=Path.cwd()
    )


def test_comments_within_a_stream_are_passed_over(monkeypatch):
    """Proxies keep quiet streams open with lines that begin with a colon; such a line was taken for JSON."""
    lines = b': keep-alive\n\nevent: chunk\ndata: {"choices": []}\n\n: \n\ndata: [DONE]\n\n'
    client = ApiClient("http://test")
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=lines))
    monkeypatch.setattr(client, "_http", httpx.Client(base_url="http://test", transport=transport))
    assert list(client.stream("/v1/completions", {})) == [{"choices": []}]


@pytest.mark.parametrize("arguments", [["--steer", "food"], ["--steer", "=4"], ["--steer", "food=much"]])
def test_a_steering_option_without_concept_or_number_is_a_usage_error(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["generate", "x", *arguments])
    assert ended.value.code == 2
    assert "food" in capsys.readouterr().err or arguments[1] == "=4"


def test_check_finds_nothing_wrong_with_the_demo_model(capsys):
    status, printed, _ = run(capsys, "check", str(DEMO_CHECKPOINT), "--values", "--json")
    report = json.loads(printed)
    assert status == 0 and report["ok"]
    names = ["config.json", "weights", "tokenizer", "chat template", "concepts"]
    assert [name for name, _, _ in report["findings"]] == names
    assert ["chat template", True, "none: a base checkpoint"] in report["findings"]


BROKEN_TEMPLATES = {
    "syntax": ("chat_template.jinja", "{% for message in messages %}", "line 1"),
    "not text": ("chat_template.jinja", b"\xff\xfe", "utf-8"),
    "not JSON": ("tokenizer_config.json", "{", "is not JSON"),
    "no string": ("tokenizer_config.json", '{"chat_template": 7}', "must be a string"),
    "no template by name": ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}', "must be a string"),
    "refuses": ("chat_template.jinja", "{{ raise_exception('never') }}", "never"),
    "missing function": ("chat_template.jinja", "{{ no_such_function() }}", "no_such_function"),
}


@pytest.mark.parametrize("name", BROKEN_TEMPLATES)
def test_check_names_what_is_wrong_with_a_chat_template(name, tmp_path: Path, capsys):
    """A template that could not be read passed the check, and then the server failed at its start."""
    file, content, expected = BROKEN_TEMPLATES[name]
    folder = tmp_path / "checkpoint"
    shutil.copytree(DEMO_CHECKPOINT, folder)
    (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    status, printed, _ = run(capsys, "check", str(folder), "--json")
    findings = {name: (is_good, text) for name, is_good, text in json.loads(printed)["findings"]}
    assert status == 1
    assert [name for name, (is_good, _) in findings.items() if not is_good] == ["chat template"]
    assert expected in findings["chat template"][1]


def test_check_tries_a_chat_template_and_says_where_it_is_from(tmp_path: Path, capsys):
    folder = write_instruct_variant(tmp_path / "instruct")
    status, printed, _ = run(capsys, "check", str(folder), "--json")
    assert status == 0
    said = {name: text for name, _, text in json.loads(printed)["findings"]}["chat template"]
    assert said.startswith("tokenizer_config.json, ") and said.endswith(" ids")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    status, printed, _ = run(capsys, "check", str(folder))
    assert status == 0 and "chat_template.jinja, " in printed


def test_a_template_that_needs_a_broken_tokenizer_is_not_said_to_be_good(tmp_path: Path, capsys):
    folder = write_instruct_variant(tmp_path / "instruct")
    (folder / "tokenizer.json").write_text("{")
    status, printed, _ = run(capsys, "check", str(folder), "--json")
    faults = [name for name, is_good, _ in json.loads(printed)["findings"] if not is_good]
    assert (status, faults) == (1, ["tokenizer", "chat template"])


@pytest.mark.parametrize("fault", ["no config", "missing tensor", "not finite", "tokenizer"])
def test_check_names_what_is_wrong(fault, tmp_path: Path, capsys):
    folder = tmp_path / "checkpoint"
    shutil.copytree(DEMO_CHECKPOINT, folder)
    weights = load_file(folder / "model.safetensors")
    expected = fault
    if fault == "no config":
        (folder / "config.json").unlink()
        expected = "config.json"
    elif fault == "missing tensor":
        del weights["transformer.ln_f.weight"]
        expected = "missing transformer.ln_f.weight"
    elif fault == "not finite":
        weights["transformer.ln_f.weight"][0] = float("nan")
        expected = "transformer.ln_f.weight holds values that are not finite"
    else:
        (folder / "tokenizer.json").write_text('{"decoder": {"type": "WordPiece"}}')
        expected = "WordPiece"
    save_file(weights, folder / "model.safetensors")
    status, printed, _ = run(capsys, "check", str(folder), "--values", "--json")
    assert status == 1
    assert expected in " ".join(text for _, is_good, text in json.loads(printed)["findings"] if not is_good)


def test_asking_a_server_imports_neither_torch_nor_ray():
    """The command took four seconds to say anything."""
    code = "import sys, serve_app.cli.main; print([name for name in ('torch', 'ray', 'engine') if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_a_prompt_behind_local_is_a_prompt(capsys):
    """`--local` once took the word behind it for a model."""
    options = make_parser().parse_args(["generate", "--local", "an animal that"])
    assert (options.prompt, options.local, options.model) == ("an animal that", True, None)
    with pytest.raises(SystemExit):
        make_parser().parse_args(["generate", "--local", "--server", "http://127.0.0.1:1", "x"])
    capsys.readouterr()


def test_a_model_that_is_nowhere_is_said_in_a_sentence(capsys, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    status, _, said = run(capsys, "generate", "x", "--model", str(tmp_path))
    assert status == 1 and said.startswith("glassblock: ") and "Traceback" not in said


def test_a_server_that_wants_a_key_is_told_where_the_command_takes_it_from():
    answer = {"error": {"message": "no key", "code": "invalid_api_key"}}
    with pytest.raises(ApiFailure, match="GLASSBLOCK_API_KEY"):
        read_answer(httpx.Response(401, json=answer, request=httpx.Request("GET", "http://server")))
