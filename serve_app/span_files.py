"""Finished spans as lines of OTLP JSON: what an OpenTelemetry Collector's `otlpjsonfile` receiver reads.

One file a process, in which each line is one `ExportTraceServiceRequest` in protobuf's JSON mapping: ids are
hexadecimal, 64-bit numbers strings.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id

logger = logging.getLogger("ray.serve")

# The numbers of opentelemetry.proto.trace.v1; the API counts kinds from another one.
_KINDS = {
    SpanKind.INTERNAL: 1,
    SpanKind.SERVER: 2,
    SpanKind.CLIENT: 3,
    SpanKind.PRODUCER: 4,
    SpanKind.CONSUMER: 5,
}
_STATUS = {StatusCode.UNSET: 0, StatusCode.OK: 1, StatusCode.ERROR: 2}


class SpanFile(SpanExporter):
    """Appends spans to a file. At `max_bytes` it begins anew, and the one before stays beside it as `....1.jsonl`."""

    def __init__(self, file: Path, *, max_bytes: int) -> None:
        self.file = file
        self._max_bytes = max_bytes
        self._is_failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Called by OpenTelemetry in its own thread. Spans that cannot be written are lost, which is said once."""
        line = json.dumps(to_otlp(spans), ensure_ascii=True, separators=(",", ":"))
        try:
            if self.file.exists() and self.file.stat().st_size + len(line) > self._max_bytes:
                self.file.replace(self.file.with_suffix(".1.jsonl"))
            self._append(line + "\n")
        except OSError as error:
            if not self._is_failing:
                self._is_failing = True
                logger.warning("spans cannot be written to %s and are lost; requests go on: %s", self.file, error)
            return SpanExportResult.FAILURE
        self._is_failing = False
        return SpanExportResult.SUCCESS

    def _append(self, line: str) -> None:
        size = self.file.stat().st_size if self.file.exists() else 0
        try:
            with self.file.open("a", encoding="utf-8") as output:
                output.write(line)
        except OSError:
            # A full disk takes a part of a line, which would spoil the next one too.
            with suppress(OSError):
                os.truncate(self.file, size)
            raise


def to_otlp(spans: Sequence[ReadableSpan]) -> dict[str, Any]:
    """Spans of one process as an ExportTraceServiceRequest."""
    resource = {"attributes": _attributes(spans[0].resource.attributes)} if spans else {}
    scope = {"name": "glassblock"}
    return {
        "resourceSpans": [
            {"resource": resource, "scopeSpans": [{"scope": scope, "spans": [_span(span) for span in spans]}]}
        ]
    }


def _span(span: ReadableSpan) -> dict[str, Any]:
    identity = span.get_span_context()
    assert identity is not None
    status: dict[str, Any] = {"code": _STATUS[span.status.status_code]}
    if span.status.description:
        status["message"] = span.status.description
    return {
        "traceId": format_trace_id(identity.trace_id),
        "spanId": format_span_id(identity.span_id),
        **({"parentSpanId": format_span_id(span.parent.span_id)} if span.parent is not None else {}),
        "name": span.name,
        "kind": _KINDS[span.kind],
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "attributes": _attributes(span.attributes or {}),
        "events": [
            {
                "timeUnixNano": str(event.timestamp),
                "name": event.name,
                "attributes": _attributes(event.attributes or {}),
            }
            for event in span.events
        ],
        "status": status,
    }


def _attributes(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, str):
        # Half of a surrogate pair would make the line unreadable as UTF-8.
        return {"stringValue": value.encode("utf-8", "replace").decode("utf-8")}
    return {"arrayValue": {"values": [_value(item) for item in value]}}
