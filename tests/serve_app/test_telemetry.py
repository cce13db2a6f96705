from __future__ import annotations

import ast
import logging
import math
from pathlib import Path

import pytest

from engine import Engine, EngineConfig, GenerateRequest, SamplingParams
from serve_app.telemetry import METRICS, ServeRecorder, show_engine_log

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
    drafts = {"drafts", "drafts_position_right", "drafts_token_right", "drafts_committed"}
    assert drafts | {"engine_wait_seconds"} <= recorded.keys()
    missing = {name: kind for name, kind in recorded.items() if name not in METRICS or METRICS[name].kind != kind}
    assert not missing


def test_a_run_records_nothing_that_is_not_exported_and_all_that_a_run_has(folder):
    """Names come from a real engine here, so that one which is put together at run time would be found too."""
    seen = {}

    class Seen:
        def count(self, name, amount=1.0, **labels):
            seen.setdefault(name, []).append(("counter", amount, labels))

        def gauge(self, name, value, **labels):
            seen.setdefault(name, []).append(("gauge", value, labels))

        def observe(self, name, value, **labels):
            seen.setdefault(name, []).append(("histogram", value, labels))

    # Two texts of three blocks do not fit into four pages, so that one of them has to give its pages back.
    engine = Engine.from_checkpoint(folder, EngineConfig(device="cpu", num_pages=4), recorder=Seen())
    requests = [
        GenerateRequest(prompt_token_ids=(), max_tokens=40, sampling=SamplingParams(policy="lossless", seed=seed))
        for seed in range(2)
    ]
    engine.generate(requests)
    engine.abort(engine.add_request(requests[0]))
    engine.step()
    assert seen.keys() == METRICS.keys()
    for name, records in seen.items():
        metric = METRICS[name]
        assert {(kind, tuple(labels)) for kind, _, labels in records} == {(metric.kind, metric.labels)}, name
        assert all(math.isfinite(value) and value >= 0 for _, value, _ in records), name
    totals = {name: sum(value for _, value, _ in records) for name, records in seen.items()}
    assert totals["drafts"] >= totals["drafts_position_right"] >= totals["drafts_token_right"]
    assert totals["drafts"] > 0 < totals["engine_wait_seconds"]


def test_the_memory_table_is_in_the_replicas_log_once(folder):
    """Serve gives its own logger handlers and nobody else, so the table that the engine logs at start was lost."""
    records, handler = [], logging.Handler()
    handler.emit = records.append
    loggers = [logging.getLogger(name) for name in ("ray.serve", "engine")]
    loggers[0].addHandler(handler)
    try:
        show_engine_log()
        show_engine_log()
        engine = Engine.from_checkpoint(folder, EngineConfig(device="cpu", num_pages=16))
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    tables = [record.getMessage() for record in records if engine.memory_table() in record.getMessage()]
    assert len(tables) == 1
    for purpose in ("weights", "lanes", "16 pages", "passes"):
        assert purpose in tables[0]


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
