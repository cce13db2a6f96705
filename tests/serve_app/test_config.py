from __future__ import annotations

import os
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from engine import EngineConfig
from serve_app.app import build_app
from serve_app.config import DEMO_CHECKPOINT, AppConfig, IngressSettings, local_cluster_environment, preset_folder
from serve_app.routing.policy import RoutingSettings

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({"modle": "x"}, "modle"),
        ({"engine": {"num_page": 4}}, "num_page"),
        ({"engine": {"max_rows": 1}}, "max_rows is 1"),
        ({"engine": {"max_rows": "many"}}, "engine.max_rows"),
        ({"engine_server": {"replicas": 2}}, "engine_server.replicas"),
        ({"engine_server": {"num_replicas": 0}}, "engine_server.num_replicas"),
        ({"engine_server": {"ray_actor_options": {"num_gpu": 1}}}, "engine_server.ray_actor_options.num_gpu"),
        ({"ingress": {"limits": {"max_prompts": 0}}}, "ingress.limits.max_prompts"),
        ({"router": {"routing": {"max_queu": 4}}}, "routing has unknown keys max_queu; known are"),
        ({"router": {"routing": {"max_queue": 0}}}, "max_queue is 0"),
        ({"router": {"max_queue": 4}}, "router.max_queue"),
        ({"engine_server": {"autoscaling": {"min_replicas": 3, "max_replicas": 2}}}, "at least min_replicas 3"),
        ({"engine_server": {"autoscaling": {"target_ongoing_requests": 2}}}, "target_ongoing_requests"),
        ({"engine_server": {"autoscaling": {}, "num_replicas": 2}}, "num_replicas is 2 and there is autoscaling"),
    ],
)
def test_a_wrong_key_or_value_is_an_error_that_names_it(args, named):
    with pytest.raises(ValidationError, match=named.replace(".", r"\.")):
        AppConfig.model_validate(args)


ENGINE = EngineConfig(
    device="cuda:1",
    dtype="bfloat16",
    deterministic=True,
    num_pages=77,
    gpu_memory_fraction=0.5,
    max_rows=12,
    max_prefill_rows=3,
    max_lanes=9,
    max_waiting=5,
    max_analyses=3,
    share_prefixes=False,
    score_cache_bytes=4096,
    batching="lockstep",
    draft_row_limit=8,
    async_scheduling=False,
    use_graphs=False,
    compile_cache_dir="/var/kernels",
    profile_dir="/var/traces",
    profile_steps=4,
    profile_after=2,
    explain_interval_s=0.25,
    input_attribution_context=96,
)
"""Every option with a value that is not its default's."""


def test_every_engine_option_of_a_deploy_file_reaches_the_engine():
    same = [field.name for field in fields(EngineConfig) if getattr(ENGINE, field.name) == field.default]
    assert not same, "set here what the engine has learned since"
    args = yaml.safe_load(yaml.safe_dump({"engine": asdict(ENGINE)}))
    engine_server = build_app(AppConfig.model_validate(args))._bound_deployment.init_args[0]._bound_deployment
    assert engine_server.init_kwargs["engine_config"] == ENGINE


def test_settings_of_router_and_replicas_reach_their_deployments():
    args = {"router": {"routing": {"max_queue": 7, "max_wait_s": 3}}, "engine_server": {"coalesce_interval_s": 0.5}}
    ingress = build_app(AppConfig.model_validate(args))._bound_deployment
    engine_server = ingress.init_args[0]._bound_deployment
    router = ingress.init_kwargs["router"]._bound_deployment
    assert engine_server.init_kwargs["router"]._bound_deployment is router
    assert (router.init_args[0].max_queue, router.init_args[0].max_wait_s) == (7, 3)
    # What may be changed under `deployments` begins as what stands here.
    assert router.user_config == {"max_queue": 7, "max_queue_per_tenant": None}
    assert engine_server.user_config == {"coalesce_interval_s": 0.5, "max_waiting": None}
    assert router.max_ongoing_requests > RoutingSettings().max_queue


