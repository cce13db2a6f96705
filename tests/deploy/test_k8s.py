"""The manifests without a cluster: what each overlay builds, against schemas, the operator's rules and each other."""

from __future__ import annotations

import os
import subprocess
from copy import deepcopy
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator

from tests.deploy.manifest_rules import (
    GPU,
    OPERATOR,
    PART_OF,
    PROMETHEUS,
    admitted,
    broken_ties,
    environment_of,
    groups,
    one,
    port_of,
    refused_by_operator,
)
from tests.deploy.manifests import OVERLAYS, ROOT, errors, spoil
from tests.deploy.schemas import made_strict

KUBERNETES = kubernetes_validate.latest_version()
SERVE_CONFIG = (ROOT / "deploy" / "steerling-8b.yaml").read_text(encoding="utf-8")
STRANGER = {"app.kubernetes.io/name": "somebody"}


@pytest.fixture(scope="module")
def definition():
    """The strict schema of RayService, from the operator's definition that RAYSERVICE_CRD names."""
    file = os.environ.get("RAYSERVICE_CRD")
    if not file:
        pytest.skip("RAYSERVICE_CRD names no file ray.io_rayservices.yaml; see docs/kubernetes.md")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    versions = yaml.load(Path(file).read_text(encoding="utf-8"), loader)["spec"]["versions"]
    (schema,) = [each["schema"]["openAPIV3Schema"] for each in versions if each["name"] == "v1"]
    return Draft202012Validator(made_strict(schema))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_rayservice_fits_the_operators_definition_with_no_key_too_many(built, definition, overlay):
    assert errors(definition, one(built[overlay], "RayService")) == []


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("spec serveConfig", "x", "serveConfig"),
        ("spec rayClusterConfig", None, "rayClusterConfig"),
        ("spec rayClusterConfig enableInTreeAutoscalin", True, "enableInTreeAutoscalin"),
        ("spec rayClusterConfig autoscalerOptions version", "v3", "v3"),
        ("spec rayClusterConfig gcsFaultToleranceOptions redis", "r", "redis"),
        ("spec rayClusterConfig headGroupSpec rayStartParams num-cpus", 0, "0 is not of type 'string'"),
        ("spec rayClusterConfig workerGroupSpecs 0 maxReplica", 2, "maxReplica"),
        ("spec rayClusterConfig workerGroupSpecs 0 template spec toleration", [], "toleration"),
        ("spec rayClusterConfig workerGroupSpecs 0 template spec containers 0 enviroment", [], "enviroment"),
        ("spec rayClusterConfig workerGroupSpecs 0 template spec containers 0 resources limit", {}, "limit"),
    ],
)
def test_an_error_planted_in_a_rayservice_is_found_by_the_definition(prod, definition, path, value, named):
    service = one(prod, "RayService")
    spoil(service, path, value)
    found = errors(definition, service)
    assert any(named in error for error in found), found


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_plain_objects_fit_kubernetes_own_schemas(built, overlay):
    plain = [each for each in built[overlay] if each["kind"] in ("NetworkPolicy", "PersistentVolumeClaim", "ConfigMap")]
    assert plain
    for each in plain:
        kubernetes_validate.validate(each, KUBERNETES, strict=True)


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("NetworkPolicy", "spec podSelectors"),
        ("NetworkPolicy", "spec ingress 0 form"),
        ("NetworkPolicy", "spec ingress 1 ports 0 prot"),
        ("PersistentVolumeClaim", "spec accessMode"),
        ("PersistentVolumeClaim", "spec resources request"),
        ("ConfigMap", "dat"),
    ],
)
def test_an_error_planted_in_a_plain_object_is_found(prod, kind, path):
    spoiled = one(prod, kind)
    spoil(spoiled, path, "x")
    with pytest.raises(kubernetes_validate.ValidationError, match=path.split()[-1]):
        kubernetes_validate.validate(spoiled, KUBERNETES, strict=True)


def as_pod(group: dict) -> dict:
    return {"apiVersion": "v1", "kind": "Pod", **group["template"]}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_pods_of_every_group_fit_kubernetes_own_schemas(built, overlay):
    for group in groups(one(built[overlay], "RayService")).values():
        kubernetes_validate.validate(as_pod(group), KUBERNETES, strict=True)


