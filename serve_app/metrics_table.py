"""Every measurement that is exported, in one table. Knows names and units; must not know Ray or where values come from.

`docs/metrics.md`, the dashboards and the alerts are checked against it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

PREFIX = "glassblock_"

_PASS = (0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_WAIT = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_BLOCK = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 30.0, 60.0)
_REQUEST = (
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.3,
    0.5,
    0.75,
    1.0,
    1.5,
    2.0,
    3.0,
    5.0,
    7.5,
    10.0,
    20.0,
    30.0,
    60.0,
    120.0,
    300.0,
)
_ROWS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0)
_COMMITS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0, 128.0, 256.0, 512.0)
_BLOCK_PASSES = (1.0, 2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 20.0, 24.0, 32.0, 40.0, 48.0, 56.0, 64.0, 128.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One exported measurement. Ray adds `ray_`, `_total` to counters, and labels for application and replica."""

    kind: Literal["counter", "gauge", "histogram"]
    description: str
    unit: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Of a histogram: upper bounds, rising."""

    def exported_name(self, name: str) -> str:
        """The name by which Prometheus knows it; a histogram's series add `_bucket`, `_count` and `_sum`."""
        return f"ray_{PREFIX}{name}_total" if self.kind == "counter" else f"ray_{PREFIX}{name}"


def _counter(description: str, unit: str, *labels: str) -> Metric:
    return Metric(kind="counter", description=description, unit=unit, labels=labels)


def _gauge(description: str, unit: str) -> Metric:
    return Metric(kind="gauge", description=description, unit=unit)


def _histogram(description: str, buckets: tuple[float, ...], *labels: str, unit: str = "seconds") -> Metric:
    return Metric(kind="histogram", description=description, unit=unit, labels=labels, buckets=buckets)


ENGINE_METRICS: dict[str, Metric] = {
    "requests": _counter("Requests that the engine took, by how they choose positions.", "requests", "policy"),
    "requests_steered": _counter("Of these, with steering.", "requests"),
    "requests_attributed": _counter("Of these, with attribution.", "requests"),
    "requests_finished": _counter("Requests that ended, and why: length, stop, abort or error.", "requests", "reason"),
    "requests_waiting": _gauge("Requests without a lane, preempted ones included.", "requests"),
    "aborts": _counter("Requests that were cancelled, mostly because their client left.", "requests"),
    "preemptions": _counter("Times that a sequence lost its lane because pages ran out.", "sequences"),
    "request_queue_seconds": _histogram("From a request's arrival at the engine to its first lane.", _REQUEST),
    "request_first_token_seconds": _histogram(
        "From a request's arrival at the engine to its first token handed out; an attributed token is handed out "
        "once it is explained.",
        _REQUEST,
    ),
    "request_first_block_seconds": _histogram(
        "From a request's arrival at the engine to the end of its first block.", _REQUEST
    ),
    "request_seconds": _histogram(
        "From a request's arrival at the engine to its end; cancelled and failed ones are left out.", _REQUEST
    ),
    "block_seconds": _histogram(
        "From the launch of a block's first pass until its end is handed out, preemptions in between included.",
        _BLOCK,
        "policy",
    ),
    "block_interval_seconds": _histogram("From the end of one block of a request to the end of the next.", _BLOCK),
    "block_passes": _histogram(
        "Passes that filled a block; drafts ride in them and count no pass of their own.",
        _BLOCK_PASSES,
        "policy",
        unit="passes",
    ),
    "engine_passes": _counter("Forward passes.", "passes"),
    "engine_commits": _counter("Tokens committed.", "tokens"),
    "engine_busy_seconds": _counter("Device time of all passes; its rate is the share of time in passes.", "seconds"),
    "engine_rows": _histogram("Rows in a pass.", _ROWS, unit="rows"),
    "engine_pass_commits": _histogram("Tokens that a pass committed, of all its rows.", _COMMITS, unit="tokens"),
    "engine_pass_seconds": _histogram(
        "Device time of a pass, by its bucket: the number of rows, rounded up to one that has a captured graph.",
        _PASS,
        "rows",
    ),
    "engine_wait_seconds": _histogram("Time that the host waited for a pass.", _WAIT),
    "engine_start_seconds": _gauge(
        "From the start of a replica's constructor until it was ready; there once it is.", "seconds"
    ),
    "rows_run": _counter("Rows that rode in passes: prefill, denoise, draft, shadow or seal.", "rows", "kind"),
    "rows_in_use": _gauge("Rows of the last pass; 0 when nothing runs.", "rows"),
    "rows_capacity": _gauge("Most rows of a pass.", "rows"),
    "lanes_in_use": _gauge("Lanes of running sequences; a guided one has two.", "lanes"),
    "lanes_capacity": _gauge("Sequences that can run at once, a guided one counted twice.", "lanes"),
    "pages_free": _gauge("Pages without content.", "pages"),
    "pages_cached": _gauge("Pages kept for prefixes to come; given up as soon as somebody needs one.", "pages"),
    "pages_held": _gauge("Pages of running sequences, and those lent to analyses.", "pages"),
    "pages_capacity": _gauge("All pages.", "pages"),
    "prompt_tokens": _counter(
        "Prompt tokens at first admission: cached, found in sealed pages, or computed.", "tokens", "source"
    ),
    "prefix_hits": _counter("Requests that found a part of their prompt in sealed pages.", "requests"),
    "scored_tokens": _counter(
        "Tokens scored left to right: cached, found with an earlier text that began alike, or computed.",
        "tokens",
        "source",
    ),
    "score_cache_bytes": _gauge("Host memory that the cached scores take.", "bytes"),
    "drafts": _counter("Draft rows of the lossless policy.", "rows"),
    "drafts_position_right": _counter("Drafts whose expected commit came at the expected position.", "rows"),
    "drafts_token_right": _counter("Of these, with the expected token.", "rows"),
    "drafts_committed": _counter("Drafts whose own commit counted.", "rows"),
}
"""What an engine's replica records."""

