"""Spans of HTTP requests, of their way to a replica, and of the engine's blocks."""

from __future__ import annotations

import json
import logging
import resource
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from google.protobuf.json_format import Parse
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, Tracer, format_span_id, format_trace_id

from engine import BlockFinished, BlockStarted, Commit, Committed, Event, Finished, FinishReason, Output, Started
from serve_app.api import create_api
from serve_app.config import Limits, TelemetrySettings
from serve_app.engine_server import log_end
from serve_app.engine_spans import EngineSpans, with_engine_spans
from serve_app.routing.messages import Lease
from serve_app.service import Service
from serve_app.span_files import SpanFile, to_otlp
from serve_app.tracing import NO_TRACER, RouteSpan, TraceContext, make_tracer
from tests.fakes import FakeEngine
from tests.serve_app.conftest import DirectClient

pytestmark = pytest.mark.anyio

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"


class Recorded:
    """A tracer, and the spans that it made and ended."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer: Tracer = provider.get_tracer("test")

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


def parent_of(span: ReadableSpan) -> str | None:
    return None if span.parent is None else format_span_id(span.parent.span_id)


def id_of(span: ReadableSpan) -> str:
    return format_span_id(span.get_span_context().span_id)


def trace_id_of(span: ReadableSpan) -> str:
    return format_trace_id(span.get_span_context().trace_id)


class Clock:
    """Nanoseconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1_000

    def __call__(self) -> int:
        return self.now


def commits(block: int, steps: range) -> Committed:
    made = [
        Commit(position=step, token_id=1, denoising_step=step, confidence=1.0, target_logit=0.0, logprob=0.0)
        for step in steps
    ]
    return Committed("cmpl-1-0", block, tuple(made))


def started(num_prompt_tokens: int, num_cached_tokens: int = 0) -> Started:
    return Started("cmpl-1-0", 1, 16, num_prompt_tokens, num_prompt_tokens % 16, num_cached_tokens, ())


def finished(reason: FinishReason = FinishReason.LENGTH, error: str | None = None) -> Finished:
    output = Output(
        request_id="cmpl-1-0",
        token_ids=(1,) * 24,
        finish_reason=reason,
        commits=(),
        num_forward_passes=27,
        num_denoising_steps=24,
        num_blocks=2,
        num_prompt_tokens=40,
        num_cached_tokens=16,
        num_preemptions=0,
        seed=1,
        error=error,
    )
    return Finished("cmpl-1-0", output)


def run(recorded: Recorded, *batches: tuple[int, list[Event]]) -> EngineSpans:
    """Spans of batches of events, each at its time."""
    clock = Clock()
    spans = EngineSpans(recorded.tracer, TraceContext(PARENT, "http-1"), "cmpl-1-0", clock)
    for at, events in batches:
        clock.now = at
        spans.take(events)
    clock.now += 5
    return spans


def test_a_request_in_the_engine_is_queue_prefill_and_blocks_with_their_steps(recorded):
    run(
        recorded,
        (2_000, [started(40, num_cached_tokens=16)]),
        (2_500, [BlockStarted("cmpl-1-0", 2, 32, 48), commits(2, range(0, 3))]),
        (3_000, [commits(2, range(3, 8)), BlockFinished("cmpl-1-0", 2, 32, 48)]),
        (3_100, [BlockStarted("cmpl-1-0", 3, 48, 64), commits(3, range(8, 24))]),
        (4_000, [BlockFinished("cmpl-1-0", 3, 48, 64), finished()]),
    )
    engine = recorded.one("engine")
    times = {
        (span.name, span.attributes.get("block")): (span.start_time, span.end_time)
        for span in recorded.spans
        if span is not engine
    }
    assert times == {
        ("queue", None): (1_000, 2_000),
        ("prefill", None): (2_000, 2_500),
        ("block", 2): (2_500, 3_000),
        # From where the one before ended, not from the end of its own first pass.
        ("block", 3): (3_000, 4_000),
    }
    first, second = recorded.named("block")
    assert (first.attributes["first_step"], first.attributes["last_step"], first.attributes["commits"]) == (0, 7, 8)
    assert (second.attributes["first_step"], second.attributes["last_step"], second.attributes["commits"]) == (
        8,
        23,
        16,
    )
    assert {parent_of(span) for span in recorded.spans} - {SPAN_ID} == {id_of(engine)}
    assert (parent_of(engine), trace_id_of(engine)) == (SPAN_ID, TRACE_ID)
    assert (engine.start_time, engine.end_time) == (1_000, 4_000)
    assert engine.attributes["tokens"] == 24
    assert engine.attributes["passes"] == 27
    assert engine.attributes["finish_reason"] == "length"
    for span in recorded.spans:
        assert (span.attributes["request_id"], span.attributes["engine_request_id"]) == ("http-1", "cmpl-1-0")


