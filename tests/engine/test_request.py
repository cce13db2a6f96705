"""Plain data at the door: what it refuses by itself, what its defaults mean, and that it travels."""

import inspect
import math
import pickle
from dataclasses import fields
from typing import get_args

import numpy as np
import pytest
import torch
from steerling.configs import GenerationConfig

import engine
from engine import (
    AttributionParams,
    EngineConfig,
    EngineError,
    GenerateRequest,
    Intervention,
    InvalidConfig,
    InvalidRequest,
    InvalidValue,
    Policy,
    SamplingParams,
    SteeringParams,
    Suppression,
)
from engine.limits import MAX_CONCEPTS, MAX_INTERVENTIONS, MAX_SUPPRESSIONS
from engine.request import DEFAULT_PARAMETERS
from tests.checkpoints import EOT


@pytest.mark.parametrize(
    ("field", "bad", "good"),
    [
        ("tokens_per_step", [0, -1, 1.5, True], [1, 64, None]),
        ("temperature", [-0.1, math.inf, math.nan], [0, 0.0, 2.5, None]),
        ("top_p", [-0.1, 1.1, math.nan], [0.0, 1.0, None]),
        ("min_p", [-0.1, 1.1], [0.0, 1.0, None]),
        ("top_k", [-1, 2.0], [0, 1, None]),
        ("repetition_penalty", [0.0, -1.0, math.inf], [0.5, 1.0, 2.0]),
        ("seed", [-1, 2**63, 1.0], [0, 2**63 - 1, None]),
        ("choice_index", [-1], [0, 7]),
        ("min_tokens", [-1], [0, 5]),
        ("num_logprobs", [-1, 21], [0, 20]),
        ("policy", ["random", None], ["confidence", "threshold", "factor", "entropy_bound"]),
        ("logit_bias", [{"a": 1.0}, {1: math.nan}, {1: math.inf}], [{1: -math.inf, 2: 100.0}]),
        ("stop_token_ids", [("x",)], [(), (1, 2)]),
    ],
)
def test_sampling_names_the_field_and_the_value_it_refuses(field, bad, good):
    for value in bad:
        with pytest.raises(InvalidValue) as caught:
            SamplingParams(**{field: value})
        assert caught.value.param == f"sampling.{field}"
        assert field in str(caught.value) and repr(value if field != "logit_bias" else next(iter(value))) in str(
            caught.value
        )
    for value in good:
        assert getattr(SamplingParams(**{field: value}), field) == value


@pytest.mark.parametrize(
    ("policy", "bad", "good"),
    [
        ("threshold", [0, 0.0, -0.5, 1.01, math.nan, True, "0.9"], [1e-6, 0.5, 1, None]),
        ("factor", [-0.1, math.inf, math.nan, False], [0, 0.0, 1.5, 100, None]),
        ("entropy_bound", [-0.1, math.inf, math.nan, "0"], [0, 0.1, 50, None]),
    ],
)
def test_a_policy_s_parameter_names_the_value_it_refuses(policy, bad, good):
    for value in bad:
        with pytest.raises(InvalidValue) as caught:
            SamplingParams(policy=policy, **{policy: value})
        assert caught.value.param == f"sampling.{policy}"
        assert f"{policy} is {value!r}; it must be a number from" in str(caught.value)
    for value in good:
        params = SamplingParams(policy=policy, **{policy: value})
        assert getattr(params, policy) == value
        assert params.policy_parameter == (DEFAULT_PARAMETERS[policy] if value is None else value)


@pytest.mark.parametrize("policy", get_args(Policy))
@pytest.mark.parametrize("name", DEFAULT_PARAMETERS)
def test_a_parameter_is_refused_with_a_policy_that_does_not_use_it(policy, name):
    """Ignored, it would let a caller believe that the text was made with it."""
    if policy == name:
        SamplingParams(policy=policy, **{name: 0.5})
        return
    with pytest.raises(InvalidValue, match=f"{name} is 0.5, but the policy is '{policy}'.*policy '{name}'") as caught:
        SamplingParams(policy=policy, **{name: 0.5})
    assert caught.value.param == f"sampling.{name}"


@pytest.mark.parametrize("policy", get_args(Policy))
def test_a_step_commits_one_position_by_default_or_whatever_an_adaptive_policy_allows(policy):
    is_one = policy in ("confidence", "lossless")
    assert SamplingParams(policy=policy).max_commits(64) == (1 if is_one else 64)
    assert (SamplingParams(policy=policy).policy_parameter is None) == is_one
    assert SamplingParams(policy=policy).is_adaptive == (policy != "confidence")
    if policy == "lossless":
        assert SamplingParams(policy=policy, tokens_per_step=1).has_drafts
        with pytest.raises(InvalidValue, match="tokens_per_step is 5, but lossless commits one token a step"):
            SamplingParams(policy=policy, tokens_per_step=5)
    else:
        assert SamplingParams(policy=policy, tokens_per_step=5).max_commits(64) == 5


