"""Classifier-free guidance: equal to the package and to the plain reference, whatever happens around a request."""

import dataclasses
import math
from itertools import count

import pytest
import torch
from steerling.configs import SteeringConfig

from engine import (
    AttributionParams,
    Engine,
    EngineConfig,
    Finished,
    FinishReason,
    GenerateRequest,
    Intervention,
    InvalidValue,
    RequestTooLarge,
    SamplingParams,
    SteeringParams,
    Suppression,
    Unsupported,
    WeightOverride,
    check_request,
)
from engine.decoding.attribution import NOTHING, Explanation, HeadExplanation, guided
from tests.checkpoints import EOT, NO_CORRECTION, NO_ROPE
from tests.engine.test_independence import assert_same, run
from tests.parity import compare_commits, compare_output
from tests.parity_cases import uniform
from tests.reference import generate

CHECKPOINTS = [EOT, NO_CORRECTION, NO_ROPE]
BLOCK = EOT.block
END = EOT.special_ids["eot_id"]


def cutoff(tokens, **values):
    values = {"concept_ids": (3,), "strength": 6.0, "layer": 1, **values}
    return Intervention(schedule="hard_cutoff", cutoff_tokens=tokens, **values)


STEERING = SteeringParams(
    interventions=(cutoff(7), cutoff(BLOCK + 4, concept_ids=(5, 8), strength=3.0, layer=2)),
    suppress=(Suppression(concept_id=2, strength=2.0),),
)


def guided_request(num_prompt, max_tokens, *, recipe=EOT, steering=None, seed=0, attribution=True, **sampling):
    values = {"temperature": 0.0, "repetition_penalty": 1.0, "ignore_eos": True, "cfg_scale": 1.3, **sampling}
    return GenerateRequest(
        prompt_token_ids=recipe.plain_ids(num_prompt, seed=seed),
        max_tokens=max_tokens,
        sampling=SamplingParams(seed=seed, **values),
        steering=steering,
        attribution=AttributionParams() if attribution else None,
    )


def requests(recipe=EOT):
    """Guided ones that differ in all else, and some beside them that are not."""

    def one(index, num_prompt, max_tokens, **values):
        return guided_request(num_prompt, max_tokens, recipe=recipe, seed=index, **values)

    return [
        one(0, 2 * BLOCK + 5, 30, steering=STEERING),
        one(1, 0, 21, steering=STEERING),
        one(2, 1, 2 * BLOCK + 3, tokens_per_step=3, repetition_penalty=1.3, cfg_scale=0.5),
        one(3, BLOCK - 1, 2 * BLOCK, steering=STEERING, temperature=1.2, top_p=0.9, num_logprobs=3),
        one(4, BLOCK, 2 * BLOCK, temperature=None, steering=STEERING, policy="threshold", threshold=0.3),
        one(5, BLOCK + 1, 2 * BLOCK + 2, steering=STEERING, policy="factor", factor=2.0, tokens_per_step=4),
        one(6, 7, 25, ignore_eos=False, logit_bias={recipe.vocab_size - 6: 6.0}, steering=STEERING),
        one(7, 3 * BLOCK, 19, policy="entropy_bound", entropy_bound=3.0, attribution=False),
        one(8, 2 * BLOCK, 20, cfg_scale=0.0, steering=STEERING),
        one(9, 3 * BLOCK, 25, cfg_scale=0.0, policy="lossless"),
    ]


@pytest.fixture(scope="module")
def alone(checkpoint):
    """Each request in an engine of its own."""
    config = EngineConfig(device="cpu", num_pages=64, max_rows=16, share_prefixes=False)
    return [Engine.from_checkpoint(checkpoint(EOT), config).generate([asked])[0] for asked in requests()]