INGRESS_METRICS: dict[str, Metric] = {
    "ingress_requests": _counter("HTTP requests that were answered, by route and status.", "requests", "route", "code"),
    "ingress_errors": _counter(
        "Errors by the `code` of their body, those sent inside a stream included.", "requests", "code"
    ),
    "ingress_first_token_seconds": _histogram(
        "From an HTTP request's arrival to the first byte of a streamed completion.", _REQUEST
    ),
    "ingress_request_seconds": _histogram(
        "From an HTTP request's arrival to the last byte of a completion without an error.", _REQUEST
    ),
    "ingress_cut_streams": _counter("Streams that ended with an error after their first byte.", "requests"),
    "ingress_retries": _counter("Requests moved to another replica before anything was sent.", "requests"),
    "ingress_router_fallbacks": _counter("Requests that chose a replica without the router.", "requests"),
    "ingress_open_requests": _gauge("HTTP requests that have come and are not answered to their end.", "requests"),
}
"""What an ingress replica records."""

ROUTER_METRICS: dict[str, Metric] = {
    "router_queue_requests": _gauge("Requests that wait in the router.", "requests"),
    "router_oldest_wait_seconds": _gauge("How long the oldest of them has waited; 0 without any.", "seconds"),
    "router_replicas": _gauge("Replicas that the router hears from.", "replicas"),
    "router_lanes_free": _gauge("Lanes that it believes to be free, of all replicas.", "lanes"),
    "router_queue_seconds": _histogram(
        "Time in the router's queue, by how it ended: assigned, rejected, cancelled or deadline.",
        _REQUEST,
        "outcome",
    ),
    "router_group_requests": _histogram("Requests that one release gave to a replica.", _ROWS, unit="requests"),
    "router_boundary_error_seconds": _histogram(
        "Distance between a replica's next block boundary as predicted and as it came.", _BLOCK
    ),
    "router_assignments": _counter(
        "Requests given to a replica: for a prefix that it holds, or since they can start there soonest.",
        "requests",
        "reason",
    ),
    "router_refused_leases": _counter(
        "Assignments that a replica refused; they go back to the head of the queue.", "requests", "reason"
    ),
    "router_rejections": _counter("Requests refused at the door: queue_full or tenant_limit.", "requests", "reason"),
    "router_restarts_seen": _counter("Times that the router was found to have been started anew.", "restarts"),
}
"""What the router records."""

METRICS: dict[str, Metric] = {**ENGINE_METRICS, **INGRESS_METRICS, **ROUTER_METRICS}
"""Name as it is recorded -> what is exported."""


def is_exported(name: str, kind: str, value: float, labels: Iterable[str]) -> bool:
    """Whether the table has a measurement so, and its value is one."""
    metric = METRICS.get(name)
    return metric is not None and metric.kind == kind and set(labels) == set(metric.labels) and math.isfinite(value)
