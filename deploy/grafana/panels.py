"""What a panel is, and how its expressions are put together.

`$cluster`, `$application`, `$replica` and `$__rate_interval` are Grafana's variables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CLUSTER = "ray_io_cluster"
"""The label that tells Ray clusters apart; the Kubernetes monitors add it, and elsewhere it may be missing."""
APPLICATION_FILTER = f'{CLUSTER}=~"$cluster", application=~"$application"'
ENGINE_FILTER = f'{APPLICATION_FILTER}, replica=~"$replica"'
CACHED = 'source="cached"'
FAILED = 'code=~"5.."'

Unit = Literal["s", "percentunit", "short", "reqps", "ops", "bytes"]


@dataclass(frozen=True, slots=True)
class Query:
    """One expression, and how its series are called; `{{label}}` in a legend is that label's value."""

    expr: str
    legend: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One picture."""

    title: str
    description: str
    """What it tells and what to make of it."""
    unit: Unit
    """Grafana's name of the unit."""
    queries: tuple[Query, ...]
    kind: Literal["timeseries", "stat", "heatmap"] = "timeseries"
    is_stacked: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Dashboard:
    """One page."""

    uid: str
    title: str
    description: str
    panels: tuple[Panel, ...]


def metric(name: str, labels: str) -> str:
    """A selector of one of our series, by the name that Prometheus knows."""
    return f"ray_glassblock_{name}{{{labels}}}"


def engine(name: str, extra: str = "") -> str:
    """A selector within the chosen engine replicas."""
    return metric(name, ENGINE_FILTER + (f", {extra}" if extra else ""))


def app(name: str, extra: str = "") -> str:
    """A selector within the chosen application, whichever deployment records it."""
    return metric(name, APPLICATION_FILTER + (f", {extra}" if extra else ""))


def rate(selector: str, by: str = "") -> str:
    """Summed rate of a counter, by some labels or over all."""
    return f"sum{f' by ({by})' if by else ''} (rate({selector}[$__rate_interval]))"


def rate_or_zero(selector: str) -> str:
    """Summed rate of a counter that may never have counted: Ray exports none before its first count."""
    return f"{rate(selector)} or vector(0)"


def quantile(q: float, selector: str, by: str = "") -> str:
    """A quantile of a histogram whose `_bucket` series the selector chooses."""
    return f"histogram_quantile({q:g}, {rate(selector, f'{by}, le' if by else 'le')})"


def quantiles(selector: str, *qs: float) -> tuple[Query, ...]:
    """Several quantiles of one histogram."""
    return tuple(Query(quantile(q, selector), f"p{q * 100:g}") for q in qs)