@pytest.mark.parametrize("path", ["spec toleration", "spec containers 0 resource", "spec volumes 0 emptyDirs"])
def test_an_error_planted_in_a_pod_is_found(prod, path):
    pod = as_pod(groups(one(prod, "RayService"))["gpu"])
    spoil(pod, path, {})
    with pytest.raises(kubernetes_validate.ValidationError, match=path.split()[-1]):
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_kind_goes_unchecked(built, overlay):
    assert {each["kind"] for each in built[overlay]} <= {
        "RayService",
        "PersistentVolumeClaim",
        "NetworkPolicy",
        "PodMonitor",
        "PrometheusRule",
        "ConfigMap",
    }


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_operator_refuses_no_rayservice(built, overlay):
    assert list(refused_by_operator(one(built[overlay], "RayService"))) == []


CLUSTER = "spec rayClusterConfig"
HEAD = f"{CLUSTER} headGroupSpec"
WORKERS = f"{CLUSTER} workerGroupSpecs 0"


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("metadata name", "g" * 48, "at most 47 characters"),
        ("metadata name", "8b", "begins with a letter"),
        ("metadata annotations ray.io/initializing-timeout", "soon", "initializing-timeout is soon"),
        (f"{WORKERS} template spec restartPolicy", "Always", "gpu has restartPolicy Always"),
        (f"{HEAD} template spec restartPolicy", "OnFailure", "head has restartPolicy OnFailure"),
        (f"{HEAD} template spec containers", [], "head has no container"),
        (f"{HEAD} resources", {"cpu": "1"}, "head says its resources"),
        (f"{HEAD} rayStartParams labels", "a=b", "belong into labels"),
        (f"{HEAD} headService", {"metadata": {"name": "mine"}}, "headService must not have a name"),
        (f"{WORKERS} minReplicas", 6, "minReplicas 6 and maxReplicas 5"),
        (f"{CLUSTER} rayVersion", "", "needs a rayVersion"),
        (f"{CLUSTER} upgradeStrategy", {"type": "Recreate"}, "belongs to the RayService"),
        (f"{CLUSTER} gcsFaultToleranceOptions storage", {}, "for rocksdb only"),
        (f"{HEAD} template spec containers 0 env 0", {"name": "RAY_REDIS_ADDRESS", "value": "r"}, "RAY_REDIS_ADDRESS"),
        (f"{HEAD} template spec containers 0 env 0", {"name": "RAY_enable_autoscaler_v2"}, "RAY_enable_autoscaler_v2"),
        ("spec upgradeStrategy type", "RollingUpdate", "RollingUpdate is none of the operator's"),
    ],
)
def test_what_the_operator_refuses_is_found_here_first(prod, path, value, said):
    service = one(prod, "RayService")
    spoil(service, path, value)
    found = list(refused_by_operator(service))
    assert any(said in each for each in found), found


