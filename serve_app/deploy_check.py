"""`python -m serve_app.deploy_check deploy/*.yaml`: every key of Serve config files, and what Serve finds out too late.

Serve's own schema ignores keys it does not know, so that older releases can read newer files; a typo then means the
default. Here an unknown key is a fault at every level, whoever's model the level belongs to. All faults are reported
at once, each with its path, its value and a way out. Nothing here starts Ray or looks at a checkpoint.
"""

from __future__ import annotations

import argparse
import sys
import typing
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml
from ray.serve import Application, Deployment
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.schema import ServeDeploySchema

from .app import build_app
from .block_router import with_limits
from .config import BUILDER, AppConfig, LiveEngineServerSettings
from .strict_keys import Fault, known_part, refusals, show, way

_IMPORTED = {"request_router_class": "RequestRouterConfig", "policy_function": "AutoscalingPolicy"}
"""Keys whose value is imported by whoever parses the file, and the class that holds them in code."""


class DeployFileError(ValueError):
    """A deploy file has faults; its text lists them all."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("\n".join(map(str, faults)))
        self.faults = tuple(faults)


def load(text: str, *, drain_timeout_s: float | None = None) -> dict[str, Any]:
    """The content of a deploy file; raises DeployFileError with everything that is wrong with it."""
    try:
        content = yaml.load(text, _UniqueKeys)
    except yaml.YAMLError as error:
        raise DeployFileError([Fault("", f"this is not YAML that means one thing: {error}")]) from error
    if faults := check(content, drain_timeout_s=drain_timeout_s):
        raise DeployFileError(faults)
    return typing.cast(dict[str, Any], content)


def check(content: Any, *, drain_timeout_s: float | None = None) -> list[Fault]:
    """Everything that is wrong with the content of a deploy file; an empty list if nothing is.

    `drain_timeout_s` is how long a node that leaves keeps its replicas, Ray's RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S;
    None where no node leaves before the application does.
    """
    if not isinstance(content, Mapping):
        return [Fault("", f"the file holds {show(content)}; it must be a mapping with a list `applications`")]
    faults: list[Fault] = []
    known = known_part(content, ServeDeploySchema, "", faults)
    known = _without_imports(known, "", faults)
    # Ray's validators change what they are given.
    faults += refusals(ServeDeploySchema, deepcopy(known), "")
    applications = known.get("applications")
    for index, application in enumerate(applications if isinstance(applications, list) else ()):
        if isinstance(application, Mapping):
            faults += _check_application(application, f"applications[{index}]", drain_timeout_s)
    return faults


def deployments_of(settings: AppConfig) -> dict[str, Deployment]:
    """The deployments of our application by name, the ingress first."""
    found: dict[str, Deployment] = {}
    waiting = [build_app(settings)]
    while waiting:
        deployment: Deployment = waiting.pop(0)._bound_deployment
        found.setdefault(deployment.name, deployment)
        # Ray declares the arguments as a tuple of one and the keyword arguments likewise.
        keywords = typing.cast(dict[str, Any], deployment.init_kwargs)
        arguments = [*deployment.init_args, *keywords.values()]
        waiting += [argument for argument in arguments if isinstance(argument, Application)]
    return found


def _check_application(application: Mapping[str, Any], path: str, drain_timeout_s: float | None) -> list[Fault]:
    faults: list[Fault] = []
    import_path = application.get("import_path")
    listed = application.get("deployments") or []
    overrides = [(f"{path}.deployments[{i}]", o) for i, o in enumerate(listed) if isinstance(o, Mapping)]
    for where, override in overrides:
        faults += _check_override(override, where)
    if import_path != BUILDER:
        if str(import_path).startswith("serve_app"):
            faults.append(Fault(f"{path}.import_path", f"is {show(import_path)}; the builder here is {BUILDER}"))
        return faults
    args = application.get("args") or {}
    known = known_part(args, AppConfig, f"{path}.args", faults)
    if refused := refusals(AppConfig, known, f"{path}.args"):
        return faults + refused
    settings = AppConfig.model_validate(known)
    deployments = deployments_of(settings)
    faults += _check_names(overrides, deployments)
    if settings.engine_server.autoscaling is not None:
        faults += _check_scaling(overrides, f"{path}.args.engine_server.autoscaling")
    by_name = {str(override.get("name")): override for _, override in overrides}
    for where, override in overrides:
        faults += _check_user_config(override, where, settings)
    faults += _check_shutdown(by_name, deployments, path, drain_timeout_s)
    return faults


def _without_imports(value: Any, path: str, faults: list[Fault]) -> Any:
    """`value` without what Ray's models import as soon as they are made; each is a fault, and not imported here."""
    if isinstance(value, list):
        return [_without_imports(item, f"{path}[{index}]", faults) for index, item in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    kept = {}
    for key, item in value.items():
        where = f"{path}.{key}" if path else str(key)
        if key in _IMPORTED:
            faults.append(
                Fault(
                    where,
                    f"is {show(item)}; set it in code, in the deployment's decorator ({_IMPORTED[key]}): the process "
                    "that parses this file, such as the dashboard, would have to import it, and answers 500 if it "
                    "cannot",
                )
            )
        else:
            # What an application makes of its own settings is its own affair.
            kept[key] = item if key in ("args", "user_config") else _without_imports(item, where, faults)
    return kept


def _check_override(override: Mapping[str, Any], path: str) -> Iterator[Fault]:
    """What Ray takes as a mere dictionary when it parses an entry of `deployments`."""
    scaling, router = override.get("autoscaling_config"), override.get("request_router_config")
    if isinstance(scaling, Mapping):
        # As Serve does it: `auto` brings other defaults, so that more files are in order with it.
        defaults = {"max_replicas": AutoscalingConfig.default().max_replicas}  # type: ignore[no-untyped-call]
        merged = (defaults if override.get("num_replicas") == "auto" else {}) | dict(scaling)
        yield from refusals(AutoscalingConfig, merged, f"{path}.autoscaling_config")
    if isinstance(router, Mapping):
        yield from refusals(RequestRouterConfig, router, f"{path}.request_router_config")


def _check_names(
    overrides: Iterable[tuple[str, Mapping[str, Any]]], deployments: Mapping[str, Deployment]
) -> Iterator[Fault]:
    """Overrides that meet no deployment, meet one twice, or take away what the builder reserved."""
    seen: set[str] = set()
    for path, override in overrides:
        name = str(override.get("name"))
        if name not in deployments:
            yield Fault(f"{path}.name", f"is {show(name)}, which the application does not have{way(name, deployments)}")
            continue
        if name in seen:
            yield Fault(f"{path}.name", f"{show(name)} was there before; put its keys into one entry")
        seen.add(name)
        options = override.get("ray_actor_options")
        reserved = (deployments[name].ray_actor_options or {}).get("num_gpus") or 0
        if isinstance(options, Mapping) and reserved and not options.get("num_gpus"):
            yield Fault(
                f"{path}.ray_actor_options",
                f"is {show(dict(options))} without num_gpus; it replaces what the builder reserved ({reserved} GPU) "
                "as a whole: add num_gpus, or say it under args",
            )


def _check_user_config(override: Mapping[str, Any], path: str, settings: AppConfig) -> list[Fault]:
    """What the deployments would say to their `user_config`, by what they say it with."""
    name, user_config, where = override.get("name"), override.get("user_config"), f"{path}.user_config"
    if not isinstance(user_config, Mapping):
        return []  # None, or Ray's schema has refused it.
    faults: list[Fault] = []
    try:
        if name == "EngineServer":
            known = known_part(user_config, LiveEngineServerSettings, where, faults)
            faults += refusals(LiveEngineServerSettings, known, where)
        elif name == "BlockRouter":
            with_limits(settings.router.routing, user_config)
    except ValueError as error:
        faults.append(Fault(where, str(error)))
    return faults


def _check_scaling(overrides: Iterable[tuple[str, Mapping[str, Any]]], said: str) -> Iterator[Fault]:
    """Overrides of EngineServer that say once more how many replicas there are, beside what stands at `said`."""
    for path, override in overrides:
        if override.get("name") != "EngineServer":
            continue
        if (number := override.get("num_replicas")) is not None:
            yield Fault(
                f"{path}.num_replicas",
                f"is {show(number)}, which changes nothing where {said} is set; leave one of them out",
            )
        if (scaling := override.get("autoscaling_config")) is not None:
            yield Fault(
                f"{path}.autoscaling_config",
                f"is {show(scaling)}, which replaces {said} as a whole, its policy included: Serve would count "
                "requests in flight instead of lanes in use and time in the queue; say it there",
            )


def _check_shutdown(
    overrides: Mapping[str, Mapping[str, Any]],
    deployments: Mapping[str, Deployment],
    path: str,
    drain_timeout_s: float | None,
) -> Iterator[Fault]:
    """The ingress, whose requests last as long as those behind it, must not be cut first; nor anything by its node."""
    times: dict[str, float] = {}
    for name, deployment in deployments.items():
        override = overrides.get(name, {})
        config = deployment._deployment_config
        time = override.get("graceful_shutdown_timeout_s", config.graceful_shutdown_timeout_s)
        loop = override.get("graceful_shutdown_wait_loop_s")
        if not isinstance(time, int | float):
            continue  # Ray's schema has refused it.
        times[name] = time
        if isinstance(loop, int | float) and loop >= time:
            yield Fault(
                f"{path}.deployments ({name}).graceful_shutdown_wait_loop_s",
                f"is {loop}; the replica is killed after graceful_shutdown_timeout_s ({time}), before it has looked "
                "a second time whether it is idle: make it shorter than that",
            )
    ingress = next(iter(deployments))
    for name, time in times.items():
        where = f"{path}: graceful_shutdown_timeout_s of {name}"
        if ingress in times and time > times[ingress]:
            yield Fault(
                where,
                f"is {time}, and that of {ingress} only {times[ingress]}; the ingress would cut answers that {name} "
                "still gives: give the ingress at least as long",
            )
        if drain_timeout_s is not None and time >= drain_timeout_s:
            yield Fault(
                where,
                f"is {time}, but a leaving node ends its replicas after {drain_timeout_s}; lower it, or raise the "
                "nodes' RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S (and a pod's terminationGracePeriodSeconds above that)",
            )


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML's loader would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                raise yaml.MarkedYAMLError(
                    None, None, f"key {key!r} is given twice; leave one of them out", node.value[index][0].start_mark
                )
        return super().construct_mapping(node, deep)


def main(arguments: list[str] | None = None) -> int:
    """Check files; returns the exit status, 1 if any has a fault."""
    parser = argparse.ArgumentParser(prog="python -m serve_app.deploy_check", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="Ray Serve config files")
    parser.add_argument(
        "--drain-timeout-s",
        type=float,
        help="RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S of the nodes (Ray's default: 30); not given, it is not looked at",
    )
    given = parser.parse_args(arguments)
    status = 0
    for file in given.files:
        try:
            load(file.read_text(encoding="utf-8"), drain_timeout_s=given.drain_timeout_s)
        except DeployFileError as error:
            for fault in error.faults:
                print(f"{file}: {fault}", file=sys.stderr)
            status = 1
        except (OSError, UnicodeDecodeError) as error:
            print(f"{file}: {error}", file=sys.stderr)
            status = 1
        else:
            print(f"{file}: in order")
    return status


if __name__ == "__main__":
    sys.exit(main())
