from __future__ import annotations

from dataclasses import replace

import pytest

from engine import Intervention, InvalidRequest, Suppression
from serve_app.config import Limits
from serve_app.errors import ApiError
from serve_app.schemas import CompletionRequest
from serve_app.translation import make_jobs


def translate(served, **fields):
    request = CompletionRequest.model_validate({"prompt": "a", **fields})
    jobs = make_jobs(request, served, completion_id="cmpl-1", configured=Limits(max_prompts=4))
    return [job.engine_request for job in jobs]


def only(served, **fields):
    (engine_request,) = translate(served, **fields)
    return engine_request


def test_absent_fields_take_the_documented_defaults(served):
    request = only(served)
    assert (request.max_tokens, request.steering, request.attribution) == (256, None, None)
    assert request.prompt_token_ids == tuple(served.tokenizer.encode("a"))
    assert (request.sampling.sampler, request.sampling.repetition_penalty) == ("entropy", 1.1)
    assert (request.sampling.policy, request.sampling.max_commits(16)) == ("confidence", 1)
    assert 0 <= request.sampling.seed < 2**53, "a seed is drawn that every client can send back"


def test_null_means_absent(served):
    nulls = dict.fromkeys(["max_tokens", "temperature", "stop", "logprobs", "n", "steering", "logit_bias", "stream"])
    assert only(served, seed=1, **nulls) == only(served, seed=1)
    inner = {"interventions": [{"concepts": [{"id": 1, "weight": None}], "strength": 1, "layer": None}], "preset": None}
    assert only(served, seed=1, steering=inner).steering.interventions[0].layer is None


@pytest.mark.parametrize(
    ("fields", "sampler", "penalty"),
    [
        ({}, "entropy", 1.1),
        ({"temperature": 0}, "greedy", 1.0),
        ({"temperature": 0.7}, "top_p", 1.0),
        ({"top_p": 0.7}, "top_p", 1.0),
        ({"top_p": 0.7, "diffusion": {"entropy_sampling": True}}, "entropy", 1.1),
        ({"diffusion": {"entropy_sampling": False}}, "top_p", 1.0),
        ({"temperature": 0, "repetition_penalty": 1.5}, "greedy", 1.5),
        ({"repetition_penalty": 1.0}, "entropy", 1.0),
    ],
)
def test_temperature_and_top_p_switch_entropy_sampling_off(served, fields, sampler, penalty):
    sampling = only(served, **fields).sampling
    assert (sampling.sampler, sampling.repetition_penalty) == (sampler, penalty)


def test_sampling_fields_reach_the_engine(served):
    sampling = only(
        served,
        seed=5,
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        min_p=0.1,
        logit_bias={"3": 2, "4": -100},
        stop_token_ids=[7],
        min_tokens=2,
        ignore_eos=True,
        diffusion={"tokens_per_step": 4, "policy": "confidence", "cfg_scale": 0, "threshold": None},
    ).sampling
    assert (sampling.seed, sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
        5,
        0.5,
        0.9,
        None,
        0.1,
    )
    assert sampling.logit_bias == {3: 2.0, 4: -100.0}
    assert (sampling.stop_token_ids, sampling.min_tokens, sampling.ignore_eos) == ((7,), 2, True)
    assert sampling.tokens_per_step == 4


@pytest.mark.parametrize(
    ("policy", "default", "given"), [("threshold", 0.9, 0.75), ("factor", 1.0, 2), ("entropy_bound", 0.1, 0)]
)
def test_a_policy_reaches_the_engine_with_its_parameter(served, policy, default, given):
    sampling = only(served, diffusion={"policy": policy}).sampling
    assert (sampling.policy, sampling.policy_parameter, sampling.tokens_per_step) == (policy, default, None)
    sampling = only(served, diffusion={"policy": policy, policy: given, "tokens_per_step": 7}).sampling
    assert (sampling.policy, sampling.policy_parameter, sampling.tokens_per_step) == (policy, given, 7)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", "sea"], ["a", "sea"]),
        ([64, 65], [[64, 65]]),
        ([[64], [65, 66]], [[64], [65, 66]]),
        ([[]], [[]]),
    ],
)
def test_each_prompt_is_a_request_and_ids_pass_unchanged(served, prompt, expected):
    requests = translate(served, prompt=prompt, seed=1)
    ids = [served.tokenizer.encode(item) if isinstance(item, str) else item for item in expected]
    assert [list(request.prompt_token_ids) for request in requests] == ids
    assert len({request.request_id for request in requests}) == len(requests)
    assert len({request.sampling.seed for request in requests}) == 1, "a prompt's result does not depend on its place"


def test_too_many_prompts_are_refused(served):
    assert len(translate(served, prompt=["a"] * 4)) == 4
    with pytest.raises(ApiError, match="5 prompts with n 1 make 5 choices; at most 4"):
        translate(served, prompt=["a"] * 5)


