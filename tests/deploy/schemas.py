"""Schemas of what is no plain Kubernetes object: strict, so that a key that is not listed is an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

_LABEL = {"type": "string", "pattern": "^[a-zA-Z_][a-zA-Z0-9_]*$"}
_LABELS = {"type": "object", "additionalProperties": {"type": "string"}}


def _strict(properties: Schema, *required: str) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


_RELABELING = _strict(
    {
        "action": {"enum": ["replace", "keep", "drop", "hashmod", "labelmap", "labeldrop", "labelkeep"]},
        "sourceLabels": {"type": "array", "items": _LABEL},
        "targetLabel": _LABEL,
        "separator": {"type": "string"},
        "regex": {"type": "string"},
        "replacement": {"type": "string"},
    }
)
POD_MONITOR = _strict(
    {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "kind": {"const": "PodMonitor"},
        "metadata": _strict({"name": {"type": "string"}, "namespace": {"type": "string"}, "labels": _LABELS}, "name"),
        "spec": _strict(
            {
                "jobLabel": {"type": "string"},
                "namespaceSelector": _strict({"any": {"type": "boolean"}, "matchNames": {"type": "array"}}),
                "selector": _strict({"matchLabels": _LABELS}),
                "podMetricsEndpoints": {
                    "type": "array",
                    "minItems": 1,
                    "items": _strict(
                        {
                            "port": {"type": "string"},
                            "path": {"type": "string"},
                            "scheme": {"enum": ["http", "https"]},
                            "interval": {"type": "string", "pattern": r"^\d+(ms|s|m|h)$"},
                            "scrapeTimeout": {"type": "string", "pattern": r"^\d+(ms|s|m|h)$"},
                            "honorLabels": {"type": "boolean"},
                            "relabelings": {"type": "array", "items": _RELABELING},
                            "metricRelabelings": {"type": "array", "items": _RELABELING},
                        },
                        "port",
                    ),
                },
            },
            "selector",
            "podMetricsEndpoints",
        ),
    },
    "apiVersion",
    "kind",
    "metadata",
    "spec",
)
"""The part of the Prometheus operator's PodMonitor that we have a use for."""

_DURATION = {"type": "string", "pattern": r"^(0|(\d+y)?(\d+w)?(\d+d)?(\d+h)?(\d+m)?(\d+s)?(\d+ms)?)$", "minLength": 1}
PROMETHEUS_RULE = _strict(
    {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "kind": {"const": "PrometheusRule"},
        "metadata": POD_MONITOR["properties"]["metadata"],
        "spec": _strict(
            {
                "groups": {
                    "type": "array",
                    "minItems": 1,
                    "items": _strict(
                        {
                            "name": {"type": "string", "minLength": 1},
                            "interval": _DURATION,
                            "rules": {
                                "type": "array",
                                "minItems": 1,
                                "items": _strict(
                                    {
                                        "alert": {"type": "string", "pattern": "^[a-zA-Z_][a-zA-Z0-9_]*$"},
                                        "expr": {"type": "string", "minLength": 1},
                                        "for": _DURATION,
                                        "keep_firing_for": _DURATION,
                                        "labels": _LABELS,
                                        "annotations": _LABELS,
                                    },
                                    "alert",
                                    "expr",
                                ),
                            },
                        },
                        "name",
                        "rules",
                    ),
                }
            },
            "groups",
        ),
    },
    "apiVersion",
    "kind",
    "metadata",
    "spec",
)
"""The same of its PrometheusRule, which holds alerts only."""


def made_strict(schema: Any) -> Any:
    """A definition's schema in which a key that is not listed is an error, unless the definition wants it kept."""
    if isinstance(schema, list):
        return [made_strict(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {key: made_strict(value) for key, value in schema.items()}
    is_object = isinstance(schema.get("properties"), Mapping) and schema.get("type") == "object"
    if is_object and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made
