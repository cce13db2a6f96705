"""Dashboards, alerts and the page of metrics agree with the table of metrics and with each other."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest
import yaml

from deploy.grafana import build
from serve_app.metrics_table import METRICS
from tests.prometheus import FOLDER

PANELS = [(dashboard, panel) for dashboard in build.DASHBOARDS for panel in dashboard.panels]
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs Prometheus: apt-get install prometheus"
)


def rule_tests() -> list[dict]:
    tests = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]
    return [case for test in tests for case in test["alert_rule_test"]]


def test_the_files_are_what_the_generator_makes():
    changed = [file.name for file, text in build.files().items() if file.read_text() != text]
    assert not changed, "run python -m deploy.grafana.build"
    assert {file.name for file in build.FOLDER.iterdir()} == {f"{d.uid}.json" for d in build.DASHBOARDS}


def test_the_check_tells_a_file_that_differs(monkeypatch, capsys):
    monkeypatch.setattr(build, "FOLDER", build.ROOT / "deploy" / "grafana" / "nowhere")
    assert build.main(["--check"]) == 1
    assert "would change deploy/grafana/nowhere/glassblock-blocks.json" in capsys.readouterr().out
    monkeypatch.undo()
    assert build.main(["--check"]) == 0


def test_the_page_lists_exactly_the_table():
    rows = re.findall(r"^\| `(ray_glassblock_[a-z_]+)` \|", build.PAGE.read_text(), flags=re.MULTILINE)
    assert rows == [metric.exported_name(name) for name, metric in METRICS.items()]


def test_every_metric_is_on_a_panel():
    shown = {name for _, panel in PANELS for query in panel.queries for name in build.metrics_in(query.expr)}
    assert shown == METRICS.keys()


@pytest.mark.parametrize("panel", [panel for _, panel in PANELS], ids=lambda panel: panel.title)
def test_every_panel_explains_itself(panel):
    assert panel.title and panel.description.endswith(".") and panel.unit
    assert panel.queries and all(query.legend for query in panel.queries)
    for query in panel.queries:
        # A legend shows a label only if the expression keeps it.
        for label in re.findall(r"\{\{(\w+)\}\}", query.legend):
            grouped = re.findall(r"by \(([^)]*)\)", query.expr)
            assert label == "replica" or any(label in labels for labels in grouped), query.expr
        name, suffixes = "ray_glassblock_[a-z_]+", ("_bucket", "_total")
        for exported in re.findall(name, query.expr):
            (found,) = build.metrics_in(exported)
            kind = METRICS[found].kind
            assert exported.endswith({"histogram": suffixes[0], "counter": suffixes[1], "gauge": ""}[kind]), exported


def test_dashboards_can_be_imported_side_by_side():
    uids, titles = ([getattr(d, field) for d in build.DASHBOARDS] for field in ("uid", "title"))
    assert len(set(uids)) == len(set(titles)) == len(uids)
    for dashboard in build.DASHBOARDS:
        content = json.loads((build.FOLDER / f"{dashboard.uid}.json").read_text())
        assert len({panel["id"] for panel in content["panels"]}) == len(content["panels"])
        assert [v["name"] for v in content["templating"]["list"]] == ["datasource", "cluster", "application", "replica"]
        # Whichever Prometheus it is imported beside: none is named.
        used = {json.dumps(panel["datasource"]) for panel in content["panels"]}
        assert used == {json.dumps({"type": "prometheus", "uid": "${datasource}"})}
        cells = {(p["gridPos"]["x"], p["gridPos"]["y"]) for p in content["panels"]}
        assert len(cells) == len(content["panels"])


def test_every_alert_says_what_it_means_and_where_to_read_on():
    rules = build.alert_rules()
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 12
    for rule in rules:
        name, notes = rule["alert"], rule["annotations"]
        assert build.metrics_in(rule["expr"]) or "up{" in rule["expr"], name
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert notes["summary"] and notes["description"].strip().endswith("."), name
        assert notes["runbook_url"] == f"docs/operations.md#{name.lower()}"


def test_every_alert_is_shown_to_fire_and_not_to_fire():
    names = {rule["alert"] for rule in build.alert_rules()}
    assert {case["alertname"] for case in rule_tests() if case.get("exp_alerts")} == names
    assert {case["alertname"] for case in rule_tests() if not case.get("exp_alerts")} == names


def test_an_expression_of_an_unknown_metric_is_an_error():
    with pytest.raises(ValueError, match="ray_glassblock_passes_total is not in the table"):
        build.metrics_in("rate(ray_glassblock_passes_total[5m])")


@needs_promtool
@pytest.mark.parametrize(
    "command",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "alerts.yml"),
        ("test", "rules", "alerts_test.yml"),
    ],
    ids=" ".join,
)
def test_prometheus_accepts_its_files_and_alerts_fire_when_they_should(command):
    ran = subprocess.run(["promtool", *command], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
