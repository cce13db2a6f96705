from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import yaml
from ray.serve._private.application_state import override_deployment_info
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve.schema import ServeApplicationSchema

from serve_app.config import AppConfig
from serve_app.deploy_check import DeployFileError, check, deployments_of, load, main
from serve_app.run import read_config

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "deploy").glob("*.yaml"))

WHOLE = yaml.safe_load("""
proxy_location: EveryNode
http_options: {host: 127.0.0.1, port: 8000}
grpc_options: {port: 9000}
controller_options: {runtime_env: {env_vars: {A: "1"}}}
logging_config: {encoding: JSON}
tracing_config: {sampling_ratio: 0.5}
applications:
  - name: glassblock
    route_prefix: /
    import_path: serve_app.app:build_app
    runtime_env: {env_vars: {HF_HUB_OFFLINE: "1"}}
    logging_config: {log_level: INFO}
    args:
      engine: {device: cuda, max_rows: 8}
      engine_server: {graceful_shutdown_timeout_s: 20, ray_actor_options: {num_cpus: 1}}
      ingress: {num_replicas: 1, limits: {max_prompts: 4}}
    deployments:
      - name: EngineServer
        num_replicas: auto
        autoscaling_config: {min_replicas: 2, policy: {policy_kwargs: {}}}
        ray_actor_options: {num_gpus: 1}
        request_router_config: {request_routing_stats_period_s: 0.5}
        backpressure_config: {status_code: 503}
        logging_config: {log_level: DEBUG}
        gang_scheduling_config: {gang_size: 2}
        deployment_actors: [{name: tree, actor_class: "m:C", actor_options: {num_cpus: 1}}]
        user_config: {max_waiting: 64}
      - name: BlockRouter
        user_config: {max_queue: 2048}
""")
"""A file with something at every level at which a key can be misspelt."""


def planted(path: str, value: object) -> dict:
    """WHOLE with `value` at `path`, whose parts are keys or numbers of list items."""
    content = deepcopy(WHOLE)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    holder = content
    for part in parents:
        holder = holder[part]
    holder[last] = value
    return content


def faults(content: object, **options: float) -> list[str]:
    return [str(fault) for fault in check(content, **options)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_deploy_file_is_in_order(file):
    load(file.read_text(encoding="utf-8"))


def test_a_file_that_uses_every_level_has_no_fault():
    assert faults(WHOLE) == []


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("http_option", "http_options"),
        ("http_options.prot", "port"),
        ("grpc_options.prt", "port"),
        ("controller_options.runtime_envs", "runtime_env"),
        ("logging_config.encodng", "encoding"),
        ("tracing_config.sampling", "sampling_ratio"),
        ("applications.0.route_prefx", "route_prefix"),
        ("applications.0.runtime_env.env_var", "env_vars"),
        ("applications.0.logging_config.loglevel", "log_level"),
        ("applications.0.args.enginee", "engine"),
        ("applications.0.args.engine.max_row", "max_rows"),
        ("applications.0.args.engine_server.num_replica", "num_replicas"),
        ("applications.0.args.engine_server.ray_actor_options.num_gpu", "num_gpus"),
        ("applications.0.args.ingress.limits.max_prompt", "max_prompts"),
        ("applications.0.deployments.0.num_replica", "num_replicas"),
        ("applications.0.deployments.0.autoscaling_config.min_replica", "min_replicas"),
        ("applications.0.deployments.0.autoscaling_config.policy.policy_kwarg", "policy_kwargs"),
        ("applications.0.deployments.0.ray_actor_options.num_gpu", "num_gpus"),
        ("applications.0.deployments.0.request_router_config.max_backof_s", "max_backoff_s"),
        ("applications.0.deployments.0.backpressure_config.status", "status_code"),
        ("applications.0.deployments.0.logging_config.log_levels", "log_level"),
        ("applications.0.deployments.0.user_config.max_waitin", "max_waiting"),
        ("applications.0.deployments.0.gang_scheduling_config.gang_sizes", "gang_size"),
        ("applications.0.deployments.0.deployment_actors.0.actor_option", "actor_options"),
    ],
)
def test_an_unknown_key_at_any_level_is_named_with_its_path_its_value_and_the_nearest_known_one(path, nearest):
    """Ray ignores most of these, so that the default would be used and nobody told."""
    written = path.replace(".0", "[0]")
    assert faults(planted(path, 7)) == [f"{written}: unknown key (value 7); did you mean {nearest}?"]


