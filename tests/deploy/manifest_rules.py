"""What must hold of the Kubernetes manifests, as functions that list what does not.

`refused_by_operator` restates what KubeRay's operator refuses after the API server has taken an object, which no
schema says. `broken_ties` holds things in different objects to each other. Both see objects as `kubectl kustomize`
prints them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from ray.serve._private.constants import (
    RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S,
    RAY_SERVE_DIRECT_INGRESS_SHUTDOWN_BUFFER_S,
)

from serve_app.config import AppConfig
from serve_app.deploy_check import check, deployments_of

Object = dict[str, Any]

MAX_NAME_LENGTH = 47
DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
GPU = "nvidia.com/gpu"
PART_OF = {"app.kubernetes.io/part-of": "glassblock"}
OPERATOR = {"app.kubernetes.io/name": "kuberay-operator"}
PROMETHEUS = {"app.kubernetes.io/name": "prometheus"}


def one(objects: list[Object], kind: str) -> Object:
    """The only object of a kind."""
    (found,) = [each for each in objects if each["kind"] == kind]
    return found


def groups(service: Object) -> dict[str, Object]:
    """The head group as `head`, and the worker groups by name."""
    cluster = service["spec"]["rayClusterConfig"]
    return {"head": cluster["headGroupSpec"]} | {group["groupName"]: group for group in cluster["workerGroupSpecs"]}


def refused_by_operator(service: Object) -> Iterator[str]:
    """What the operator would not run, though the API server takes it."""
    name, spec = service["metadata"]["name"], service["spec"]
    cluster = spec["rayClusterConfig"]
    if len(name) > MAX_NAME_LENGTH or not DNS_LABEL.fullmatch(name):
        yield f"name {name} must be a DNS label of at most {MAX_NAME_LENGTH} characters that begins with a letter"
    scales = cluster.get("enableInTreeAutoscaling", False)
    second = scales and cluster.get("autoscalerOptions", {}).get("version") == "v2"
    for group_name, group in groups(service).items():
        pod = group["template"]["spec"]
        if not pod.get("containers"):
            yield f"{group_name} has no container"
            return
        given = {"num-cpus", "num-gpus", "memory", "resources"} & group.get("rayStartParams", {}).keys()
        if given and group.get("resources"):
            yield f"{group_name} says its resources in rayStartParams and in resources"
        if "labels" in group.get("rayStartParams", {}):
            yield f"{group_name} has rayStartParams.labels, which belong into labels"
        if second and pod.get("restartPolicy", "Never") != "Never":
            yield f"{group_name} has restartPolicy {pod['restartPolicy']}; autoscaler v2 needs Never"
        if group_name != "head":
            least, most = group.get("minReplicas"), group.get("maxReplicas")
            if not scales and (least is None or most is None):
                yield f"{group_name} needs minReplicas and maxReplicas where nothing scales it"
            if least is not None and most is not None and not 0 <= least <= most:
                yield f"{group_name} has minReplicas {least} and maxReplicas {most}"
    if cluster["headGroupSpec"].get("headService", {}).get("metadata", {}).get("name"):
        yield "headService must not have a name"
    environment = environment_of(cluster["headGroupSpec"])
    if "RAY_enable_autoscaler_v2" in environment:
        yield "RAY_enable_autoscaler_v2 is set; autoscalerOptions.version says it"
    if "RAY_REDIS_ADDRESS" in environment:
        yield "RAY_REDIS_ADDRESS is set; gcsFaultToleranceOptions.redisAddress says it"
    options = cluster.get("gcsFaultToleranceOptions", {})
    if options.get("backend", "redis") == "redis" and "storage" in options:
        yield "gcsFaultToleranceOptions.storage is for rocksdb only"
    kind = spec.get("upgradeStrategy", {}).get("type", "NewCluster")
    if kind not in ("NewCluster", "NewClusterWithIncrementalUpgrade", "None"):
        yield f"upgradeStrategy {kind} is none of the operator's"
    if kind == "NewClusterWithIncrementalUpgrade" and not scales:
        yield "an incremental upgrade needs enableInTreeAutoscaling"
    if "upgradeStrategy" in cluster:
        yield "upgradeStrategy belongs to the RayService, not to its rayClusterConfig"
    version = str(cluster.get("rayVersion", ""))
    if cluster.get("authOptions", {}).get("mode") == "token" and not re.fullmatch(r"\d+\.\d+\.\d+", version):
        yield f"authOptions.mode token needs a rayVersion, which is {version!r}"
    timeout = str(service["metadata"].get("annotations", {}).get("ray.io/initializing-timeout", "1s"))
    if not re.fullmatch(r"0*[1-9]\d*([smh]?)", timeout):
        yield f"ray.io/initializing-timeout is {timeout}; it must be like 30m"


def broken_ties(objects: list[Object]) -> Iterator[str]:
    """What is right in each object by itself and wrong together."""
    service = one(objects, "RayService")
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    for name, group in groups(service).items():
        yield from _wrong_with_pod(name, group, objects)
        yield from _wrong_times(name, group, config)
        if port_of(group, "serve") != config.get("http_options", {}).get("port", 8000):
            yield f"{name} declares another port for serve than the deploy file"
    environments = [environment_of(group) for group in groups(service).values()]
    if any(environment != environments[0] for environment in environments):
        yield "head and workers differ in what Ray reads at its start"
    if len({container(group)["image"] for group in groups(service).values()}) > 1:
        yield "head and workers have different images"
    if str(container(groups(service)["head"]).get("image", "")).endswith(":latest"):
        yield "an image named latest changes under a running cluster"
    yield from _too_few_workers(service, config)
    yield from _on_the_head(service, config)
    yield from _ports_nobody_has(objects)


def container(group: Object) -> Object:
    """The container that Ray runs in: the first one."""
    found: Object = group["template"]["spec"]["containers"][0]
    return found


def environment_of(group: Object) -> dict[str, str]:
    """Plain variables of a group's Ray container."""
    return {each["name"]: each.get("value", "") for each in container(group).get("env", [])}


