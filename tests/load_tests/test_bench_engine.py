"""The benchmark runs, measures every section and says so in one JSON line. How fast is not tested."""

import io
import json
from contextlib import redirect_stdout

import pytest

from load_tests import bench_engine
from load_tests.engine_sections.bars import BARS
from tests.checkpoints import Recipe

COUNTS = {
    "confidence": {"passes_per_block": 16, "commits_per_pass": 1},
    "confidence-2": {"passes_per_block": 8, "commits_per_pass": 2},
    "lossless": {"value": None, "passes_per_block": 10, "tokens_per_pass": 1.6},
    "made_up": {"passes_per_block": 4, "commits_per_pass": 4},
}
SMALL = ["--device", "cpu", "--prompt-tokens", "10,40", "--new-tokens", "16,40", "--requests", "2"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(Recipe(name="tiny").write(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """One run of all sections on a tiny checkpoint: its exit status, standard output and folder."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "steps.json").write_text(json.dumps(COUNTS))
    files = ["--json", str(folder / "all.json"), "--markdown", str(folder / "all.md")]
    chosen = ["--rows", "1,2,3,4,8,16", "--contexts", "256", "--clients", "1,4"]
    with redirect_stdout(io.StringIO()) as out:
        status = bench_engine.main(
            [*SMALL, *chosen, "--checkpoint", tiny, "--policy-steps", str(folder / "steps.json"), *files]
        )
    return status, out.getvalue(), folder


@pytest.fixture(scope="module")
def sections(run):
    return json.loads(run[1].splitlines()[-1])["sections"]


def rows_of(section, table=""):
    return next(known["rows"] for known in section["tables"] if known["name"] == table)


def test_every_section_succeeds_or_says_why_it_cannot(run, sections):
    assert run[0] == 0
    assert tuple(sections) == tuple(bench_engine.SECTIONS)
    for name, section in sections.items():
        if section["status"] != "ok":
            assert name in ("fp8", "deterministic"), section
            assert section["status"] == "skipped" and section["reason"]
            assert not section["tables"]


def test_the_last_line_is_what_the_file_holds(run):
    assert json.loads(run[1].splitlines()[-1]) == json.loads((run[2] / "all.json").read_text())


def test_the_markdown_page_has_every_section_and_every_table(run, sections):
    page = (run[2] / "all.md").read_text()
    for name, section in sections.items():
        assert f"\n### {bench_engine.rendering.TITLES[name]}\n" in page
        assert all(f"\n{table['name'].capitalize()}:\n" in page for table in section["tables"] if table["name"])
    assert run[1].count("\n| ") == 0, "standard output gets plain tables"


def test_ratios_are_those_of_the_figures_beside_them(sections):
    for row in rows_of(sections["pass"]):
        assert row["over_gemms_ratio"] == pytest.approx(row["step_ms"] / row["gemms_ms"], rel=1e-4)
        assert row["over_floor_ratio"] == pytest.approx(row["step_ms"] / row["floor_ms"], rel=1e-4)
        assert row["idle_share"] is None, "nothing tells the device's time apart on a CPU"


def test_every_bar_finds_its_figure_where_the_section_could_measure_it(sections):
    """A figure that was renamed left its bar at "not measured" for ever."""
    found = {bar.name for bar in BARS if bar.value(sections) is not None}
    absent = {bar.name for bar in BARS} - found
    impossible = {bar.name for bar in BARS if "4096" in bar.name or "idle" in bar.name or bar.section == "fp8"}
    assert absent == impossible


def test_a_policy_is_as_fast_as_its_recorded_passes_and_its_measured_pass_say(sections):
    rows = {(row["policy"], row["requests"]): row for row in rows_of(sections["policies"])}
    for policy, requests in rows:
        row = rows[policy, requests]
        commits = 1.6 if policy == "lossless" else COUNTS[policy]["commits_per_pass"]
        assert row["tokens_per_s"] == pytest.approx(1e3 * requests * commits / row["pass_ms"], rel=1e-4)
    assert rows["confidence", 1]["speedup_ratio"] == pytest.approx(1)
    assert rows["made_up", 1]["measured_with"] != "itself", "a policy that no build knows"
    times = {row["rows"]: row["step_ms"] for row in rows_of(sections["pass"])}
    assert rows["lossless", 1]["speedup_ratio"] == pytest.approx(1.6 * times[1] / times[2], rel=1e-4)
    assert any("demo model" in note for note in sections["policies"]["notes"])


def test_both_kinds_of_batching_serve_the_same_load(sections):
    rows = rows_of(sections["serve"], "four requests, 1, 2 or 4 tokens a step")
    assert [row["batching"] for row in rows] == ["independent", "lockstep"]
    assert rows[1]["over_lockstep_ratio"] == 1


def test_running_requests_are_watched_while_long_prompts_arrive(sections):
    alone, beside = rows_of(sections["prefill"], "running requests")
    assert alone["long_prompts"] == 0 and beside["long_prompts"] > 0


def test_a_fresh_process_tells_its_stages(sections):
    for row in rows_of(sections["ready"]):
        stages = row["imports_s"] + row["loading_s"] + row["engine_s"]
        assert row["ready_s"] == pytest.approx(stages, rel=1e-3)


def test_the_peer_computes_with_our_tensors_and_not_with_copies(tiny):
    """A second copy of 8B weights did not fit beside the first one's pages."""
    pytest.importorskip("steerling")
    from load_tests.engine_sections.peer import peer_generator

    bench = bench_engine.Bench(bench_engine.parse([*SMALL, "--checkpoint", tiny]))
    generator = peer_generator(bench)
    ours = bench.model.transformer
    assert generator.model.transformer.lm_head.weight.data_ptr() == ours.lm_head.weight.data_ptr()
    first = generator.model.transformer.blocks[0].attn.c_attn.weight
    assert first.data_ptr() == ours.layers[0].attention.qkv.weight.data_ptr()
    bench.close()


def test_a_section_that_fails_says_how_and_the_others_go_on(tiny, tmp_path, capsys):
    broken = tmp_path / "steps.json"
    broken.write_text('{"threshold": {"passes_per_block": 0}}')
    chosen = ["--only", "policies,gemms", "--rows", "1", "--contexts", "64", "--checkpoint", tiny]
    assert bench_engine.main([*SMALL, *chosen, "--policy-steps", str(broken)]) == 1
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["sections"]["policies"]["status"] == "failed"
    assert "passes_per_block 0" in printed["sections"]["policies"]["reason"]
    assert printed["sections"]["gemms"]["status"] == "ok"


def test_policies_are_skipped_without_recorded_counts(tiny, tmp_path, capsys):
    missing = str(tmp_path / "none.json")
    assert bench_engine.main([*SMALL, "--only", "policies", "--checkpoint", tiny, "--policy-steps", missing]) == 0
    section = json.loads(capsys.readouterr().out.splitlines()[-1])["sections"]["policies"]
    assert section["status"] == "skipped" and missing in section["reason"]


def test_without_a_checkpoint_a_cpu_measures_the_demo_model(capsys):
    assert bench_engine.main(["--device", "cpu", "--only", "gemms", "--rows", "1"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["environment"]["model"].startswith("6 layers of 256")
    assert list(printed["sections"]) == ["gemms"]


def test_the_command_that_is_written_down_names_no_files_of_results():
    arguments = ["--only", "pass", "--json", "/home/me/a.json", "--markdown=/home/me/b.md", "--rows", "1"]
    assert bench_engine.command_of(arguments) == "python -m load_tests.bench_engine --only pass --rows 1"


def test_an_unknown_section_is_refused_by_name(capsys):
    with pytest.raises(SystemExit):
        bench_engine.main(["--only", "gemms,speed"])
    assert "speed" in capsys.readouterr().err


def test_a_page_without_marks_is_refused_before_anything_is_measured(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("# Mine\n")
    assert bench_engine.main(["--device", "cpu", "--markdown", str(page)]) == 2
    seen = capsys.readouterr()
    assert str(page) in seen.err and seen.out == ""
    assert page.read_text() == "# Mine\n"