def test_a_key_that_resembles_no_other_is_answered_with_all_that_are_known():
    (fault,) = faults(planted("http_options.zzz", 1))
    assert fault.startswith("http_options.zzz: unknown key (value 1); known are host, keep_alive_timeout_s")


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("proxy_location", "Everywhere", "proxy_location: is 'Everywhere'"),
        ("http_options.port", "eighty", "http_options.port: is 'eighty'"),
        ("logging_config.encoding", "JASON", "logging_config.encoding: is 'JASON'"),
        ("applications.0.args.engine.max_rows", 1, "max_rows is 1"),
        ("applications.0.args.engine.batching", "lock-step", "lock-step"),
        ("applications.0.args.ingress.limits.max_prompts", 0, "applications[0].args.ingress.limits.max_prompts: is 0"),
        ("applications.0.deployments.0.max_surge_percent", 101, "applications[0].deployments[0].max_surge_percent"),
        ("applications.0.deployments.0.autoscaling_config.max_replicas", 1, "deployments[0].autoscaling_config: is"),
        ("applications.0.deployments.0.autoscaling_config.upscale_delay_s", -1, "autoscaling_config.upscale_delay_s"),
        ("applications.0.deployments.0.request_router_config.max_backoff_s", 0, "max_backoff_s: is 0"),
        ("applications.0.deployments.0.num_replicas", 2, "Manually setting num_replicas is not allowed"),
        ("applications.0.deployments.0.user_config.max_waiting", -1, "deployments[0].user_config.max_waiting: is -1"),
        ("applications.0.deployments.1.user_config.max_queue", 0, "deployments[1].user_config: max_queue is 0"),
        (
            "applications.0.deployments.1.user_config.max_queu",
            7,
            "deployments[1].user_config: user_config of BlockRouter",
        ),
        ("applications.0.runtime_env.working_dir", "/here", "remote URIs"),
        ("applications.0.import_path", "serve_app.app:build", "the builder here is serve_app.app:build_app"),
        ("applications", None, "applications: is None"),
        ("applications.0", "glassblock", "applications[0]: is 'glassblock'"),
        ("applications.0.args", ["engine"], "applications[0].args: is ['engine']"),
    ],
)
def test_a_wrong_value_is_named_with_its_path(path, value, said):
    found = faults(planted(path, value))
    assert any(said in fault for fault in found), found


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("applications.0.deployments.0.request_router_config.request_router_class", "serve_app.router:Router"),
        ("applications.0.deployments.0.autoscaling_config.policy.policy_function", "serve_app.policy:by_lanes"),
    ],
)
def test_what_the_parser_would_have_to_import_belongs_into_code(path, value):
    """The dashboard answered 500 to a file that named a class which only the replicas could import."""
    (fault,) = faults(planted(path, value))
    assert fault.startswith(f"{path.replace('.0', '[0]')}: is {value!r}; set it in code")
    assert "would have to import it" in fault


def test_an_override_of_a_deployment_that_the_application_lacks_is_named():
    """Serve says so only after the cluster is up, and leaves the application failed."""
    (fault,) = faults(planted("applications.0.deployments.0.name", "EngineServe"))
    expected = "applications[0].deployments[0].name: is 'EngineServe', which the application does not have"
    assert fault == f"{expected}; did you mean EngineServer?"


def test_two_overrides_of_one_deployment_are_a_fault():
    content = planted("applications.0.deployments.0", {"name": "Ingress"})
    content["applications"][0]["deployments"].append({"name": "Ingress"})
    (fault,) = faults(content)
    assert fault.startswith("applications[0].deployments[2].name: 'Ingress' was there before")


def test_actor_options_that_take_away_the_gpu_are_a_fault():
    """Serve takes the override instead of the builder's options, not merged into them."""
    (fault,) = faults(planted("applications.0.deployments.0.ray_actor_options", {"num_cpus": 4}))
    assert "without num_gpus" in fault
    assert faults(planted("applications.0.deployments.0.ray_actor_options", {"num_cpus": 4, "num_gpus": 1})) == []


def test_scaling_is_said_once():
    """Serve takes an override's autoscaling_config as a whole: the policy would be gone, and nobody told."""
    content = planted("applications.0.args.engine_server.autoscaling", {"max_replicas": 4})
    number, scaling = faults(content)
    place = "applications[0].args.engine_server.autoscaling"
    assert number.startswith("applications[0].deployments[0].num_replicas: is 'auto', which changes nothing")
    assert scaling.startswith("applications[0].deployments[0].autoscaling_config: is {'min_replicas': 2")
    assert f"replaces {place} as a whole" in scaling and f"where {place} is set" in number
    content["applications"][0]["deployments"][0]["name"] = "Ingress"
    content["applications"][0]["deployments"][0]["ray_actor_options"] = {"num_cpus": 1}
    assert faults(content) == [], "other deployments scale as they like"


