"""`python -m deploy.grafana.build`: writes the dashboards' JSON and the table of `docs/metrics.md`.

`--check` writes nothing and exits with 1 if a file is not what it would write.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from serve_app.metrics_table import METRICS, Metric

from .engine_dashboards import BLOCKS, CAPACITY, THROUGHPUT
from .panels import APPLICATION_FILTER, CLUSTER, Dashboard, Panel
from .serving_dashboards import ERRORS, ROUTER

DASHBOARDS = (BLOCKS, THROUGHPUT, CAPACITY, ROUTER, ERRORS)

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "grafana" / "dashboards"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
PAGE = ROOT / "docs" / "metrics.md"
TABLE_START, TABLE_END = "<!-- table: made by python -m deploy.grafana.build -->", "<!-- end of table -->"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_SCHEMA_VERSION = 39
"""Of Grafana 11; later ones bring it to theirs when they read it."""
_WIDTH, _HEIGHT, _PER_LINE = 12, 8, 2
_NAME = re.compile(r"ray_glassblock_([a-z_]+)")


def dashboard_json(dashboard: Dashboard) -> dict[str, Any]:
    """A dashboard as Grafana imports it."""
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["glassblock"],
        "schemaVersion": _SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [
            {
                "type": "dashboards",
                "title": "Glassblock",
                "tags": ["glassblock"],
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
                "icon": "external link",
            }
        ],
        "templating": {"list": _variables()},
        "panels": [_panel(number, panel) for number, panel in enumerate(dashboard.panels)],
    }


def _variables() -> list[dict[str, Any]]:
    start = "ray_glassblock_engine_start_seconds"
    source = {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "hide": 0,
    }
    return [
        source,
        _variable("cluster", "Cluster", f"label_values({start}, {CLUSTER})"),
        _variable("application", "Application", f'label_values({start}{{{CLUSTER}=~"$cluster"}}, application)'),
        _variable("replica", "Engine replica", f"label_values({start}{{{APPLICATION_FILTER}}}, replica)"),
    ]


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        # Also where the label is missing: outside Kubernetes nothing tells clusters apart.
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "hide": 0,
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    is_heatmap = panel.kind == "heatmap"
    place = {"h": _HEIGHT, "w": _WIDTH, "x": number % _PER_LINE * _WIDTH, "y": number // _PER_LINE * _HEIGHT}
    return {
        "id": number + 1,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": _field_defaults(panel), "overrides": []},
        "options": _options(panel),
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": DATASOURCE,
                "editorMode": "code",
                "expr": query.expr,
                "legendFormat": query.legend,
                "range": True,
                **({"format": "heatmap"} if is_heatmap else {}),
            }
            for i, query in enumerate(panel.queries)
        ],
    }


def _field_defaults(panel: Panel) -> dict[str, Any]:
    if panel.kind != "timeseries":
        return {"unit": panel.unit}
    style = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 30 if panel.is_stacked else 0,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if panel.is_stacked else "none", "group": "A"},
    }
    return {"unit": panel.unit, "min": 0, "custom": style}


def _options(panel: Panel) -> dict[str, Any]:
    match panel.kind:
        case "timeseries":
            return {
                "legend": {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["mean", "max"]},
                "tooltip": {"mode": "multi", "sort": "desc"},
            }
        case "stat":
            return {"reduceOptions": {"calcs": ["lastNotNull"]}, "textMode": "value_and_name", "colorMode": "none"}
        case "heatmap":
            return {
                "calculate": False,
                "yAxis": {"unit": panel.unit},
                "color": {"mode": "scheme", "scheme": "Blues", "steps": 32},
                "cellGap": 1,
                "legend": {"show": True},
                "tooltip": {"mode": "single", "showColorScale": True, "yHistogram": False},
            }


def metrics_in(expression: str) -> set[str]:
    """Names of the table that an expression reads."""
    found = set()
    for exported in _NAME.findall(expression):
        name = next((n for n in _spellings(exported) if n in METRICS), None)
        if name is None:
            raise ValueError(f"ray_glassblock_{exported} is not in the table of metrics")
        found.add(name)
    return found


def _spellings(exported: str) -> Iterator[str]:
    yield exported
    for suffix in ("_total", "_bucket", "_count", "_sum"):
        yield exported.removesuffix(suffix)


def alert_rules() -> list[dict[str, Any]]:
    """The alerts, as the file has them."""
    content = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))
    return [rule for group in content["groups"] for rule in group["rules"]]


def metrics_table() -> str:
    """The page's table."""
    lines = [
        "| name | type | unit | labels | what it tells | panels | alerts |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [_line(name, metric) for name, metric in METRICS.items()]
    return "\n".join(lines)


def _line(name: str, metric: Metric) -> str:
    panels = [
        f"{dashboard.title.removeprefix('Glassblock / ')}: {panel.title}"
        for dashboard in DASHBOARDS
        for panel in dashboard.panels
        if any(name in metrics_in(query.expr) for query in panel.queries)
    ]
    alerts = [rule["alert"] for rule in alert_rules() if name in metrics_in(str(rule["expr"]))]
    cells = (
        f"`{metric.exported_name(name)}`",
        metric.kind,
        metric.unit,
        ", ".join(f"`{label}`" for label in metric.labels),
        metric.description,
        "; ".join(panels),
        ", ".join(alerts),
    )
    return f"| {' | '.join(cells)} |"


def files() -> dict[Path, str]:
    """What is to be written where."""
    page = PAGE.read_text(encoding="utf-8")
    start, end = page.index(TABLE_START) + len(TABLE_START), page.index(TABLE_END)
    texts = {PAGE: f"{page[:start]}\n{metrics_table()}\n{page[end:]}"}
    for dashboard in DASHBOARDS:
        text = json.dumps(dashboard_json(dashboard), indent=1, ensure_ascii=True) + "\n"
        texts[FOLDER / f"{dashboard.uid}.json"] = text
    return texts


def main(arguments: list[str] | None = None) -> int:
    """Write the files, or only compare; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m deploy.grafana.build", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file would change")
    is_check = parser.parse_args(arguments).check
    old = [file for file, text in files().items() if not file.exists() or file.read_text(encoding="utf-8") != text]
    for file in old:
        print(f"{'would change' if is_check else 'wrote'} {file.relative_to(ROOT)}")
        if not is_check:
            file.write_text(files()[file], encoding="utf-8")
    return int(is_check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