@pytest.mark.parametrize(("num_prompt_tokens", "num_cached_tokens"), [(15, 0), (0, 0), (40, 32)])
def test_without_a_block_to_prefill_the_first_block_begins_with_the_lane(
    recorded, num_prompt_tokens, num_cached_tokens
):
    run(
        recorded,
        (2_000, [started(num_prompt_tokens, num_cached_tokens)]),
        (2_500, [BlockStarted("cmpl-1-0", 0, 0, 16), commits(0, range(0, 16))]),
        (3_000, [BlockFinished("cmpl-1-0", 0, 0, 16), finished()]),
    )
    assert not recorded.named("prefill")
    assert (recorded.one("block").start_time, recorded.one("block").end_time) == (2_000, 3_000)


def test_a_request_that_nobody_wants_any_more_ends_its_spans(recorded):
    spans = run(recorded, (2_000, [started(3)]), (2_500, [BlockStarted("cmpl-1-0", 0, 0, 16), commits(0, range(2))]))
    assert not recorded.named("engine")
    spans.close()
    assert recorded.one("engine").attributes["cancelled"] is True
    assert recorded.one("block").attributes["whole"] is False
    spans.close()
    assert len(recorded.named("engine")) == 1


def test_a_request_that_fails_is_an_error(recorded):
    run(recorded, (2_000, [started(3)]), (2_500, [finished(FinishReason.ERROR, "no finite logits")]))
    status = recorded.one("engine").status
    assert (status.status_code, status.description) == (StatusCode.ERROR, "no finite logits")


def test_a_caller_who_does_not_want_a_trace_gets_none(recorded):
    spans = EngineSpans(recorded.tracer, TraceContext(PARENT[:-1] + "0", "http-1"), "cmpl-1-0", Clock())
    spans.take([started(3), finished()])
    assert not recorded.spans


@pytest.mark.parametrize(("error", "level"), [(None, logging.INFO), ("no finite logits", logging.ERROR)])
def test_the_log_names_each_request_that_ended_by_the_id_of_its_answer(error, level):
    """Nothing in a replica's log had led from a client's request to the engine's."""
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append
    logger = logging.getLogger("ray.serve")
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.INFO)
    log_end(finished(FinishReason.LENGTH if error is None else FinishReason.ERROR, error))
    logger.setLevel(before)
    logger.removeHandler(handler)
    (record,) = said
    assert record.levelno == level
    assert record.getMessage().startswith("cmpl-1-0: ")
    assert "24 tokens in 27 passes and 2 blocks, 16 of 40 prompt tokens cached" in record.getMessage()
    assert (error or "") in record.getMessage()


async def batches_of(*batches: tuple[Event, ...]):
    for batch in batches:
        yield batch


async def test_watching_changes_no_event_and_without_a_context_nothing_stands_between(recorded):
    events = [(started(3),), (BlockStarted("cmpl-1-0", 0, 0, 16), commits(0, range(16))), (finished(),)]
    watched = with_engine_spans(batches_of(*events), recorded.tracer, TraceContext(PARENT, "http-1"), "cmpl-1-0")
    assert [batch async for batch in watched] == events
    assert recorded.one("engine").attributes["tokens"] == 24
    for tracer, context in ((recorded.tracer, None), (NO_TRACER, TraceContext(PARENT, "http-1"))):
        plain = batches_of()
        assert with_engine_spans(plain, tracer, context, "cmpl-1-0") is plain


async def test_closing_what_is_watched_closes_the_engines_batches(recorded):
    source = batches_of((started(3),), (finished(),))
    watched = with_engine_spans(source, recorded.tracer, TraceContext(PARENT, "http-1"), "cmpl-1-0")
    await anext(watched)
    await watched.aclose()
    assert [batch async for batch in source] == []
    assert recorded.one("engine").attributes["cancelled"] is True


