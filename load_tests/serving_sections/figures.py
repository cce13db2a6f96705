"""From what clients saw to the rows of tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..engine_sections.report import Row, Section, percentile
from .client import Outcome
from .events import tokens_between

SHARES = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))


def spread(seconds: Sequence[float]) -> Row:
    """How many there are, and p50, p95 and p99 of seconds, in milliseconds."""
    figures: Row = {"count": len(seconds)}
    for name, share in SHARES:
        figures[f"at_{name}_ms"] = 1e3 * percentile(seconds, share) if seconds else None
    return figures


def waits(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Seconds that clients waited, from the moment at which a request was due."""
    found: dict[str, list[float]] = {
        name: [] for name in ("first byte", "first token", "first block", "between blocks", "end to end")
    }
    for outcome in outcomes:
        stream = outcome.stream
        if stream.first_byte is not None:
            found["first byte"].append(stream.first_byte - outcome.due)
        if stream.first_token is not None:
            found["first token"].append(stream.first_token - outcome.due)
        if stream.blocks:
            found["first block"].append(stream.blocks[0].ended - outcome.due)
        pairs = zip(stream.blocks, stream.blocks[1:], strict=False)
        found["between blocks"] += [later.ended - earlier.ended for earlier, later in pairs]
        if outcome.is_ok:
            found["end to end"].append(outcome.ended - outcome.due)
    return found


def rate(outcomes: Sequence[Outcome], begin: float, end: float) -> float:
    """Tokens a second between two moments."""
    return sum(tokens_between(outcome.stream.blocks, begin, end) for outcome in outcomes) / (end - begin)


def error_counts(outcomes: Sequence[Outcome]) -> Counter[str]:
    """How often each code ended a request; streams that ended without a word count as `cut`."""
    return Counter(outcome.code or "cut" for outcome in outcomes if not outcome.is_ok)


def describe(
    section: Section, outcomes: Sequence[Outcome], *, loop: str, client_cpu_share: float | None = None
) -> None:
    """Add the three tables of a load: what was served, what clients waited for, what went wrong."""
    if not outcomes:
        section.note("no request was sent")
        return
    begin, end = min(outcome.sent for outcome in outcomes), max(outcome.ended for outcome in outcomes)
    tokens = sum(outcome.stream.num_tokens or 0 for outcome in outcomes if outcome.is_ok)
    section.add(
        "served",
        loop=loop,
        requests=len(outcomes),
        ok=sum(outcome.is_ok for outcome in outcomes),
        cut=sum(outcome.is_cut for outcome in outcomes),
        took_s=end - begin,
        requests_per_s=len(outcomes) / (end - begin),
        tokens_per_s=tokens / (end - begin),
        sent_late_ms=1e3 * max(outcome.sent - outcome.due for outcome in outcomes),
        client_cpu_share=client_cpu_share,
    )
    for name, seconds in waits(outcomes).items():
        section.add("what clients waited for", loop=loop, wait=name, **spread(seconds))
    for code, count in sorted(error_counts(outcomes).items()):
        section.add("errors", loop=loop, code=code, requests=count)
