from __future__ import annotations

import ast
import logging
import math
from pathlib import Path

import pytest

from serve_app.telemetry import METRICS, ServeRecorder

ROOT = Path(__file__).resolve().parents[2]
KIND = {"count": "counter", "gauge": "gauge", "observe": "histogram"}


def recorded_names() -> dict[str, str]:
    """Name -> kind of every measurement that the engine's source records."""
    found = {}
    for file in (ROOT / "engine").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in KIND
            if is_call and node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                found[node.args[0].value] = KIND[node.func.attr]
    return found


def test_everything_the_engine_records_is_exported():
    recorded = recorded_names()
    assert {"engine_passes", "engine_rows", "pages_free"} <= recorded.keys()
    missing = {name: kind for name, kind in recorded.items() if name not in METRICS or METRICS[name].kind != kind}
    assert not missing


def test_only_histograms_have_buckets_and_they_rise():
    for name, metric in METRICS.items():
        assert bool(metric.buckets) == (metric.kind == "histogram"), name
        assert list(metric.buckets) == sorted(set(metric.buckets)), name


@pytest.mark.parametrize(
    "record",
    [
        lambda recorder: recorder.count("unheard_of"),
        lambda recorder: recorder.observe("engine_passes", 1.0),
        lambda recorder: recorder.gauge("pages_free", math.nan),
        lambda recorder: recorder.count("aborts", reason="none"),
    ],
)
def test_what_the_table_lacks_is_logged_once_and_never_raised(record, caplog):
    recorder = ServeRecorder()
    logger = logging.getLogger("ray.serve")
    logger.addHandler(caplog.handler)
    try:
        record(recorder)
        record(recorder)
    finally:
        logger.removeHandler(caplog.handler)
    assert len([r for r in caplog.records if "not exported" in r.getMessage()]) == 1


def test_what_the_table_has_is_recorded_without_a_word(caplog):
    recorder = ServeRecorder()
    recorder.count("engine_commits", 3)
    recorder.count("engine_commits", 0)
    recorder.gauge("lanes_in_use", 2)
    recorder.observe("engine_rows", 4)
    assert not [record for record in caplog.records if "not exported" in record.getMessage()]
