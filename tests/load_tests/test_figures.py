"""Figures: spread, tables, bars and merging, without an engine."""

import io
import json

import pytest

from load_tests import bench_engine
from load_tests.engine_sections import rendering
from load_tests.engine_sections.bars import BARS, bars_table
from load_tests.engine_sections.merging import CannotMerge, merge
from load_tests.engine_sections.report import Progress, Section, percentile, with_spread

H200 = {
    "machine": "NVIDIA H200",
    "device": "cuda",
    "driver": "580.1",
    "torch": "2.11.0",
    "cuda": "13.0",
    "triton": "3.6.0",
    "commit": "0123456789ab",
    "sources": "ba9876543210",
    "model": "32 layers of 4096, 8,390 M parameters",
    "is_8b": True,
    "dtype": "bfloat16",
}


def section(*rows, table="", status="ok", recompilations=0):
    tables = [{"name": table, "rows": list(rows)}] if rows else []
    return {"status": status, "took_s": 1.0, "recompilations": recompilations, "tables": tables, "notes": []}


def result(sections, **environment):
    runs = [{"command": "python -m load_tests.bench_engine", "date": "2026-01-01 00:00 UTC"}]
    return {"environment": {**H200, **environment}, "runs": runs, "sections": sections}


def verdicts(sections, **environment):
    rows, _ = bars_table(result(sections, **environment))
    return {row["bar"]: row["verdict"] for row in rows}


def test_a_percentile_lies_between_its_neighbours():
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2
    assert percentile([0.0, 10.0], 0.95) == pytest.approx(9.5)
    assert percentile([7.0], 0.95) == 7


def test_a_single_value_has_no_spread_and_none_has_no_figure():
    assert with_spread("step_ms", [0.002], 1e3) == {"step_ms": 2.0}
    assert with_spread("step_ms", []) == {"step_ms": None}
    assert set(with_spread("step_ms", [1.0, 2.0])) == {"step_ms", "step_ms_low", "step_ms_high"}


def test_columns_are_aligned_and_headings_carry_units():
    rows = [
        {"what": "first", "step_ms": 5.5, "step_ms_low": 5.25, "step_ms_high": 12.0, "idle_share": 0.031},
        {"what": "the second", "step_ms": 11.0, "step_ms_low": 9.0, "step_ms_high": 13.0, "idle_share": None},
    ]
    assert rendering.text_table(rows) == [
        "what                  step, ms  idle, %",
        "----------  ------------------  -------",
        "first        5.50 [5.25 12.00]      3.1",
        "the second  11.00 [9.00 13.00]        -",
    ]


def test_both_percentiles_share_a_cell():
    rows = [{"step_p50_ms": 10.5, "step_p95_ms": 20.25}]
    assert rendering.cells(rows)[:2] == (["step p50 / p95, ms"], [["10.50 / 20.25"]])


def test_a_markdown_cell_cannot_break_its_table():
    line = rendering.markdown_table([{"what": "a|b"}])[-1]
    assert line == "| a\\|b |"


