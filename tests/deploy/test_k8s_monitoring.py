"""Monitors, alerts and dashboards as the component brings them to a cluster."""

from __future__ import annotations

import pytest
import yaml
from jsonschema import Draft202012Validator

from tests.deploy.manifest_rules import one
from tests.deploy.manifests import ROOT, errors, spoil
from tests.deploy.schemas import POD_MONITOR, PROMETHEUS_RULE


def test_there_are_monitors_for_head_and_workers_and_they_fit_their_schema(built):
    monitors = [each for each in built["prod"] if each["kind"] == "PodMonitor"]
    ports = {
        each["spec"]["selector"]["matchLabels"]["ray.io/node-type"]: [
            endpoint["port"] for endpoint in each["spec"]["podMetricsEndpoints"]
        ]
        for each in monitors
    }
    assert ports == {"head": ["metrics", "as-metrics", "dash-metrics"], "worker": ["metrics"]}
    for monitor in monitors:
        assert errors(Draft202012Validator(POD_MONITOR), monitor) == []
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            assert "ray_io_cluster" in [each["targetLabel"] for each in endpoint["relabelings"]]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec podMetricsEndpoint", []),
        ("spec selector matchLabel", {}),
        ("spec podMetricsEndpoints 0 ports", "metrics"),
        ("spec podMetricsEndpoints 0 port", None),
        ("spec podMetricsEndpoints 0 interval", "often"),
        ("spec podMetricsEndpoints 0 relabelings 0 sourceLabel", []),
        ("spec podMetricsEndpoints 0 relabelings 0 targetLabel", "ray.io/cluster"),
        ("spec podMetricsEndpoints 0 relabelings 0 action", "rename"),
    ],
)
def test_an_error_planted_in_a_monitor_is_found(prod, path, value):
    monitor = next(each for each in prod if each["kind"] == "PodMonitor")
    spoil(monitor, path, value)
    assert errors(Draft202012Validator(POD_MONITOR), monitor)


def test_the_alerts_of_the_cluster_are_those_of_a_machine_and_fit_their_schema(built):
    rule = one(built["prod"], "PrometheusRule")
    plain = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))
    assert rule["spec"] == plain, "run `make k8s-files`"
    assert errors(Draft202012Validator(PROMETHEUS_RULE), rule) == []
    monitors = [each for each in built["prod"] if each["kind"] == "PodMonitor"]
    releases = {each["metadata"]["labels"]["release"] for each in [rule, *monitors]}
    assert len(releases) == 1, "one Prometheus has to select them all"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec group", []),
        ("spec groups 0 name", None),
        ("spec groups 0 intervall", "15s"),
        ("spec groups 0 interval", "15 s"),
        ("spec groups 0 rules", []),
        ("spec groups 0 rules 0 alert", "no replica"),
        ("spec groups 0 rules 0 expr", None),
        ("spec groups 0 rules 0 for", "soon"),
        ("spec groups 0 rules 0 for", ""),
        ("spec groups 0 rules 0 label", {}),
        ("spec groups 0 rules 0 labels severity", 1),
    ],
)
def test_an_error_planted_in_the_alerts_is_found(prod, path, value):
    rule = one(prod, "PrometheusRule")
    spoil(rule, path, value)
    assert errors(Draft202012Validator(PROMETHEUS_RULE), rule)


def test_the_dashboards_of_the_cluster_are_those_in_deploy_and_grafana_finds_them(built):
    config_map = one(built["prod"], "ConfigMap")
    folder = ROOT / "deploy" / "grafana" / "dashboards"
    assert config_map["data"] == {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir()}
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    # What etcd takes is 1 MiB.
    assert sum(map(len, config_map["data"].values())) < 2**20


def test_without_the_component_nothing_of_the_prometheus_operator_is_needed(built):
    theirs = {"PodMonitor", "PrometheusRule"}
    assert theirs <= {each["kind"] for each in built["prod"]}
    for name in ("dev", "base"):
        assert not theirs & {each["kind"] for each in built[name]}
