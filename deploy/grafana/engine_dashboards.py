"""Dashboards of what engines record: latency, throughput, capacity."""

from __future__ import annotations

from .panels import CACHED, Dashboard, Panel, Query, engine, quantile, quantiles, rate, rate_or_zero

BLOCKS = Dashboard(
    uid="glassblock-blocks",
    title="Glassblock / Block latency",
    description="How long clients wait: for a lane, for the first token, for each block, for all of it.",
    panels=(
        Panel(
            title="Block latency",
            description="From a block's first pass to its end, all policies. It grows with rows per pass, context and "
            "passes per block.",
            unit="s",
            queries=quantiles(engine("block_seconds_bucket"), 0.5, 0.95, 0.99),
        ),
        Panel(
            title="Block latency by policy (p95)",
            description="Policies that commit several tokens a pass fill a block in fewer passes.",
            unit="s",
            queries=(Query(quantile(0.95, engine("block_seconds_bucket"), "policy"), "{{policy}}"),),
        ),
        Panel(
            title="Block latency, distribution",
            description="Blocks per second in each range of latency. Two bands mean two kinds of requests.",
            unit="s",
            kind="heatmap",
            queries=(Query(rate(engine("block_seconds_bucket"), "le"), "{{le}}"),),
        ),
        Panel(
            title="Block latency by replica (p95)",
            description="One replica apart from the others points to its GPU or its node.",
            unit="s",
            queries=(Query(quantile(0.95, engine("block_seconds_bucket"), "replica"), "{{replica}}"),),
        ),
        Panel(
            title="Time between blocks",
            description="From the end of one block of a request to the end of the next: the pace at which text grows.",
            unit="s",
            queries=quantiles(engine("block_interval_seconds_bucket"), 0.5, 0.95, 0.99),
        ),
        Panel(
            title="Passes per block by policy (median)",
            description="Block size over this is the tokens that a pass commits for one request.",
            unit="short",
            queries=(Query(quantile(0.5, engine("block_passes_bucket"), "policy"), "{{policy}}"),),
        ),
        Panel(
            title="Time in the engine's queue",
            description="From arrival at a replica to a lane. High while lanes are full or pages are short.",
            unit="s",
            queries=quantiles(engine("request_queue_seconds_bucket"), 0.5, 0.95, 0.99),
        ),
        Panel(
            title="Time to first token",
            description="From arrival at a replica to the first token handed out, which need not be the text's first.",
            unit="s",
            queries=quantiles(engine("request_first_token_seconds_bucket"), 0.5, 0.95, 0.99),
        ),
        Panel(
            title="Time to first block",
            description="From arrival at a replica to the end of the first block: the first text that never changes.",
            unit="s",
            queries=quantiles(engine("request_first_block_seconds_bucket"), 0.5, 0.95, 0.99),
        ),
        Panel(
            title="Time of whole requests",
            description="From arrival at a replica to the end; cancelled and failed requests are left out.",
            unit="s",
            queries=quantiles(engine("request_seconds_bucket"), 0.5, 0.95, 0.99),
        ),
    ),
)

THROUGHPUT = Dashboard(
    uid="glassblock-throughput",
    title="Glassblock / Throughput",
    description="How much is done: tokens, passes, rows, and where a pass's time goes.",
    panels=(
        Panel(
            title="Tokens per second",
            description="Tokens committed, by replica.",
            unit="short",
            is_stacked=True,
            queries=(Query(rate(engine("engine_commits_total"), "replica"), "{{replica}}"),),
        ),
        Panel(
            title="Device busy",
            description="Share of time that the device is in passes. Well below 1 with lanes full: the host is slow.",
            unit="percentunit",
            queries=(Query(rate(engine("engine_busy_seconds_total"), "replica"), "{{replica}}"),),
        ),
        Panel(
            title="Passes per second",
            description="Forward passes, by replica.",
            unit="ops",
            queries=(Query(rate(engine("engine_passes_total"), "replica"), "{{replica}}"),),
        ),
        Panel(
            title="Pass time by bucket (median)",
            description="Device time of a pass by its number of rows, rounded up to one with a captured graph.",
            unit="s",
            queries=(Query(quantile(0.5, engine("engine_pass_seconds_bucket"), "rows"), "{{rows}} rows"),),
        ),
        Panel(
            title="Host waits for a pass",
            description="Near zero where the host is what passes wait for; near the pass time where the device is.",
            unit="s",
            queries=quantiles(engine("engine_wait_seconds_bucket"), 0.5, 0.95),
        ),
        Panel(
            title="Tokens per pass",
            description="Of all rows of a pass. The mean is exact, quantiles are as fine as the buckets.",
            unit="short",
            queries=(
                Query(f"{rate(engine('engine_commits_total'))} / {rate(engine('engine_passes_total'))}", "mean"),
                *quantiles(engine("engine_pass_commits_bucket"), 0.5, 0.95),
            ),
        ),
        Panel(
            title="Rows per pass",
            description="How full passes are; the most is `max_rows`.",
            unit="short",
            queries=(
                Query(f"{rate(engine('rows_run_total'))} / {rate(engine('engine_passes_total'))}", "mean"),
                *quantiles(engine("engine_rows_bucket"), 0.5, 0.95),
            ),
        ),
        Panel(
            title="Rows by kind",
            description="Prefill rows read prompts, denoise rows write text, drafts guess ahead, seals finish blocks.",
            unit="ops",
            is_stacked=True,
            queries=(Query(rate(engine("rows_run_total"), "kind"), "{{kind}}"),),
        ),
        Panel(
            title="Requests by policy",
            description="Requests that engines took, by how they choose positions.",
            unit="reqps",
            is_stacked=True,
            queries=(Query(rate(engine("requests_total"), "policy"), "{{policy}}"),),
        ),
        Panel(
            title="Steered and attributed requests",
            description="Share of requests that ask for each.",
            unit="percentunit",
            queries=(
                Query(
                    f"({rate_or_zero(engine('requests_steered_total'))}) / {rate(engine('requests_total'))}", "steered"
                ),
                Query(
                    f"({rate_or_zero(engine('requests_attributed_total'))}) / {rate(engine('requests_total'))}",
                    "attributed",
                ),
            ),
        ),
        Panel(
            title="Drafts of the lossless policy",
            description="Share of drafts that guessed the position, the token too, and so committed one of their own. "
            "Where the last is low, lower `draft_row_limit`.",
            unit="percentunit",
            queries=tuple(
                Query(f"({rate_or_zero(engine(f'drafts_{name}_total'))}) / {rate(engine('drafts_total'))}", legend)
                for name, legend in (
                    ("position_right", "position right"),
                    ("token_right", "token right"),
                    ("committed", "committed"),
                )
            ),
        ),
    ),
)

