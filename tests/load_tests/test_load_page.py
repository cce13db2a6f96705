"""The page of serving figures."""

import json

from load_tests.serving_page import PAGE, main


def result(section: str, figure: float) -> dict:
    table = {"name": "", "rows": [{"http": "default", "lag_at_p50_ms": figure}]}
    return {
        "environment": {"machine": "a computer", "gpus": 0},
        "runs": [{"command": f"python -m load_tests.{section}", "date": "today"}],
        "sections": {section: {"status": "ok", "took_s": 1, "tables": [table], "notes": ["a note"]}},
    }


def test_figures_replace_those_between_the_marks_and_nothing_else(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    for figure in (12.5, 33.0):
        file = tmp_path / "lag.json"
        file.write_text(json.dumps(result("lag", figure)))
        assert main([str(file), "--markdown", str(page)]) == 0
    text = page.read_text()
    assert "33.0" in text and "12.5" not in text
    assert "How late events reach their client" in text and "a computer" in text and "- a note" in text
    assert text.partition("<!-- figures")[0] == PAGE.read_text().partition("<!-- figures")[0]


def test_a_section_that_two_files_have_is_refused(tmp_path, capsys):
    files = []
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps(result("lag", 1.0)))
        files.append(str(tmp_path / name))
    assert main([*files, "--markdown", str(tmp_path / "page.md")]) == 2
    assert "'lag'" in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()
