"""The benchmark runs, measures every section and says so in one JSON line. How fast is not tested."""

import json

import pytest

from load_tests import bench_engine


def test_every_section_reports_its_figures_on_the_demo_model(capsys, tmp_path):
    file = tmp_path / "result.json"
    arguments = [
        "--device",
        "cpu",
        "--rows",
        "1,2",
        "--contexts",
        "128",
        "--clients",
        "2",
        "--requests-per-client",
        "1",
    ]
    assert bench_engine.main([*arguments, "--json", str(file)]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed == json.loads(file.read_text())
    assert set(bench_engine.SECTIONS) < set(printed)
    assert printed["pass"]["2 rows x 128"]["over_gemms"] > 0
    assert printed["gemms"]["1 rows"]["floor"] > 0
    assert printed["serve"]["2 clients"]["tokens_per_s"] > 0


def test_only_the_chosen_sections_run(capsys):
    assert bench_engine.main(["--device", "cpu", "--only", "gemms", "--rows", "1"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "gemms" in printed and "pass" not in printed
    assert "floor" not in printed["gemms"]["1 rows"], "a floor without ceilings of the same run"


def test_an_unknown_section_is_refused_by_name(capsys):
    with pytest.raises(SystemExit):
        bench_engine.main(["--only", "gemms,speed"])
    assert "speed" in capsys.readouterr().err
