from __future__ import annotations

import pytest
from ray import cloudpickle

from serve_app.app import build_app
from serve_app.autoscaling import LanePolicy, replicas_wanted
from serve_app.config import AppConfig

CALM = {
    "num_replicas": 2,
    "lanes_per_replica": 10.0,
    "lanes_queued": 0.0,
    "oldest_wait_s": 0.0,
    "target_lane_use": 0.8,
    "max_queue_age_s": 1.0,
}


@pytest.mark.parametrize(("in_use", "wanted"), [(0, 1), (8, 1), (8.1, 2), (16, 2), (17, 3), (20, 3)])
def test_so_many_replicas_that_a_share_of_the_lanes_is_in_use(in_use, wanted):
    assert replicas_wanted(**{**CALM, "lanes_in_use": in_use}) == wanted


@pytest.mark.parametrize(
    ("lanes_queued", "oldest_wait_s", "wanted"), [(30, 1.0, 2), (30, 1.1, 6), (1, 5.0, 3), (0, 5.0, 2)]
)
def test_requests_that_wait_too_long_bring_replicas(lanes_queued, oldest_wait_s, wanted):
    case = {**CALM, "lanes_in_use": 16, "lanes_queued": lanes_queued, "oldest_wait_s": oldest_wait_s}
    assert replicas_wanted(**case) == wanted


def test_nothing_changes_before_a_replica_has_said_how_many_lanes_it_has():
    assert replicas_wanted(**{**CALM, "lanes_in_use": 99, "lanes_per_replica": 0.0}) == 2


class Context:
    current_num_replicas = 2
    target_num_replicas = 3

    def __init__(self, **metrics: dict[str, float]) -> None:
        self.aggregated_metrics = metrics


def test_the_policy_adds_lanes_up_and_takes_the_queue_once():
    # As Ray's controller has it: pickled.
    policy = cloudpickle.loads(cloudpickle.dumps(LanePolicy(target_lane_use=0.5, max_queue_age_s=1.0)))
    queue = {"lanes_queued": {"a": 4.0, "b": 4.0}, "oldest_wait_s": {"a": 2.0, "b": 2.0}}
    lanes = {"lanes": {"a": 4.0, "b": 4.0}, "lanes_in_use": {"a": 4.0, "b": 2.0}}
    assert policy(Context(**lanes, **queue)) == (5, {})
    assert policy(Context(**lanes)) == (3, {})
    assert policy(Context()) == (3, {})


@pytest.mark.parametrize("nonsense", [float("nan"), float("inf"), None])
@pytest.mark.parametrize("name", ["lanes", "lanes_in_use", "lanes_queued", "oldest_wait_s"])
def test_what_is_no_number_counts_for_nothing(name, nonsense):
    policy = LanePolicy(target_lane_use=0.5, max_queue_age_s=1.0)
    metrics = {"lanes": {"a": 4.0}, "lanes_in_use": {"a": 6.0}, "lanes_queued": {"a": 4.0}, "oldest_wait_s": {"a": 2.0}}
    assert policy(Context(**metrics)) == (5, {})
    assert policy(Context(**{**metrics, name: {"b": nonsense, **metrics[name]}})) == (5, {})
    assert policy(Context(lanes_in_use={"b": nonsense})) == (3, {})


def test_a_deploy_file_that_asks_for_it_scales_by_this_policy():
    scaling = {"min_replicas": 2, "max_replicas": 5, "target_lane_use": 0.6, "max_queue_age_s": 3}
    app = build_app(AppConfig.model_validate({"engine_server": {"autoscaling": scaling}}))
    config = app._bound_deployment.init_args[0]._bound_deployment._deployment_config.autoscaling_config
    assert (config.min_replicas, config.max_replicas) == (2, 5)
    policy = config.policy.get_policy()(**config.policy.policy_kwargs)
    assert policy(Context(lanes={"a": 10.0}, lanes_in_use={"a": 12.1})) == (3, {})