def test_without_autoscaling_both_bounds_of_a_group_are_needed(prod):
    service = one(prod, "RayService")
    spoil(service, f"{CLUSTER} enableInTreeAutoscaling", False)
    spoil(service, f"{WORKERS} maxReplicas", None)
    assert list(refused_by_operator(service)) == ["gpu needs minReplicas and maxReplicas where nothing scales it"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_objects_of_an_overlay_fit_each_other(built, overlay):
    assert list(broken_ties(built[overlay])) == []


POD = f"{WORKERS} template spec"


@pytest.mark.parametrize(
    ("kind", "path", "value", "said"),
    [
        ("RayService", f"{POD} terminationGracePeriodSeconds", 90, "is killed after 90 s and drains for 90"),
        ("RayService", f"{POD} containers 0 env 3 value", "60", "a leaving node ends its replicas after 60"),
        ("RayService", f"{POD} containers 0 env 3 value", "35", "behind HAProxy an ingress takes up to 35"),
        ("RayService", f"{POD} containers 0 env 0 value", "0", "head and workers differ"),
        ("RayService", f"{POD} containers 0 image", "other:1", "different images"),
        ("RayService", f"{HEAD} template spec containers 0 image", "glassblock:latest", "latest changes"),
        ("RayService", f"{POD} containers 0 resources requests {GPU}", "2", "requests 2 GPU"),
        ("RayService", f"{POD} tolerations", [], "does not tolerate"),
        ("RayService", f"{POD} containers 0 readinessProbe", {}, "probes of its own"),
        ("RayService", f"{POD} volumes 1 emptyDir", {}, "no memory at /dev/shm"),
        ("RayService", f"{POD} volumes 0 persistentVolumeClaim claimName", "none", "which nothing claims"),
        ("RayService", f"{POD} containers 0 volumeMounts 0 mountPath", "/weights", "nothing mounted at /models"),
        ("RayService", f"{POD} securityContext runAsNonRoot", False, "may run as root"),
        ("RayService", f"{POD} containers 0 securityContext", {}, "may become root"),
        ("RayService", f"{POD} containers 0 ports 0 containerPort", 8001, "another port for serve"),
        ("RayService", f"{POD} containers 0 ports 1 name", "metric", "which gpu does not declare"),
        ("RayService", f"{WORKERS} template metadata labels", {}, "lacks the label"),
        ("RayService", f"{WORKERS} maxReplicas", 4, "EngineServer may want 5 GPU, and the worker groups offer 4"),
        ("RayService", f"{HEAD} rayStartParams num-cpus", "2", "head offers 2 CPU"),
        ("NetworkPolicy", "spec ingress 3 ports 0 port", 8081, "which the policy closes"),
    ],
)
def test_a_tie_between_objects_that_is_broken_is_found(prod, kind, path, value, said):
    spoiled = one(prod, kind)
    spoil(spoiled, path, value)
    found = list(broken_ties(prod))
    assert any(said in each for each in found), found


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_stranger_reaches_the_serve_port_and_nothing_else(built, overlay):
    policy, service = one(built[overlay], "NetworkPolicy"), one(built[overlay], "RayService")
    assert policy["spec"]["podSelector"]["matchLabels"] == PART_OF
    serve = port_of(groups(service)["head"], "serve")
    ports = {
        port["containerPort"]
        for group in groups(service).values()
        for port in group["template"]["spec"]["containers"][0]["ports"]
    }
    # 52365 is a node's agent; 30000 and 10002 stand for what replicas and workers choose.
    every = ports | {52365, 30000, 10002}

    def reached(sender):
        return {port for port in every if admitted(policy, sender, port)}

    assert reached(STRANGER) == {serve}
    assert reached(PART_OF) == every
    assert reached(OPERATOR) == {serve, 8265}
    assert reached(PROMETHEUS) == {serve, 8080, 44217, 44227}


@pytest.mark.parametrize("name", ["base", "prod"])
def test_the_embedded_deploy_file_is_the_one_in_deploy(built, name):
    assert one(built[name], "RayService")["spec"]["serveConfigV2"] == SERVE_CONFIG, "run `make k8s-files`"


def test_the_command_that_makes_files_of_k8s_makes_what_is_committed(tmp_path):
    subprocess.run(["make", "--silent", "k8s-files", f"K8S={tmp_path}"], cwd=ROOT, check=True)
    made = sorted(file.relative_to(tmp_path) for file in tmp_path.rglob("*.yaml"))
    assert list(map(str, made)) == ["base/serve-config.yaml", "components/monitoring/alerts.yaml"]
    for file in made:
        assert (tmp_path / file).read_text() == (ROOT / "k8s" / file).read_text(), "run `make k8s-files`"


@pytest.mark.parametrize("part", ["router", "ingress"])
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_part_that_could_be_placed_on_the_head_is_found(built, overlay, part):
    """The router came without CPUs at first, and Serve may place that anywhere, so also on the head."""
    objects = deepcopy(built[overlay])
    service = one(objects, "RayService")
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    del config["applications"][0]["args"][part]
    service["spec"]["serveConfigV2"] = yaml.safe_dump(config)
    name = {"router": "BlockRouter", "ingress": "Ingress"}[part]
    assert list(broken_ties(objects)) == [f"{name} asks for no CPU and no GPU, and may be placed on the head"]


def test_production_keeps_the_clusters_state_outside_the_head_and_dev_does_not(built):
    option = "gcsFaultToleranceOptions"
    assert option in one(built["prod"], "RayService")["spec"]["rayClusterConfig"]
    assert option not in one(built["dev"], "RayService")["spec"]["rayClusterConfig"]


def test_no_manifest_holds_a_secret(built):
    for objects in built.values():
        for each in objects:
            assert each["kind"] != "Secret"
            if each["kind"] == "RayService":
                password = each["spec"]["rayClusterConfig"].get("gcsFaultToleranceOptions", {}).get("redisPassword", {})
                assert "value" not in password


def test_every_node_has_haproxy_and_throughput_mode(built):
    for objects in built.values():
        for group in groups(one(objects, "RayService")).values():
            environment = environment_of(group)
            assert environment["RAY_SERVE_ENABLE_HA_PROXY"] == environment["RAY_SERVE_THROUGHPUT_OPTIMIZED"] == "1"