LEASE = Lease(lease_id="l1", request_id="r", replica_id="replica-1", expected_start_s=0.25, group="g1")


class TracedClient(DirectClient):
    """Routes to the one engine there is, as the client of an ingress does."""

    def __init__(self, engine: Any, tracer: Tracer) -> None:
        super().__init__(engine)
        self._tracer = tracer

    async def generate(self, request, caller=None):
        span = RouteSpan(self._tracer, request.request_id)
        span.leased(LEASE)
        span.refused("replica-1", "no_room")
        span.leased(None)
        watched = with_engine_spans(super().generate(request), self._tracer, span.context, request.request_id)
        span.taken("replica-2", 2)
        async for events in watched:
            span.generated(events)
            yield events


@pytest.fixture
def app(served, recorded) -> FastAPI:
    client = TracedClient(FakeEngine(served.config), recorded.tracer)
    limits = Limits(max_body_bytes=1000)
    return create_api(Service(client=client, checkpoint=served, limits=limits, created=1, tracer=recorded.tracer))


async def call(app: FastAPI, method: str, path: str, **options: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.request(method, path, **options)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_request_is_one_trace_from_its_caller_to_its_blocks(app, recorded, is_stream):
    headers = {"x-request-id": "mine", "traceparent": PARENT}
    body = {"prompt": "a small", "max_tokens": 20, "stream": is_stream}
    answer = await call(app, "POST", "/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200
    http = recorded.one("POST /v1/completions")
    assert (trace_id_of(http), parent_of(http)) == (TRACE_ID, SPAN_ID)
    assert http.attributes["http.response.status_code"] == 200
    assert http.attributes["http.route"] == "/v1/completions"
    assert http.attributes["tokens.0"] == 20
    route, engine = recorded.one("route"), recorded.one("engine")
    assert parent_of(route) == id_of(http)
    assert [event.name for event in route.events] == ["leased", "refused", "chosen without the router"]
    assert (route.attributes["group"], route.attributes["expected_start_s"]) == ("g1", 0.25)
    assert (route.attributes["replica"], route.attributes["tries"]) == ("replica-2", 2)
    assert recorded.named("block")
    assert {span.attributes["request_id"] for span in recorded.spans} == {"mine"}
    assert {trace_id_of(span) for span in recorded.spans} == {TRACE_ID}
    assert engine.attributes["engine_request_id"].startswith("cmpl-")


async def test_a_replica_is_told_nothing_once_the_way_to_it_has_ended(recorded):
    span = RouteSpan(recorded.tracer, "cmpl-1-0")
    span.close(TimeoutError("late"))
    span.close()
    assert recorded.one("route").status.status_code is StatusCode.ERROR
    assert span.context is None


async def test_errors_are_told_apart_by_status_and_probes_leave_no_span(app, recorded):
    assert (await call(app, "GET", "/health")).status_code == 200
    assert not recorded.spans
    assert (await call(app, "POST", "/v1/completions", json={"prompt": "a", "max_tokens": "x"})).status_code == 400
    assert (await call(app, "GET", "/nowhere")).status_code == 404
    bad, lost = recorded.spans
    assert (bad.attributes["http.response.status_code"], bad.status.status_code) == (400, StatusCode.UNSET)
    # Whoever scans for pages must not make a name of each.
    assert lost.name == "GET other"
    assert not trace.get_current_span().is_recording()


@pytest.mark.parametrize("traceparent", ["", "nonsense", "00-0-0-01", f"00-{'0' * 32}-{SPAN_ID}-01", "é"])
async def test_a_traceparent_that_is_none_begins_a_trace(app, recorded, traceparent):
    answer = await call(app, "GET", "/v1/models", headers={"traceparent": traceparent.encode("latin-1")})
    assert answer.status_code == 200
    assert recorded.one("GET /v1/models").parent is None


def test_no_folder_means_no_tracer():
    assert make_tracer(TelemetrySettings(), "engine") is NO_TRACER


def test_spans_are_written_as_an_export_request_that_protobuf_reads(tmp_path, recorded):
    with recorded.tracer.start_as_current_span("outer", attributes={"text": "é \ud800", "number": 2**40}) as outer:
        outer.add_event("leased", {"replica": "r", "share": 0.5, "good": True, "many": [1, 2]})
        with recorded.tracer.start_as_current_span("inner", kind=trace.SpanKind.SERVER) as inner:
            inner.set_status(trace.Status(StatusCode.ERROR, "why"))
    parsed = Parse(json.dumps(to_otlp(recorded.spans)), ExportTraceServiceRequest())
    (resource,) = parsed.resource_spans
    (scope,) = resource.scope_spans
    read_inner, read_outer = scope.spans
    assert (read_inner.name, read_outer.name) == ("inner", "outer")
    assert read_inner.kind == read_inner.SPAN_KIND_SERVER
    assert read_outer.kind == read_outer.SPAN_KIND_INTERNAL
    assert (read_inner.status.code, read_inner.status.message) == (2, "why")
    assert read_outer.start_time_unix_nano == recorded.one("outer").start_time
    attributes = {item.key: item.value for item in read_outer.attributes}
    assert attributes["text"].string_value == "é ?"
    assert attributes["number"].int_value == 2**40
    (event,) = read_outer.events
    assert [item.key for item in event.attributes] == ["replica", "share", "good", "many"]


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def names_in(file: Path) -> list[str]:
    return [span["name"] for line in lines(file) for r in line["resourceSpans"] for span in r["scopeSpans"][0]["spans"]]


def test_a_tracer_with_a_folder_writes_one_file_for_its_process(tmp_path):
    tracer = make_tracer(TelemetrySettings(trace_dir=str(tmp_path / "a" / "b")), "ingress")
    for number in range(3):
        tracer.start_span(f"span {number}").end()
    provider = tracer.span_processor
    assert provider.force_flush()
    (file,) = (tmp_path / "a" / "b").iterdir()
    assert file.name.startswith("ingress-")
    assert names_in(file) == ["span 0", "span 1", "span 2"]
    resource = lines(file)[0]["resourceSpans"][0]["resource"]["attributes"]
    assert {"key": "service.name", "value": {"stringValue": "ingress"}} in resource
    provider.shutdown()


def test_a_share_of_nothing_traces_those_who_ask_for_it_only(tmp_path):
    tracer = make_tracer(TelemetrySettings(trace_dir=str(tmp_path), trace_share=0), "engine")
    tracer.start_span("unasked").end()
    spans = EngineSpans(tracer, TraceContext(PARENT, "http-1"), "cmpl-1-0")
    spans.take([finished()])
    assert tracer.span_processor.force_flush()
    (file,) = tmp_path.iterdir()
    assert names_in(file) == ["engine"]
    tracer.span_processor.shutdown()


def test_a_full_file_begins_anew_and_keeps_the_one_before(tmp_path, recorded):
    recorded.tracer.start_span("x").end()
    file = tmp_path / "engine.jsonl"
    size = len(json.dumps(to_otlp(recorded.spans), separators=(",", ":"))) + 1
    exporter = SpanFile(file, max_bytes=2 * size)
    for _ in range(5):
        exporter.export(recorded.spans)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine.1.jsonl", "engine.jsonl"]
    assert names_in(file) == ["x"]
    assert names_in(tmp_path / "engine.1.jsonl") == ["x", "x"]


def test_a_disk_that_is_full_for_a_while_spoils_no_line(tmp_path, recorded):
    """It took the beginning of a line, and the first line that fitted again was glued to that."""
    recorded.tracer.start_span("x").end()
    file = tmp_path / "engine.jsonl"
    exporter = SpanFile(file, max_bytes=10**6)
    assert exporter.export(recorded.spans) is SpanExportResult.SUCCESS
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 50, limits[1]))
    try:
        assert exporter.export(recorded.spans) is SpanExportResult.FAILURE
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert exporter.export(recorded.spans) is SpanExportResult.SUCCESS
    assert names_in(file) == ["x", "x"]


def test_a_folder_that_vanishes_costs_spans_and_one_line_of_log(tmp_path, recorded):
    recorded.tracer.start_span("x").end()
    exporter = SpanFile(tmp_path / "gone" / "engine.jsonl", max_bytes=1000)
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append
    logger = logging.getLogger("ray.serve")
    logger.addHandler(handler)
    exporter.export(recorded.spans)
    exporter.export(recorded.spans)
    logger.removeHandler(handler)
    (record,) = said
    assert "spans cannot be written" in record.getMessage()