def port_of(group: Object, name: str) -> int | None:
    """The number of a declared port."""
    return next((port["containerPort"] for port in container(group).get("ports", []) if port["name"] == name), None)


def admitted(policy: Object, sender: Mapping[str, str], port: int) -> bool:
    """Whether a NetworkPolicy lets a pod with these labels, in any namespace of ours, reach a TCP port."""
    for rule in policy["spec"].get("ingress", []):
        selectors = [each["podSelector"]["matchLabels"] for each in rule.get("from", [])]
        from_here = not rule.get("from") or any(selector.items() <= sender.items() for selector in selectors)
        ports = [each["port"] for each in rule.get("ports", [])]
        if from_here and (not rule.get("ports") or port in ports):
            return True
    return False


def _wrong_with_pod(name: str, group: Object, objects: list[Object]) -> Iterator[str]:
    pod, ray = group["template"]["spec"], container(group)
    if not PART_OF.items() <= group["template"].get("metadata", {}).get("labels", {}).items():
        yield f"{name} lacks the label by which policies and monitors find it"
    resources = ray["resources"]
    asked, limit = resources["requests"].get(GPU), resources["limits"].get(GPU)
    if asked != limit:
        yield f"{name} requests {asked} GPU and limits it to {limit}"
    tolerated = [(each.get("key"), each.get("operator"), each.get("effect")) for each in pod.get("tolerations", [])]
    if limit and (GPU, "Exists", "NoSchedule") not in tolerated:
        yield f"{name} does not tolerate the taint of GPU machines"
    if {"livenessProbe", "readinessProbe", "startupProbe"} & ray.keys():
        yield f"{name} has probes of its own; the operator's would not be injected"
    volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
    mounts = {mount["mountPath"]: volumes.get(mount["name"]) for mount in ray.get("volumeMounts", [])}
    if (mounts.get("/dev/shm") or {}).get("emptyDir", {}).get("medium") != "Memory":
        yield f"{name} has no memory at /dev/shm, and the 64 MiB that a container gets are too few for Ray"
    sources = [volume["persistentVolumeClaim"] for volume in volumes.values() if "persistentVolumeClaim" in volume]
    known = [each["metadata"]["name"] for each in objects if each["kind"] == "PersistentVolumeClaim"]
    for source in sources:
        if source["claimName"] not in known:
            yield f"{name} mounts {source['claimName']}, which nothing claims"
    if name != "head" and "/models" not in mounts:
        yield f"{name} has nothing mounted at /models, where the image keeps weights"
    if not pod.get("securityContext", {}).get("runAsNonRoot"):
        yield f"{name} may run as root"
    if ray.get("securityContext", {}).get("allowPrivilegeEscalation", True):
        yield f"{name} may become root"