def test_the_short_form_is_one_intervention_with_the_reference_preset(served):
    (intervention,) = only(served, steering={"concepts": ["music"], "strength": 8}).steering.interventions
    # A quarter of two layers, rounded up.
    assert intervention == Intervention(concept_ids=(2,), strength=8, layer=1, schedule="hard_cutoff", cutoff_tokens=32)


def test_an_intervention_leaves_to_the_engine_what_it_does_not_say(served):
    (intervention,) = only(
        served, steering={"interventions": [{"concepts": [2], "strength": 8}]}
    ).steering.interventions
    assert intervention == Intervention(concept_ids=(2,), strength=8)


def test_equal_weights_are_the_unweighted_sum_and_a_repeated_concept_counts_twice(served):
    def weights(concepts):
        steering = {"interventions": [{"concepts": concepts, "strength": 1}]}
        item = only(served, steering=steering).steering.interventions[0]
        return item.concept_ids, item.weights

    assert weights([0, "music"]) == ((0, 2), None)
    assert weights([{"id": 0, "weight": 3}, {"id": 2, "weight": 3}]) == ((0, 2), None)
    assert weights([{"id": 0, "weight": 3}, 2]) == ((0, 2), (3.0, 1.0))
    assert weights([0, "animals", 2]) == ((0, 2), (2.0, 1.0))
    assert weights([{"id": 0, "weight": -1}]) == ((0,), (-1.0,))


def test_weights_that_cancel_are_refused(served):
    concepts = [{"id": 0, "weight": 1}, {"id": 0, "weight": -1}]
    with pytest.raises(ApiError, match="add up to nothing") as caught:
        only(served, steering={"interventions": [{"concepts": concepts, "strength": 1}]})
    assert caught.value.param == "steering.interventions[0].concepts"


def test_a_group_brings_its_steerable_members(served):
    (intervention,) = only(served, steering={"concepts": [1], "strength": 1, "group": True}).steering.interventions
    assert intervention.concept_ids == (1, 0)


def test_suppression_takes_names_too(served):
    steering = only(served, steering={"suppress": [{"concept": "Music", "strength": 20}]}).steering
    assert steering.suppress == (Suppression(concept_id=2, strength=20),)
    assert steering.interventions == ()


def test_an_error_counts_the_callers_own_list(served):
    good = {"concepts": [0], "strength": 1}
    with pytest.raises(ApiError) as caught:
        only(served, steering={"concepts": [2], "strength": 1, "interventions": [good, {**good, "concepts": [0, 99]}]})
    assert caught.value.param == "steering.interventions[1].concepts[1]"
    with pytest.raises(ApiError) as caught:
        only(served, steering={"suppress": [{"concept": 0, "strength": 1}, {"concept": "no", "strength": 1}]})
    assert caught.value.param == "steering.suppress[1].concept"


@pytest.mark.parametrize(("level", "top_k"), [("off", "absent"), ("token", 3), ("chunk", None), ("both", None)])
def test_chunk_scores_ask_the_engine_for_every_contribution(served, level, top_k):
    attribution = only(served, attribution={"level": level, "top_k": 3}).attribution
    assert ("absent" if attribution is None else attribution.top_k) == top_k


@pytest.mark.parametrize("model", [None, "tiny"])
def test_the_served_model_may_be_named_or_not(served, model):
    assert only(served, model=model)


def test_another_model_is_not_found(served):
    with pytest.raises(ApiError, match="this server has 'tiny'") as caught:
        only(served, model="gpt-5")
    assert (caught.value.status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [10**6]}, "prompt_token_ids"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"logit_bias": {"1000000": 1}}, "sampling.logit_bias"),
        ({"min_tokens": 9, "max_tokens": 8}, "sampling.min_tokens"),
    ],
)
def test_what_the_checkpoint_forbids_never_reaches_the_engine(served, fields, param):
    """Refused by a replica, each such request wrote a page of traceback into the log."""
    with pytest.raises(InvalidRequest) as caught:
        translate(served, **fields)
    assert caught.value.param == param


def test_a_head_that_the_checkpoint_lacks_cannot_be_asked_for(served):
    """The default names both heads, and asks for what there is."""
    config = served.config
    without = replace(served, config=replace(config, concept=replace(config.concept, use_discovered=False)))
    for attribution in ({}, {"heads": ["known"]}):
        assert translate(without, attribution=attribution)
    for heads in (["discovered"], ["known", "discovered"]):
        assert translate(served, attribution={"heads": heads})
        with pytest.raises(ApiError) as caught:
            translate(without, attribution={"heads": heads})
        assert (caught.value.code, caught.value.param) == ("attribution_unsupported", "attribution.heads")