@pytest.mark.parametrize("recipe", [EOT, NO_CORRECTION], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("tokens", [None, 5, BLOCK, BLOCK + 5])
def test_over_two_blocks_it_is_the_package_also_where_alpha_changes(make_engine, oracle, recipe, tokens):
    """Generated blocks hold no masks, yet the copy's are stale too: they attend to masks in place of the prompt."""
    steering = package_steering = None
    if tokens is not None:
        steering = SteeringParams(interventions=(cutoff(tokens),))
        package_steering = SteeringConfig.injection([3], 6.0, inject_layer=1, cutoff_tokens=tokens)
    asked = guided_request(2 * BLOCK, 2 * BLOCK, recipe=recipe, steering=steering)
    (output,) = make_engine(recipe).generate([asked])
    theirs = oracle(recipe).generate_guided(
        asked.prompt_token_ids, asked.max_tokens, cfg_scale=1.3, steering=package_steering
    )
    result = compare_commits(output.commits, theirs)
    assert result.num_commits == 2 * BLOCK and {"weight", "contribution", "epsilon"} <= set(result.errors)


@pytest.mark.parametrize("recipe", CHECKPOINTS, ids=lambda recipe: recipe.name)
def test_at_any_length_and_with_any_policy_it_is_the_plain_reference(make_engine, oracle, recipe):
    """Tail of the prompt in the first canvas: in the copy masks stand there, injected and never filled."""
    asked = [request for request in requests(recipe) if request.sampling.policy != "lossless"]
    if not recipe.has_eot:
        asked = [request for request in asked if request.sampling.ignore_eos]
    for request, output in zip(asked, run(make_engine(recipe), asked), strict=True):
        compare_output(output, generate(oracle(recipe), request, uniform))


def test_attribution_sums_to_the_guided_logit_and_names_what_only_the_copy_has(make_engine, oracle):
    """Weights are those of the conditional pass; a concept that is active in the copy alone pulls with weight 0."""
    (output,) = make_engine(EOT).generate([guided_request(BLOCK + 3, 20)])
    expected = generate(oracle(EOT), guided_request(BLOCK + 3, 20), uniform)
    compare_output(output, expected)
    parts = [commit.attribution for commit in output.commits]
    assert all(len(part.known) >= EOT.concept_config.topk_known for part in parts)
    assert any(concept.weight == 0 and concept.contribution != 0 for part in parts for concept in part.known)
    assert any(choice.attribution.epsilon_by_vector is not None for choice in expected.choices)


def test_top_k_keeps_the_largest_of_the_joint_contributions(make_engine):
    asked = guided_request(BLOCK + 3, 20)
    engine = make_engine(EOT)
    (whole,) = engine.generate([asked])
    (cut,) = engine.generate([dataclasses.replace(asked, attribution=AttributionParams(top_k=3))])
    for ours, whole_part in zip(cut.commits, (commit.attribution for commit in whole.commits), strict=True):
        pairs = ((ours.attribution.known, whole_part.known), (ours.attribution.discovered, whole_part.discovered))
        for few, many in pairs:
            assert len(few) == 3
            assert [c.contribution for c in few] == pytest.approx([c.contribution for c in many[:3]], abs=1e-4)
        assert ours.attribution.epsilon == pytest.approx(whole_part.epsilon, abs=1e-4)


@pytest.mark.parametrize("mode", ["delta", "reference"])
def test_concept_weights_that_are_set_hold_in_both_copies(make_engine, oracle, mode):
    overrides = (
        WeightOverride(concept_id=3, weight=4.0),
        WeightOverride(concept_id=7, weight=-2.0),
        WeightOverride(concept_id=5, head="discovered", weight=3.0),
    )
    steering = SteeringParams(overrides=overrides, override_mode=mode, interventions=(cutoff(6),))
    asked = [guided_request(BLOCK + 3, 22, steering=steering, seed=4), guided_request(9, 22, seed=5)]
    outputs = make_engine(EOT).generate(asked)
    for request, output in zip(asked, outputs, strict=True):
        compare_output(output, generate(oracle(EOT), request, uniform))


def test_explanations_of_two_passes_join_by_concept():
    def head(ids, weights, contributions):
        values = torch.tensor([contributions])
        return HeadExplanation(torch.tensor([ids]), torch.tensor([weights]), values, values.sum(dim=-1))

    nothing = HeadExplanation(torch.zeros(1, 0).long(), torch.zeros(1, 0), torch.zeros(1, 0), torch.zeros(1))
    zero = torch.zeros(1)
    own = Explanation(head([4, 9, 2], [0.5, 0.6, 0.7], [1.0, 2.0, -4.0]), nothing, zero)
    other = Explanation(head([9, 1, 4], [0.1, 0.2, 0.3], [3.0, 5.0, 1.5]), nothing, zero)
    joined = guided(own, other, torch.tensor([10.0]), torch.tensor([0.5]))
    kept = joined.known.ids_MK[0] != NOTHING
    found = zip(*(part[0, kept].tolist() for part in (joined.known.ids_MK, joined.known.contributions_MK)), strict=True)
    assert list(found) == [(2, -6.0), (1, -2.5), (9, 1.5), (4, 0.75)]
    assert joined.known.weights_MK[0, kept].tolist() == pytest.approx([0.7, 0.0, 0.6, 0.5])
    assert (joined.known.ids_MK[0] == NOTHING).tolist() == [False] * 4 + [True] * 2
    assert joined.known.total_M.item() == pytest.approx(-6.25)
    assert joined.epsilon_M.item() == pytest.approx(16.25)
    assert joined.discovered.ids_MK.shape == (1, 0)


CONFIGS = {
    "plenty": {},
    "two rows a pass": {"max_rows": 2, "max_lanes": 2},
    "more lanes than rows": {"max_rows": 3, "max_lanes": 8},
    "one prefill row a pass": {"max_prefill_rows": 1},
    "too few pages for all": {"num_pages": 13},
    "too few pages, nothing shared": {"num_pages": 12, "share_prefixes": False, "max_lanes": 8},
    "results one pass late": {"async_scheduling": True},
    "late results, two rows a pass": {"async_scheduling": True, "max_rows": 2, "max_lanes": 2},
    "late results, too few pages for all": {"async_scheduling": True, "num_pages": 13, "max_prefill_rows": 2},
    "lockstep": {"batching": "lockstep"},
    "lockstep, late results": {"batching": "lockstep", "async_scheduling": True, "max_rows": 5},
}


@pytest.mark.parametrize("config", CONFIGS)
def test_in_company_every_request_gives_what_it_gives_alone(make_engine, alone, config):
    outputs = run(make_engine(EOT, **CONFIGS[config]), requests())
    for output, expected in zip(outputs, alone, strict=True):
        assert_same(output, expected)
    if "too few" in config:
        assert any(output.num_preemptions for output in outputs), "this config is here to preempt"


def test_a_second_run_hits_the_prefixes_and_gives_the_same(make_engine, alone):
    engine = make_engine(EOT)
    first, second = run(engine, requests()), run(engine, requests(), arrivals=[3, 0, 9, 1, 0, 0, 6, 2, 2, 0])
    assert any(output.num_cached_tokens for output in second if output.num_prompt_tokens == 2 * BLOCK + 5)
    for index, output in enumerate(first + second):
        assert_same(output, alone[index % len(alone)])


@pytest.mark.parametrize("index", [0, 3, 4, 6])
@pytest.mark.parametrize("is_async", [False, True])
def test_preempted_at_any_step_a_pair_continues_to_the_same_end(make_engine, alone, index, is_async):
    engine = make_engine(EOT, max_prefill_rows=2, async_scheduling=is_async)
    num_preempted = 0
    for stop in count(1, 2):
        request_id = engine.add_request(requests()[index])
        events = [event for _ in range(stop) if engine.has_work for event in engine.step()]
        if not engine.preempt(request_id):
            break
        num_preempted += 1
        engine.check_integrity()
        while engine.has_work:
            events += engine.step()
        assert_same(events[-1].output, alone[index])
    assert num_preempted >= 2


def test_an_abort_gives_both_lanes_and_all_pages_back(make_engine, alone):
    engine = make_engine(EOT, max_lanes=2)
    first, second = (engine.add_request(requests()[index]) for index in (0, 8))
    for _ in range(6):
        engine.step()
    assert (engine.stats().num_running, engine.stats().num_lanes_in_use, engine.stats().num_waiting) == (1, 2, 1)
    engine.abort(first)
    engine.check_integrity()
    outputs = {}
    while engine.has_work:
        outputs |= {e.request_id: e.output for e in engine.step() if isinstance(e, Finished)}
    assert outputs[first].finish_reason is FinishReason.ABORT
    assert_same(outputs[second], alone[8])


@pytest.mark.parametrize("is_async", [False, True])
def test_texts_that_end_early_end_as_the_reference_says(make_engine, oracle, is_async):
    reasons = []
    for seed in range(8):
        asked = guided_request(
            seed,
            2 * BLOCK,
            seed=seed,
            steering=STEERING,
            ignore_eos=False,
            logit_bias={END: 4.0 + seed},
            tokens_per_step=1 + seed % 3,
        )
        (output,) = make_engine(EOT, async_scheduling=is_async).generate([asked])
        compare_output(output, generate(oracle(EOT), asked, uniform))
        reasons.append(output.finish_reason)
    assert FinishReason.STOP in reasons


def test_without_a_prompt_both_copies_are_equal_and_there_is_one(make_engine):
    engine = make_engine(EOT, max_lanes=1)
    (ours,) = engine.generate([requests()[1]])
    sampling = dataclasses.replace(requests()[1].sampling, cfg_scale=0.0)
    (plain,) = engine.generate([dataclasses.replace(requests()[1], sampling=sampling)])
    assert_same(ours, plain)


def test_pages_of_the_copy_are_never_offered_to_others(make_engine):
    """They hold masks in place of the prompt, under this request's steering."""
    guided_engine, plain_engine = make_engine(EOT), make_engine(EOT)
    asked = requests()[0]
    (ours,) = guided_engine.generate([asked])
    # The same text once more, as a prompt: what it seals is all that may be offered.
    text = (*asked.prompt_token_ids, *ours.token_ids)
    plain_engine.generate([GenerateRequest(prompt_token_ids=text, max_tokens=1)])
    offered = [engine.load(with_all_prefixes=True).prefixes.added for engine in (guided_engine, plain_engine)]
    assert set(offered[0]) <= set(offered[1]) and len(offered[0]) == 4


def test_the_load_tells_of_both_lanes_and_all_pages(make_engine):
    engine = make_engine(EOT, max_lanes=4, max_prefill_rows=1)
    for index in (0, 8):
        engine.add_request(requests()[index])
    engine.step()
    load = engine.load()
    pair, single = load.running
    assert (pair.num_lanes, single.num_lanes, load.num_lanes_free) == (2, 1, 1)
    # Two complete blocks of prompt and a canvas, twice.
    assert (pair.num_pages, single.num_pages) == (6, 3)
    # Three rows of prompt, one a pass, then what the tail of the prompt leaves of the canvas.
    assert pair.num_steps_left == 3 + BLOCK - 5
    while engine.has_work:
        engine.step()


def test_one_copy_with_logits_that_are_not_finite_ends_the_request(make_engine):
    """A prompt token's embedding is not finite: the conditional pass fails, the unconditional one never sees it."""
    engine = make_engine(EOT)
    token = requests()[0].prompt_token_ids[3]
    with torch.no_grad():
        engine.runner.model.transformer.embedding.weight[token] = math.nan
    (output,) = engine.generate([requests()[0]])
    assert (output.finish_reason, output.commits) == (FinishReason.ERROR, ())
    assert "NonFiniteLogits" in output.error


def test_it_changes_what_is_chosen(make_engine):
    texts = {make_engine(EOT).generate([guided_request(9, 24, cfg_scale=s)])[0].token_ids for s in (0.0, 0.5, 2.0)}
    assert len(texts) == 3


def test_what_cannot_be_served_is_refused_by_name_before_anything_starts(make_engine):
    engine = make_engine(EOT, num_pages=6, max_lanes=2)
    refused = [
        (guided_request(9, 9, policy="lossless"), Unsupported, "sampling.cfg_scale", "lossless"),
        (guided_request(2 * BLOCK, 2 * BLOCK), RequestTooLarge, "max_tokens", "needs 8 pages"),
    ]
    for asked, error, param, words in refused:
        with pytest.raises(error, match=words) as caught:
            engine.add_request(asked)
        assert caught.value.param == param
    with pytest.raises(Unsupported, match="two lanes, and the engine has 1") as caught:
        make_engine(EOT, max_lanes=1).add_request(guided_request(9, 9))
    assert caught.value.param == "sampling.cfg_scale"
    for scale in (-0.1, 100.5, True, math.nan):
        with pytest.raises(InvalidValue, match="cfg_scale is"):
            SamplingParams(cfg_scale=scale)
    assert not engine.has_work
    # What just fits is served; who knows no engine refuses nothing for want of pages or lanes.
    (output,) = engine.generate([guided_request(BLOCK, 2 * BLOCK)])
    assert output.finish_reason is FinishReason.LENGTH
    check_request(guided_request(2 * BLOCK, 2 * BLOCK), engine.model_config)