def test_null_leaves_an_engine_option_to_the_engine():
    args = yaml.safe_load("{engine: {num_pages: null, async_scheduling: null, compile_cache_dir: null}}")
    assert AppConfig.model_validate(args).engine == EngineConfig()


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"batching": "lock-step"}, "batching"),
        ({"gpu_memory_fraction": 90}, "gpu_memory_fraction is 90"),
        ({"draft_row_limit": -1}, "draft_row_limit is -1"),
        ({"dtype": "float8"}, "dtype is 'float8'"),
        ({"dtype": "fp8", "deterministic": True}, "use dtype bfloat16"),
        ({"deterministic": "sometimes"}, "engine.deterministic"),
        ({"compile_cache_dir": 3}, "engine.compile_cache_dir"),
    ],
    ids=str,
)
def test_a_wrong_engine_option_is_refused_before_anything_starts(engine, message):
    with pytest.raises(ValidationError, match=message.replace(".", r"\.")):
        AppConfig.model_validate({"engine": engine})


def test_the_default_is_the_demo_model_beside_the_package():
    config = AppConfig()
    assert Path(config.checkpoint) == DEMO_CHECKPOINT == ROOT / "demo_model" / "steerling-demo"
    assert config.served_model_id == "steerling-demo"


def test_a_folder_becomes_absolute_and_a_hub_id_stays(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert AppConfig(model="mine").checkpoint == str(tmp_path / "mine")
    hub = AppConfig(model="guidelabs/steerling-8b")
    assert (hub.checkpoint, hub.served_model_id) == ("guidelabs/steerling-8b", "steerling-8b")
    assert AppConfig(model="mine", model_id="other").served_model_id == "other"


@pytest.mark.parametrize("file", sorted((ROOT / "deploy").glob("*.yaml")), ids=lambda file: file.name)
def test_every_deploy_file_builds(file):
    """Serve ignores keys it does not know, so a typo would go unnoticed without this."""
    for application in yaml.safe_load(file.read_text())["applications"]:
        assert application["import_path"] == "serve_app.app:build_app"
        assert build_app(AppConfig.model_validate(application["args"])) is not None


def test_the_default_deployment_listens_on_this_machine_only():
    options = yaml.safe_load((ROOT / "deploy" / "config.yaml").read_text())["http_options"]
    assert options["host"] == "127.0.0.1"


def test_a_gpu_is_reserved_only_where_the_device_asks_for_one():
    def num_gpus(**engine):
        app = build_app(AppConfig.model_validate({"engine": engine}))
        return app._bound_deployment.init_args[0]._bound_deployment.ray_actor_options["num_gpus"]

    assert (num_gpus(device="cuda"), num_gpus(device="cuda:1"), num_gpus(device="cpu")) == (1, 1, 0)


def test_a_local_cluster_is_its_own_and_asks_for_a_token(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "somewhere:6379")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    first, second = local_cluster_environment("MARK=1"), local_cluster_environment("MARK=2")
    assert "RAY_ADDRESS" not in first
    assert (first["MARK"], first["RAY_AUTH_MODE"], first["RAY_USAGE_STATS_ENABLED"]) == ("1", "token", "0")
    assert first["RAY_AUTH_TOKEN"] != second["RAY_AUTH_TOKEN"]
    assert str(ROOT) in first["PYTHONPATH"].split(os.pathsep)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert "RAY_AUTH_TOKEN" not in local_cluster_environment("MARK=1")


def test_what_the_ingress_is_told_is_found_where_it_is_told(tmp_path, monkeypatch):
    settings = IngressSettings(preset_dir=str(tmp_path / "presets"))
    assert preset_folder(settings) == tmp_path / "presets"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert preset_folder(IngressSettings()) == tmp_path / "glassblock" / "presets"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert preset_folder(IngressSettings()) == tmp_path / ".local" / "state" / "glassblock" / "presets"


@pytest.mark.parametrize(
    "args",
    [
        {"ingress": {"api_keys": {"files": "/a"}}},
        {"ingress": {"api_keys": {}}},
        {"ingress": {"cors": {"allowed_origins": ["example.org"]}}},
        {"ingress": {"limits": {"max_tokens": 0}}},
        {"ingress": {"preset_dir": ""}},
    ],
    ids=str,
)
def test_a_setting_of_the_ingress_that_means_nothing_is_refused(args):
    with pytest.raises(ValidationError):
        AppConfig.model_validate(args)