def _wrong_times(name: str, group: Object, config: Object) -> Iterator[str]:
    """A pod must outlive its node's drain, and that the slowest replica."""
    drain = float(environment_of(group).get("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", 30))
    grace = group["template"]["spec"].get("terminationGracePeriodSeconds", 30)
    if grace <= drain:
        yield f"{name} is killed after {grace} s and drains for {drain}"
    # Behind HAProxy the ingress gets at least this long, whatever the deploy file says.
    floor = RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S + RAY_SERVE_DIRECT_INGRESS_SHUTDOWN_BUFFER_S
    if drain <= floor:
        yield f"{name} drains for {drain} s; behind HAProxy an ingress takes up to {floor}"
    yield from map(str, check(config, drain_timeout_s=drain))


def _too_few_workers(service: Object, config: Object) -> Iterator[str]:
    """The GPUs that all replicas may ask for, with those that a rolling update adds, must fit the worker groups."""
    offered = sum(
        group["maxReplicas"] * int(container(group)["resources"]["limits"].get(GPU, 0))
        for name, group in groups(service).items()
        if name != "head"
    )
    for application in config["applications"]:
        overrides = {each["name"]: each for each in application.get("deployments", [])}
        for name, deployment in deployments_of(AppConfig.model_validate(application["args"])).items():
            override = overrides.get(name, {})
            options = override.get("ray_actor_options") or deployment.ray_actor_options or {}
            built = deployment._deployment_config.autoscaling_config
            scaling = override.get("autoscaling_config") or (built.model_dump() if built else {})
            most = scaling.get("max_replicas") or override.get("num_replicas") or deployment.num_replicas
            surge = -(-most * override.get("max_surge_percent", 0) // 100)
            if (wanted := (most + surge) * (options.get("num_gpus") or 0)) > offered:
                yield f"{name} may want {wanted:.0f} GPU, and the worker groups offer {offered} at most"


def _on_the_head(service: Object, config: Object) -> Iterator[str]:
    """Serve places a replica that asks for nothing anywhere, and the head must serve nothing."""
    offered = groups(service)["head"].get("rayStartParams", {}).get("num-cpus")
    if offered != "0":
        yield f"head offers {offered} CPU to replicas; it must be 0"
    for application in config["applications"]:
        overrides = {each["name"]: each for each in application.get("deployments", [])}
        for name, deployment in deployments_of(AppConfig.model_validate(application["args"])).items():
            options = overrides.get(name, {}).get("ray_actor_options") or deployment.ray_actor_options or {}
            if not options.get("num_cpus") and not options.get("num_gpus"):
                yield f"{name} asks for no CPU and no GPU, and may be placed on the head"


def _ports_nobody_has(objects: list[Object]) -> Iterator[str]:
    """Ports that a monitor or the policy names must be declared by the pods that they select."""
    service, policy = one(objects, "RayService"), one(objects, "NetworkPolicy")
    for monitor in [each for each in objects if each["kind"] == "PodMonitor"]:
        labels = monitor["spec"]["selector"]["matchLabels"]
        for name, group in groups(service).items():
            pod = group["template"]["metadata"]["labels"] | {"ray.io/node-type": "head" if name == "head" else "worker"}
            if not labels.items() <= pod.items():
                continue
            for endpoint in monitor["spec"]["podMetricsEndpoints"]:
                number = port_of(group, endpoint["port"])
                if number is None:
                    yield f"{monitor['metadata']['name']} reads port {endpoint['port']}, which {name} does not declare"
                elif not admitted(policy, PROMETHEUS, number):
                    yield f"{monitor['metadata']['name']} reads port {endpoint['port']}, which the policy closes"