def test_figures_replace_those_between_the_marks_and_nothing_else(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n{rendering.BEGIN}\nold\n{rendering.END}\nthe end\n")
    for _ in range(2):
        rendering.write_markdown(result({"gemms": section({"rows": 1, "gemms_ms": 4.58})}), page)
    text = page.read_text()
    assert text.startswith(f"# Page\n{rendering.BEGIN}\n") and text.endswith(f"{rendering.END}\nthe end\n")
    assert "old" not in text and text.count("4.58") == 1


def test_a_bar_is_met_at_its_limit_and_missed_beyond_it():
    row = {"rows": 1, "keys": 256, "over_floor_ratio": 1.35, "idle_share": 0.031}
    seen = verdicts({"pass": section(row)})
    assert seen["pass over the floor, 1 row, 256 keys"] == "met"
    assert seen["GPU idle between passes, 1 row"] == "MISSED"
    assert seen["fp8 over bf16 throughput, 8 rows"] == "not measured (fp8)"
    row = {"rows": 8, "over_default_ratio": 1.8}
    assert verdicts({"fp8": section(row)})["fp8 over bf16 throughput, 8 rows"] == "met, and the aim"


def test_a_near_miss_looks_like_one():
    rows, _ = bars_table(result({"pass": section({"rows": 1, "keys": 256, "over_floor_ratio": 1.352})}))
    row = next(row for row in rows if row["bar"] == "pass over the floor, 1 row, 256 keys")
    assert (row["limit"], row["measured"], row["verdict"]) == ("<= 1.35x", "1.352x", "MISSED")


def test_the_bar_for_many_rows_takes_the_worst_and_needs_all_of_them():
    name = "pass over its GEMMs, 1 to 16 rows, 256 keys"
    ratios = {1: 1.05, 2: 1.06, 3: 1.16, 4: 1.04, 8: 1.03, 16: 1.02, 32: 1.5}
    rows = [{"rows": rows, "keys": 256, "over_gemms_ratio": ratio} for rows, ratio in ratios.items()]
    assert verdicts({"pass": section(*rows)})[name] == "MISSED"
    rows[2]["over_gemms_ratio"] = 1.1
    assert verdicts({"pass": section(*rows)})[name] == "met"
    assert verdicts({"pass": section(*rows[1:])})[name] == "not measured (pass)"


def test_one_recompilation_in_any_section_misses_the_bar():
    name = "recompilations after warm-up"
    memory = section({"compiled": 0}, table="mixed load")
    assert verdicts({"memory": memory, "serve": section()})[name] == "met"
    assert verdicts({"memory": memory, "serve": section(recompilations=1)})[name] == "MISSED"
    assert verdicts({"serve": section()})[name] == "not measured (memory)"


@pytest.mark.parametrize("change", [{"device": "cpu"}, {"is_8b": False}, {"dtype": "float32"}])
def test_another_model_or_machine_is_not_judged(change):
    rows, why = bars_table(result({}, **change))
    assert rows == [] and "they are set for" in why


def test_bars_have_names_of_their_own_and_sections_that_exist():
    assert len({bar.name for bar in BARS}) == len(BARS)
    assert {bar.section for bar in BARS} <= set(bench_engine.SECTIONS)
    assert set(rendering.TITLES) == {*bench_engine.SECTIONS, "bars"}


@pytest.fixture
def written(tmp_path):
    def write(name, sections, **environment):
        file = tmp_path / name
        file.write_text("progress that went to the same file\n" + json.dumps(result(sections, **environment)) + "\n")
        return file

    return write


def test_sections_of_several_files_stand_side_by_side(written, capsys, tmp_path):
    first = written("a.json", {"serve": section({"clients": 1})})
    second = written("b.json", {"gemms": section({"rows": 1})})
    merged = tmp_path / "merged.json"
    assert bench_engine.main(["--merge", str(first), str(second), "--json", str(merged)]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed == json.loads(merged.read_text())
    assert list(printed["sections"]) == ["gemms", "serve"], "in the order of a whole run"
    assert len(printed["runs"]) == 2


@pytest.mark.parametrize("name", ["machine", "driver", "torch", "triton", "commit", "sources", "model"])
def test_files_of_another_machine_or_build_are_refused(written, name, capsys):
    files = [written("a.json", {}), written("b.json", {}, **{name: "another"})]
    with pytest.raises(CannotMerge, match=f"b.json has {name} 'another'.*a.json has"):
        merge(files, ())
    assert bench_engine.main(["--merge", *map(str, files)]) == 2
    assert "another" in capsys.readouterr().err


def test_a_section_that_two_files_measured_is_refused(written):
    files = [written(name, {"gemms": section({"rows": 1})}) for name in ("a.json", "b.json")]
    with pytest.raises(CannotMerge, match="both have the section gemms"):
        merge(files, ("gemms",))


def test_a_failed_section_gives_way_whichever_file_comes_first(written):
    good = written("good.json", {"gemms": section({"rows": 1})})
    bad = written("bad.json", {"gemms": section(status="failed")})
    for files in ([good, bad], [bad, good]):
        assert merge(files, ("gemms",))["sections"]["gemms"]["status"] == "ok"


def test_a_file_without_a_result_is_refused(tmp_path):
    file = tmp_path / "note.json"
    for text in ("", "[]", "{}", "no json"):
        file.write_text(text)
        with pytest.raises(CannotMerge, match=r"note\.json holds no result"):
            merge([file], ())


def test_progress_tells_the_time_and_the_section_and_does_not_flood_a_file():
    stream, now = io.StringIO(), iter([0.0, 83.0, 84.0, 85.0, 90.0])
    progress = Progress(stream, lambda: next(now))
    for section_name, text in (("pass", "4 rows"), ("pass", "8 rows"), ("serve", "1 client"), ("serve", "4 clients")):
        Section(section_name, progress).say(text)
    assert stream.getvalue().splitlines() == [
        "[  1:23] pass          4 rows",
        "[  1:25] serve         1 client",
        "[  1:30] serve         4 clients",
    ]


def test_progress_on_a_terminal_rewrites_its_line():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    progress = Progress(stream, lambda: 0.0)
    progress.show("pass", "4 rows")
    progress.show("pass", "x" * 200)
    assert stream.getvalue().count("\r\x1b[2K") == 2 and "\n" not in stream.getvalue()
    assert "x" * 119 not in stream.getvalue(), "a line that wraps cannot be rewritten"