CAPACITY = Dashboard(
    uid="glassblock-capacity",
    title="Glassblock / Capacity",
    description="What there is and what is in use: replicas, lanes, rows, pages, prefixes.",
    panels=(
        Panel(
            title="Replicas ready",
            description="Replicas that have loaded their checkpoint and generated something.",
            unit="short",
            kind="stat",
            queries=(Query(f"count({engine('engine_start_seconds')}) or vector(0)", "ready"),),
        ),
        Panel(
            title="Start of replicas",
            description="From a replica's constructor until it was ready: weights, compiling, capturing graphs.",
            unit="s",
            kind="stat",
            queries=(Query(engine("engine_start_seconds"), "{{replica}}"),),
        ),
        Panel(
            title="Lanes",
            description="Running sequences, and how many can run at once.",
            unit="short",
            queries=(
                Query(f"sum({engine('lanes_in_use')})", "in use"),
                Query(f"sum({engine('lanes_capacity')})", "capacity"),
            ),
        ),
        Panel(
            title="Requests waiting for a lane",
            description="In the engines' own queues, by replica.",
            unit="short",
            is_stacked=True,
            queries=(Query(f"sum by (replica) ({engine('requests_waiting')})", "{{replica}}"),),
        ),
        Panel(
            title="Rows",
            description="Rows of each replica's last pass, and the most that passes can carry.",
            unit="short",
            queries=(
                Query(f"sum({engine('rows_in_use')})", "in use"),
                Query(f"sum({engine('rows_capacity')})", "capacity"),
            ),
        ),
        Panel(
            title="Pages",
            description="Held by running sequences, cached for prefixes to come, free. Cached is as good as free.",
            unit="short",
            is_stacked=True,
            queries=tuple(Query(f"sum({engine(f'pages_{kind}')})", kind) for kind in ("held", "cached", "free")),
        ),
        Panel(
            title="Pages held",
            description="Share of pages that running sequences hold; at 1 sequences are preempted.",
            unit="percentunit",
            queries=(
                Query(
                    f"sum by (replica) ({engine('pages_held')}) / sum by (replica) ({engine('pages_capacity')})",
                    "{{replica}}",
                ),
            ),
        ),
        Panel(
            title="Preemptions",
            description="Sequences that lost their lane because pages ran out. Their text is the same, and later.",
            unit="ops",
            queries=(Query(rate_or_zero(engine("preemptions_total")), "all replicas"),),
        ),
        Panel(
            title="Prompt tokens",
            description="Prompt tokens whose pages were found sealed, and those that had to be computed.",
            unit="short",
            is_stacked=True,
            queries=(Query(rate(engine("prompt_tokens_total"), "source"), "{{source}}"),),
        ),
        Panel(
            title="Prefix cache",
            description="Share of prompt tokens, and of requests, for which sealed pages were found.",
            unit="percentunit",
            queries=(
                Query(
                    f"({rate_or_zero(engine('prompt_tokens_total', CACHED))}) / {rate(engine('prompt_tokens_total'))}",
                    "tokens",
                ),
                Query(f"({rate_or_zero(engine('prefix_hits_total'))}) / {rate(engine('requests_total'))}", "requests"),
            ),
        ),
        Panel(
            title="Scored tokens",
            description="Tokens scored left to right: computed, a row each, or found with a text that began alike.",
            unit="short",
            is_stacked=True,
            queries=(Query(rate(engine("scored_tokens_total"), "source"), "{{source}}"),),
        ),
        Panel(
            title="Score cache",
            description="Host memory of cached scores, by replica; at `score_cache_bytes` the least recently used go.",
            unit="bytes",
            queries=(Query(f"sum by (replica) ({engine('score_cache_bytes')})", "{{replica}}"),),
        ),
    ),
)
