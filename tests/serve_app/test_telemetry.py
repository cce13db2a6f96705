from __future__ import annotations

import ast
import logging
import math
import re
import threading
from pathlib import Path

import pytest

from engine import (
    AttributionParams,
    Engine,
    EngineConfig,
    GenerateRequest,
    Intervention,
    SamplingParams,
    ScoreTokens,
    SteeringParams,
)
from serve_app.metrics_table import ENGINE_METRICS, METRICS
from serve_app.telemetry import ServeRecorder, hide_calls_of, show_engine_log
from tests.records import Records

ROOT = Path(__file__).resolve().parents[2]
KIND = {"count": "counter", "gauge": "gauge", "observe": "histogram"}
PACKAGES = ("engine", "serve_app")


def recorded() -> dict[str, set[tuple[str, frozenset[str]]]]:
    """Name -> (kind, labels) of every measurement that the product's source records."""
    found: dict[str, set[tuple[str, frozenset[str]]]] = {}
    for file in (file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
                continue
            kind, name = KIND.get(node.func.attr), node.args[0]
            # `text.count("x")` measures nothing: a measurement is recorded by a recorder.
            is_recorder = "recorder" in ast.unparse(node.func.value)
            if kind and is_recorder and isinstance(name, ast.Constant) and isinstance(name.value, str):
                labels = frozenset(word.arg for word in node.keywords if word.arg not in (None, "amount"))
                found.setdefault(name.value, set()).add((kind, labels))
    return found


def test_what_is_recorded_is_what_the_table_has():
    found = recorded()
    assert found.keys() == METRICS.keys()
    for name, forms in found.items():
        assert forms == {(METRICS[name].kind, frozenset(METRICS[name].labels))}, name


def test_a_run_records_nothing_that_is_not_exported_and_all_that_a_run_has(folder):
    """Names come from a real engine here, so that one which is put together at run time would be found too."""
    records = Records()
    # Two texts of three blocks do not fit into four pages, so that one of them has to give its pages back.
    config = EngineConfig(device="cpu", num_pages=4)
    engine = Engine.from_checkpoint(folder, config, recorder=records)
    requests = [
        GenerateRequest(prompt_token_ids=(), max_tokens=40, sampling=SamplingParams(policy="lossless", seed=seed))
        for seed in range(2)
    ]
    engine.generate(requests)
    prompt = tuple(range(20))
    steering = SteeringParams(interventions=(Intervention(concept_ids=(3,), strength=2.0),))
    request = GenerateRequest(
        prompt_token_ids=prompt, max_tokens=4, steering=steering, attribution=AttributionParams(top_k=1)
    )
    engine.generate([request])
    engine.generate([request])
    engine.abort(engine.add_request(requests[0]))
    engine.step()
    for _ in range(2):
        engine.analyze(ScoreTokens(token_ids=prompt))
    # A replica knows this of itself, not an engine.
    assert records.kinds.keys() == ENGINE_METRICS.keys() - {"engine_start_seconds"}
    for name, forms in records.kinds.items():
        assert forms == {(METRICS[name].kind, METRICS[name].labels)}, name
    values = [
        *records.counts.values(),
        *records.gauges.values(),
        *(v for seen in records.observed.values() for v in seen),
    ]
    assert all(math.isfinite(value) and value >= 0 for value in values)
    counts = records.counts
    assert counts["drafts"] >= counts["drafts_position_right"] >= counts["drafts_token_right"]
    assert counts["drafts"] > 0 < sum(records.observed["engine_wait_seconds"])


def test_gauges_are_set_again_for_as_long_as_the_recorder_lives():
    """Ray drops a gauge that was not set since its last report: those of an idle engine vanished."""
    recorder = ServeRecorder(refresh_interval_s=0)
    recorder.gauge("lanes_in_use", 2)
    recorder.gauge("lanes_in_use", 3)
    recorder.gauge("pages_free", 7)
    seen = []
    for name, gauge in recorder._gauges.items():
        gauge.set = lambda value, labels, name=name: seen.append((name, value, labels))
    recorder.refresh()
    assert seen == [("lanes_in_use", 3, {}), ("pages_free", 7, {})]


def test_the_thread_that_refreshes_ends_with_its_recorder():
    before = set(threading.enumerate())
    recorder = ServeRecorder(refresh_interval_s=0.01)
    (thread,) = set(threading.enumerate()) - before
    seen = threading.Event()
    recorder.gauge("lanes_in_use", 2)
    recorder._gauges["lanes_in_use"].set = lambda value, labels: seen.set()
    assert seen.wait(60)
    del recorder
    thread.join(60)
    assert not thread.is_alive()


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


def test_names_say_their_unit_and_do_not_clash_with_what_is_added_to_them():
    for name, metric in METRICS.items():
        assert re.fullmatch("[a-z]+(_[a-z]+)*", name), name
        assert not name.endswith(("_total", "_count", "_sum", "_bucket")), name
        assert ("_seconds" in name) == (metric.unit == "seconds"), name
        assert not {"application", "deployment", "replica"} & set(metric.labels), name


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


def test_calls_that_come_all_the_time_are_logged_only_where_they_fail():
    log = logging.getLogger("ray.serve")
    shown: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: shown.append(record.getMessage())  # type: ignore[method-assign]
    level, before = log.level, list(log.filters)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    hide_calls_of("report")
    try:
        for message in ("CALL report OK 0.5ms", "CALL report ERROR 0.5ms", "CALL assign OK 1.0ms"):
            log.info(message, extra={"serve_access_log": True})
        log.info("CALL report OK is what somebody else says")
    finally:
        log.filters[:] = before
        log.removeHandler(handler)
        log.setLevel(level)
    assert shown == ["CALL report ERROR 0.5ms", "CALL assign OK 1.0ms", "CALL report OK is what somebody else says"]