@pytest.mark.parametrize(
    ("override", "policy"),
    [
        ({"max_surge_percent": 25}, "serve_app.autoscaling.LanePolicy"),
        ({"num_replicas": 2}, "serve_app.autoscaling.LanePolicy"),
        ({"autoscaling_config": {"max_replicas": 4}}, "ray.serve.autoscaling_policy:default_autoscaling_policy"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_serve_makes_of_an_override_what_the_check_says(override, policy):
    settings = AppConfig.model_validate({"engine": {"device": "cpu"}, "engine_server": {"autoscaling": {}}})
    deployment = deployments_of(settings)["EngineServer"]
    built = DeploymentInfo(
        deployment_config=deployment._deployment_config,
        replica_config=deployment._replica_config,
        start_time_ms=0,
        deployer_job_id="none",
    )
    said = {"import_path": "serve_app.app:build_app", "deployments": [{"name": "EngineServer", **override}]}
    made = override_deployment_info({"EngineServer": built}, ServeApplicationSchema.model_validate(said))
    scaling = made["EngineServer"].deployment_config.autoscaling_config
    assert scaling.policy.policy_function == policy


def test_an_ingress_that_is_cut_before_the_engines_is_a_fault():
    (fault,) = faults(planted("applications.0.deployments.0.graceful_shutdown_timeout_s", 21))
    assert "graceful_shutdown_timeout_s of EngineServer: is 21, and that of Ingress only 20" in fault
    assert faults(planted("applications.0.deployments.0.graceful_shutdown_timeout_s", 20)) == []


def test_a_replica_that_would_outlive_its_node_is_a_fault():
    assert faults(WHOLE, drain_timeout_s=21) == []
    found = faults(WHOLE, drain_timeout_s=20)
    assert len(found) == 2
    assert all("a leaving node ends its replicas after 20" in fault for fault in found)


def test_a_replica_that_looks_for_idleness_only_after_its_end_is_a_fault():
    (fault,) = faults(planted("applications.0.deployments.0.graceful_shutdown_wait_loop_s", 20))
    assert "graceful_shutdown_wait_loop_s: is 20" in fault
    assert faults(planted("applications.0.deployments.0.graceful_shutdown_wait_loop_s", 19)) == []


def test_all_faults_are_told_at_once():
    content = planted("http_options.prot", 1)
    content["applications"][0]["args"]["engine"]["max_row"] = 2
    content["applications"][0]["deployments"][0]["num_replica"] = 3
    content["logging_config"]["encoding"] = "XML"
    with pytest.raises(DeployFileError) as caught:
        load(yaml.safe_dump(content))
    assert len(caught.value.faults) == 4
    assert str(caught.value).count("\n") >= 3


def test_the_checked_content_is_not_changed():
    content = deepcopy(WHOLE)
    check(content)
    assert content == WHOLE


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file holds None"),
        ("[1]", "the file holds [1]"),
        ("a: [", "this is not YAML"),
        ("applications: []\napplications: []", "'applications' is given twice"),
        ("applications: []\nhttp_options: {port: 1, port: 2}", "'port' is given twice"),
        ("? [1]\n: 2", "unhashable key"),
    ],
)
def test_text_that_is_no_deploy_file_is_refused(text, said):
    with pytest.raises(DeployFileError) as caught:
        load(text)
    assert said in str(caught.value)


def test_what_is_secret_is_not_shown():
    (fault,) = faults(planted("http_options.ssl_keyfile_pasword", "s3cret"))
    assert "s3cret" in fault, "only what is called password can be known to be one"
    for key in ("keyfile_password", "client_Secret", "api_token"):
        (fault,) = faults(planted(f"http_options.{key}", "s3cret"))
        assert "s3cret" not in fault


def test_applications_of_others_are_checked_as_far_as_serve_knows_them():
    other = {"name": "other", "route_prefix": "/o", "import_path": "theirs:app", "deployments": []}
    other["args"] = {"request_router_class": "theirs.too"}
    content = deepcopy(WHOLE)
    content["applications"].append({**other, "nam": 1})
    assert faults(content) == ["applications[1].nam: unknown key (value 1); did you mean name?"]


def test_the_command_says_which_files_are_in_order_and_which_are_not(tmp_path, capsys):
    good, bad, absent = tmp_path / "good.yaml", tmp_path / "bad.yaml", tmp_path / "absent.yaml"
    good.write_text(yaml.safe_dump(WHOLE))
    bad.write_text(yaml.safe_dump(planted("http_options.prot", 1)))
    assert main([str(good)]) == 0
    assert main([str(good), str(bad), str(absent)]) == 1
    said = capsys.readouterr()
    assert said.out.count(f"{good}: in order") == 2
    assert f"{bad}: http_options.prot: unknown key" in said.err
    assert f"{absent}" in said.err
    assert main([str(good), "--drain-timeout-s", "10"]) == 1


def test_serving_on_this_machine_refuses_the_same_faults(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text((ROOT / "deploy" / "config.yaml").read_text().replace("port:", "prot:"))
    with pytest.raises(ValueError, match=r"http_options\.prot: unknown key"):
        read_config(file)