@pytest.mark.parametrize(
    "values",
    [
        {"concept_ids": ()},
        {"concept_ids": (1, True)},
        {"weights": (1.0, 2.0)},
        {"weights": (math.nan,)},
        {"strength": math.inf},
        {"unit": "percent"},
        {"layer": -1},
        {"schedule": "linear"},
        {"cutoff_tokens": 0},
    ],
    ids=str,
)
def test_an_intervention_names_what_it_refuses(values):
    Intervention(concept_ids=(1,), strength=2.0)
    with pytest.raises(InvalidValue) as caught:
        Intervention(**{"concept_ids": (1,), "strength": 2.0, **values})
    (field,) = values
    assert caught.value.param == f"steering.interventions.{field}"


SMALLEST = {
    SamplingParams: {},
    Intervention: {"concept_ids": (1,), "strength": 2.0},
    Suppression: {"concept_id": 1, "strength": 1.0},
    SteeringParams: {},
    AttributionParams: {},
    GenerateRequest: {"prompt_token_ids": [1]},
}
FOREIGN = [
    *(None, True, "3", b"3", 1.5, -1, 2**70, -(2**70), 10**400, 10**5000, math.nan, math.inf, -math.inf),
    *(1e39, -1e39, 1e308, 5e-324, np.int64(1), np.float32(0.5), np.float64(0.5), np.bool_(True), np.array([1, 2])),
    *(torch.tensor(1), torch.tensor([1, 2]), 1j, object(), int, [], {}, {1}, [None], [True], [1.5], {"a": 1.0}),
    *({1: "a"}, {1: 1e39}, {True: 1.0}, {2**70: 1.0}, range(3), (i for i in range(3)), SamplingParams(), Intervention),
]
FIELDS = [(kind, item.name) for kind in SMALLEST for item in fields(kind)]


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=lambda value: getattr(value, "__name__", value))
def test_a_field_takes_a_value_it_can_use_or_refuses_it_by_name(kind, name):
    """A numpy float as top_p or an int of more than 64 bits got as far as a tensor in the middle of a pass, and the
    error there ended the engine for everyone. Others raised AttributeError or OverflowError at once."""
    for value in FOREIGN:
        try:
            made = kind(**{**SMALLEST[kind], name: value})
        except InvalidValue as error:
            assert name in error.param and len(str(error)) < 300
        else:
            assert type(getattr(made, name)).__module__ in ("builtins", "engine.request"), (name, value)


def test_numbers_become_plain_floats_and_lists_copies_of_the_request_s_own():
    """A list or mapping that its owner changed later was read when the request got its lane."""
    assert type(SamplingParams(temperature=np.float64(0.5)).temperature) is float
    ids, bias = [1, 2], {5: 1}
    sampling = SamplingParams(stop_token_ids=ids, logit_bias=bias)
    steered = Intervention(concept_ids=ids, weights=[1, -1], strength=1)
    ids.append(10**6)
    bias[10**6] = math.nan
    assert (sampling.stop_token_ids, sampling.logit_bias) == ((1, 2), {5: 1.0})
    assert (steered.concept_ids, steered.weights, type(steered.strength)) == ((1, 2), (1.0, -1.0), float)


@pytest.mark.parametrize(
    ("kind", "name", "item", "most"),
    [
        (SteeringParams, "interventions", Intervention(concept_ids=(1,), strength=1.0), MAX_INTERVENTIONS),
        (SteeringParams, "suppress", Suppression(concept_id=1, strength=1.0), MAX_SUPPRESSIONS),
        (Intervention, "concept_ids", 1, MAX_CONCEPTS),
    ],
)
def test_how_much_steering_one_request_may_ask_for_is_bounded(kind, name, item, most):
    kind(**{**SMALLEST[kind], name: (item,) * most})
    with pytest.raises(InvalidValue, match=rf"{name} h.* {most + 1} .*{most}$"):
        kind(**{**SMALLEST[kind], name: (item,) * (most + 1)})


def test_a_suppression_cannot_be_negative():
    Suppression(concept_id=1, strength=0.0)
    with pytest.raises(InvalidValue, match=r"-1\.0"):
        Suppression(concept_id=1, strength=-1.0)


