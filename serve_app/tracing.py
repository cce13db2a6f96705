"""Spans of an HTTP request and of its way to a replica, with OpenTelemetry, written as OTLP JSON lines.

Nothing is global: each deployment has a tracer of its own, whatever Ray or somebody else does with OpenTelemetry.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from os import getpid
from pathlib import Path

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine import Event, Finished

from .config import TelemetrySettings
from .middleware import is_last, route_pattern
from .routing.messages import Lease
from .span_files import SpanFile

FLUSH_MS = 1000
"""How long a span may wait in memory."""
MAX_ID_LENGTH = 200
"""Clients choose request ids; no more of one is kept."""
UNTRACED = ("/health", "/ready")
"""Probes ask these all the time."""
_W3C = TraceContextTextMapPropagator()
_REQUEST_ID = otel_context.create_key("glassblock.request_id")

NO_TRACER: Tracer = trace.NoOpTracerProvider().get_tracer("glassblock")
"""Makes spans that nobody keeps."""


def make_tracer(settings: TelemetrySettings, service: str) -> Tracer:
    """A tracer that writes to a file of this process in `trace_dir`, or NO_TRACER without one.

    Raises OSError where the folder cannot be made.
    """
    if settings.trace_dir is None:
        return NO_TRACER
    folder = Path(settings.trace_dir)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{service}-{socket.gethostname()}-{getpid()}.jsonl"
    provider = TracerProvider(
        # What the client's `traceparent` says about sampling decides; without one, the share.
        sampler=ParentBasedTraceIdRatio(settings.trace_share),
        resource=Resource.create({"service.name": service, "service.namespace": "glassblock"}),
    )
    exporter = SpanFile(file, max_bytes=settings.trace_file_bytes)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=FLUSH_MS))
    return provider.get_tracer("glassblock")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """What of a trace travels to the replica that serves the request."""

    traceparent: str
    request_id: str
    """The HTTP request's, as `x-request-id` has it."""

    @property
    def parent(self) -> otel_context.Context:
        """For spans that belong under the one that it names."""
        return _W3C.extract({"traceparent": self.traceparent})


class TraceMiddleware:
    """One span for each HTTP request; whatever runs inside finds it as the current one."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self.app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Watch the answer's status and end."""
        if scope["type"] != "http" or scope["path"].endswith(UNTRACED):
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        request_id = headers.get("x-request-id", "")[:MAX_ID_LENGTH]
        span = self._tracer.start_span(
            scope["method"],
            context=_W3C.extract(headers),
            kind=SpanKind.SERVER,
            attributes={"request_id": request_id, "http.request.method": scope["method"]},
        )
        is_complete = False

        async def send_watched(message: Message) -> None:
            nonlocal is_complete
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
                if message["status"] >= 500:
                    span.set_status(Status(StatusCode.ERROR))
            await send(message)
            is_complete = is_complete or is_last(message)

        inside = otel_context.set_value(_REQUEST_ID, request_id, trace.set_span_in_context(span))
        token = otel_context.attach(inside)
        try:
            await self.app(scope, receive, send_watched)
            if not is_complete:
                span.set_attribute("client_left", True)
        except Exception as error:
            span.record_exception(error)
            span.set_status(Status(StatusCode.ERROR, type(error).__name__))
            raise
        finally:
            otel_context.detach(token)
            route = route_pattern(scope)
            span.update_name(f"{scope['method']} {route}")
            span.set_attribute("http.route", route)
            span.end()


class RouteSpan:
    """The way of one request to the replica that takes it: waiting for leases, refusals, replicas that were lost.

    Made while the HTTP request's span is the current one.
    """

    def __init__(self, tracer: Tracer, engine_request_id: str) -> None:
        request_id = otel_context.get_value(_REQUEST_ID)
        self._request_id = request_id if isinstance(request_id, str) else ""
        self._http_span = trace.get_current_span()
        self._span = tracer.start_span(
            "route", attributes={"request_id": self._request_id, "engine_request_id": engine_request_id}
        )

    @property
    def context(self) -> TraceContext | None:
        """What the replica is given; None where nothing is recorded."""
        if not self._span.is_recording():
            return None
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, trace.set_span_in_context(self._span))
        return TraceContext(carrier["traceparent"], self._request_id)

    def leased(self, lease: Lease | None) -> None:
        """The router has decided, or, with None, was not there to ask."""
        if not self._span.is_recording():
            return
        if lease is None:
            self._span.add_event("chosen without the router")
            return
        self._span.add_event("leased", {**_named(lease.replica_id), "lease_id": lease.lease_id})
        # Those of the last lease stay: the one that was taken.
        self._span.set_attributes({"group": lease.group, "expected_start_s": lease.expected_start_s})

    def refused(self, replica_id: str, reason: str) -> None:
        """A replica did not take the request."""
        if self._span.is_recording():
            self._span.add_event("refused", {**_named(replica_id), "reason": reason})

    def lost(self, replica_id: str) -> None:
        """A replica died or did not answer."""
        if self._span.is_recording():
            self._span.add_event("lost", _named(replica_id))

    def taken(self, replica_id: str, num_tries: int) -> None:
        """A replica has the request: the way ends here."""
        if self._span.is_recording():
            self._span.set_attributes({**_named(replica_id), "tries": num_tries})
            self._span.end()

    def generated(self, events: Sequence[Event]) -> None:
        """Events that came from the replica: the HTTP request's span gets the number of tokens."""
        if self._http_span.is_recording() and events and isinstance(last := events[-1], Finished):
            name = f"tokens.{last.request_id.rpartition('-')[2]}"
            self._http_span.set_attribute(name, len(last.output.token_ids))

    def close(self, error: BaseException | None = None) -> None:
        """End it, if nobody took the request."""
        if self._span.is_recording():
            if error is not None:
                self._span.set_status(Status(StatusCode.ERROR, type(error).__name__))
            self._span.end()


def _named(replica_id: str | None) -> dict[str, str]:
    return {"replica": replica_id} if replica_id else {}
