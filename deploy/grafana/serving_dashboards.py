"""Dashboards of what the router and HTTP record."""

from __future__ import annotations

from .panels import FAILED, Dashboard, Panel, Query, app, engine, quantile, quantiles, rate, rate_or_zero

ROUTER = Dashboard(
    uid="glassblock-router",
    title="Glassblock / Router",
    description="The queue of the whole application, and how well the router guesses where a request starts soonest.",
    panels=(
        Panel(
            title="Requests in the router's queue",
            description="Requests that no replica has room for yet.",
            unit="short",
            queries=(Query(f"sum({app('router_queue_requests')})", "waiting"),),
        ),
        Panel(
            title="Oldest wait",
            description="How long the oldest of them has waited.",
            unit="s",
            queries=(Query(f"max({app('router_oldest_wait_seconds')})", "oldest"),),
        ),
        Panel(
            title="Time in the router's queue by outcome (p95)",
            description="Assigned, cancelled by the client, past its deadline, or refused.",
            unit="s",
            queries=(Query(quantile(0.95, app("router_queue_seconds_bucket"), "outcome"), "{{outcome}}"),),
        ),
        Panel(
            title="Replicas heard from",
            description="Replicas that report to the router, beside those that are ready.",
            unit="short",
            queries=(
                Query(f"max({app('router_replicas')})", "heard from"),
                Query(f"count({app('engine_start_seconds')}) or vector(0)", "ready"),
            ),
        ),
        Panel(
            title="Free lanes",
            description="As the router believes, and as the replicas say.",
            unit="short",
            queries=(
                Query(f"max({app('router_lanes_free')})", "router"),
                Query(f"sum({app('lanes_capacity')}) - sum({app('lanes_in_use')})", "replicas"),
            ),
        ),
        Panel(
            title="Assignments by reason",
            description="For a prefix that the replica holds, or since the request starts there soonest.",
            unit="reqps",
            is_stacked=True,
            queries=(Query(rate(app("router_assignments_total"), "reason"), "{{reason}}"),),
        ),
        Panel(
            title="Requests released together",
            description="Size of the groups that the router releases at a block boundary.",
            unit="short",
            queries=quantiles(app("router_group_requests_bucket"), 0.5, 0.95),
        ),
        Panel(
            title="Error of predicted boundaries",
            description="Distance between a replica's next block boundary as predicted and as it came. "
            "Where it nears the block latency, the router places requests by chance.",
            unit="s",
            queries=quantiles(app("router_boundary_error_seconds_bucket"), 0.5, 0.95),
        ),
        Panel(
            title="Refused leases",
            description="Assignments that replicas refused, by reason; these go back to the head of the queue.",
            unit="reqps",
            queries=(
                Query(rate(app("router_refused_leases_total"), "reason"), "{{reason}}"),
                Query(rate_or_zero(app("router_refused_leases_total")), "all"),
            ),
        ),
        Panel(
            title="Rejections",
            description="Requests refused at the door since the queue was full or their tenant had its share.",
            unit="reqps",
            queries=(
                Query(rate(app("router_rejections_total"), "reason"), "{{reason}}"),
                Query(rate_or_zero(app("router_rejections_total")), "all"),
            ),
        ),
        Panel(
            title="Router restarts",
            description="Times that the router was found to have been started anew.",
            unit="short",
            queries=(
                Query(f"sum(increase({app('router_restarts_seen_total')}[$__rate_interval])) or vector(0)", "restarts"),
            ),
        ),
        Panel(
            title="Requests without the router, and retries",
            description="Requests that chose a replica without the router, and those moved to another replica before "
            "anything was sent.",
            unit="reqps",
            queries=(
                Query(rate_or_zero(app("ingress_router_fallbacks_total")), "without the router"),
                Query(rate_or_zero(app("ingress_retries_total")), "retried"),
            ),
        ),
    ),
)

ERRORS = Dashboard(
    uid="glassblock-errors",
    title="Glassblock / HTTP and errors",
    description="What clients see: requests, errors, broken streams, times from their request to their bytes.",
    panels=(
        Panel(
            title="HTTP requests by status",
            description="Answers per second. 499: the client left before its end.",
            unit="reqps",
            is_stacked=True,
            queries=(Query(rate(app("ingress_requests_total"), "code"), "{{code}}"),),
        ),
        Panel(
            title="HTTP requests by route",
            description="Answers per second.",
            unit="reqps",
            is_stacked=True,
            queries=(Query(rate(app("ingress_requests_total"), "route"), "{{route}}"),),
        ),
        Panel(
            title="Open requests",
            description="HTTP requests that are being answered or wait, by ingress replica.",
            unit="short",
            queries=(Query(f"sum by (replica) ({app('ingress_open_requests')})", "{{replica}}"),),
        ),
        Panel(
            title="Errors by code",
            description="The `code` of the error's body. Codes of bad requests are the clients' affair.",
            unit="reqps",
            queries=(Query(rate(app("ingress_errors_total"), "code"), "{{code}}"),),
        ),
        Panel(
            title="Share of failures",
            description="Answers with a status from 500 on and streams that broke, of all requests.",
            unit="percentunit",
            queries=(
                Query(
                    f"(({rate_or_zero(app('ingress_requests_total', FAILED))}) "
                    f"+ ({rate_or_zero(app('ingress_cut_streams_total'))})) / {rate(app('ingress_requests_total'))}",
                    "failures",
                ),
            ),
        ),
        Panel(
            title="Broken streams",
            description="Streams that ended with an error after their first byte: nothing can retry these.",
            unit="reqps",
            queries=(Query(rate_or_zero(app("ingress_cut_streams_total")), "broken"),),
        ),
        Panel(
            title="Ends of requests in the engine",
            description="length and stop are good ends, abort is mostly a client that left, error a failed generation.",
            unit="reqps",
            is_stacked=True,
            queries=(Query(rate(engine("requests_finished_total"), "reason"), "{{reason}}"),),
        ),
        Panel(
            title="Cancelled requests",
            description="Requests that engines were told to drop.",
            unit="reqps",
            queries=(Query(rate_or_zero(engine("aborts_total")), "cancelled"),),
        ),
        Panel(
            title="Time to a stream's first byte",
            description="From an HTTP request's arrival; more than the engine's time to first token by what router, "
            "transport and ingress take.",
            unit="s",
            queries=quantiles(app("ingress_first_token_seconds_bucket"), 0.5, 0.95, 0.99),
        ),
        Panel(
            title="Time of whole completions",
            description="From an HTTP request's arrival to its last byte; those with an error are left out.",
            unit="s",
            queries=quantiles(app("ingress_request_seconds_bucket"), 0.5, 0.95, 0.99),
        ),
    ),
)