def test_attribution_top_k_may_be_nought_and_not_less():
    AttributionParams(top_k=0)
    with pytest.raises(InvalidValue, match="-1"):
        AttributionParams(top_k=-1)


@pytest.mark.parametrize("max_tokens", [0, -3, 2.0])
def test_max_tokens_is_at_least_one(max_tokens):
    with pytest.raises(InvalidValue, match="max_tokens"):
        GenerateRequest(prompt_token_ids=[1], max_tokens=max_tokens)


def test_defaults_are_the_package_s():
    ours, theirs = SamplingParams(), GenerationConfig()
    assert (ours.uses_entropy, ours.sampler) == (theirs.use_entropy_sampling, "entropy")
    assert ours.effective_top_p == theirs.top_p
    assert ours.repetition_penalty == theirs.repetition_penalty
    assert GenerateRequest(prompt_token_ids=[]).max_tokens == 256


@pytest.mark.parametrize(
    ("values", "sampler", "temperature", "top_p"),
    [
        ({}, "entropy", 1.0, 0.8),
        ({"temperature": 0.7}, "top_p", 0.7, 1.0),
        ({"top_p": 0.5}, "top_p", 1.0, 0.5),
        ({"temperature": 0.0}, "greedy", 0.0, 1.0),
        ({"top_p": 0.0}, "greedy", 1.0, 0.0),
        ({"temperature": 0.7, "entropy_sampling": True}, "entropy", 0.7, 0.8),
        ({"entropy_sampling": False}, "top_p", 1.0, 1.0),
        ({"temperature": 0.0, "entropy_sampling": True}, "entropy", 0.0, 0.8),
    ],
    ids=str,
)
def test_the_sampler_follows_from_what_is_given(values, sampler, temperature, top_p):
    params = SamplingParams(**values)
    assert (params.sampler, params.effective_temperature, params.effective_top_p) == (sampler, temperature, top_p)
    assert params.is_greedy == (sampler == "greedy")


def test_a_request_holds_its_own_copy_of_the_prompt():
    prompt = [1, 2, 3]
    request = GenerateRequest(prompt_token_ids=prompt)
    prompt.append(4)
    assert request.prompt_token_ids == (1, 2, 3)


def test_requests_and_errors_survive_pickling():
    request = GenerateRequest(
        prompt_token_ids=[1, 2], sampling=SamplingParams(seed=3), attribution=AttributionParams(top_k=2)
    )
    assert pickle.loads(pickle.dumps(request)) == request
    for name in engine.__all__:
        kind = getattr(engine, name)
        if inspect.isclass(kind) and issubclass(kind, EngineError):
            error = kind("what", param="a.b") if issubclass(kind, InvalidRequest) else kind("what")
            copy = pickle.loads(pickle.dumps(error))
            assert (type(copy), str(copy), getattr(copy, "param", None)) == (
                kind,
                "what",
                getattr(error, "param", None),
            )


@pytest.mark.parametrize(
    "values",
    [
        {"dtype": "float16"},
        {"max_rows": 1},
        {"max_waiting": 0},
        {"score_cache_bytes": -1},
        {"score_cache_bytes": 1e6},
        {"num_pages": 0},
        {"max_lanes": 0},
        {"max_prefill_rows": 0},
        {"gpu_memory_fraction": 0.0},
        {"gpu_memory_fraction": 1.1},
        {"explain_interval_s": -1.0},
        {"explain_interval_s": math.nan},
        {"explain_interval_s": None},
        {"num_pages": "3"},
        {"num_pages": 2**40},
        {"max_rows": True},
        {"max_lanes": 8.0},
        {"max_waiting": None},
        {"share_prefixes": "no"},
        {"gpu_memory_fraction": "1"},
        {"device": None},
    ],
    ids=str,
)
def test_an_engine_config_names_what_it_refuses(values):
    (field,) = values
    with pytest.raises(InvalidConfig, match=field):
        EngineConfig(**values)


def test_an_engine_config_is_frozen_and_takes_the_smallest_values_that_work():
    config = EngineConfig(max_rows=2, num_pages=1, max_lanes=1, max_prefill_rows=9)
    assert (config.prefill_row_limit, config.num_lanes) == (2, 1)
    with pytest.raises(AttributeError):
        config.max_rows = 3


@pytest.mark.parametrize("device", ["tpu", "nonsense", "cuda:99", "mps"])
def test_a_device_that_is_not_there_is_named(checkpoint, device):
    with pytest.raises(InvalidConfig, match=device):
        engine.Engine.from_checkpoint(checkpoint(EOT), EngineConfig(device=device))
