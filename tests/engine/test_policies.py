"""Whole generations under every policy: equal to the plain reference, alone and mixed, however they are disturbed."""

import dataclasses

import pytest

from engine import (
    AttributionParams,
    Engine,
    EngineConfig,
    FinishReason,
    GenerateRequest,
    Intervention,
    SamplingParams,
    SteeringParams,
    Suppression,
)
from tests.checkpoints import EOT, NO_CORRECTION, NO_ROPE, STEERLING_LIKE
from tests.engine.test_independence import CONFIGS, assert_same, run
from tests.parity import compare_output
from tests.parity_cases import uniform
from tests.reference import generate

CHECKPOINTS = [STEERLING_LIKE, EOT, NO_CORRECTION, NO_ROPE]
BLOCK = EOT.block
END = EOT.special_ids["eot_id"]

STEERING = SteeringParams(
    interventions=(
        Intervention(concept_ids=(3,), strength=6.0, layer=1, schedule="hard_cutoff", cutoff_tokens=9),
        Intervention(concept_ids=(5, 8), strength=-2.0, unit="raw", layer=2),
    ),
    suppress=(Suppression(concept_id=2, strength=2.0),),
)

# Parameters at which these checkpoints, random as they are, commit now one, now many.
POLICIES = {
    "confidence": {"tokens_per_step": 3},
    "threshold": {"policy": "threshold", "threshold": 0.35},
    "threshold, capped": {"policy": "threshold", "threshold": 0.3, "tokens_per_step": 4},
    "factor": {"policy": "factor", "factor": 3.0},
    "factor, capped": {"policy": "factor", "factor": 5.0, "tokens_per_step": 5},
    "entropy bound": {"policy": "entropy_bound", "entropy_bound": 5.0},
    "entropy bound, capped": {"policy": "entropy_bound", "entropy_bound": 12.0, "tokens_per_step": 6},
}
SAMPLERS = [
    {"temperature": 0.0, "repetition_penalty": 1.0},
    {"temperature": None, "repetition_penalty": 1.1},
    {"temperature": 1.2, "top_p": 0.9, "repetition_penalty": 1.2},
]


def one(recipe, index, num_prompt, max_tokens, *, steering=None, **sampling):
    values = {"ignore_eos": True, "seed": 100 + index, **SAMPLERS[index % len(SAMPLERS)], **sampling}
    return GenerateRequest(
        prompt_token_ids=recipe.plain_ids(num_prompt, seed=index),
        max_tokens=max_tokens,
        sampling=SamplingParams(**values),
        steering=steering,
        attribution=AttributionParams() if index % 2 else None,
    )


def requests(recipe):
    """Each policy from four prompts, every second one steered, with another seed and sampler each time."""
    block, asked = recipe.block, []
    for policy in POLICIES.values():
        for num_prompt, max_tokens in ((0, block + 5), (7, 2 * block), (block, block + 1), (2 * block + 3, block)):
            index = len(asked)
            steering = STEERING if index % 2 else None
            asked.append(one(recipe, index, num_prompt, max_tokens, steering=steering, **policy))
    return asked


@pytest.fixture(scope="module", params=CHECKPOINTS, ids=lambda recipe: recipe.name)
def ran(request, checkpoint, oracle):
    recipe = request.param
    engine = Engine.from_checkpoint(checkpoint(recipe), EngineConfig(device="cpu", num_pages=256, max_rows=16))
    asked = requests(recipe)
    return oracle(recipe), list(zip(asked, engine.generate(asked), strict=True))


def test_mixed_in_one_batch_every_policy_equals_the_plain_reference(ran):
    oracle, pairs = ran
    for asked, output in pairs:
        compare_output(output, generate(oracle, asked, uniform))


def counts_of(output):
    """Commits of each denoising step, block ends included."""
    steps = [c.denoising_step for c in output.commits]
    return [steps.count(step) for step in range(output.num_denoising_steps)]


def test_the_policies_differ_enough_for_equality_to_mean_something(ran):
    oracle, pairs = ran
    by_policy = {}
    for asked, output in pairs:
        by_policy.setdefault(asked.sampling.policy, []).append((asked, counts_of(output)))
    for policy in ("threshold", "factor", "entropy_bound"):
        counts = [count for _, found in by_policy[policy] for count in found]
        assert 1 in counts and len(set(counts)) >= 4, f"{policy} always commits {set(counts)}"
        for asked, found in by_policy[policy]:
            assert min(found) >= 1 and max(found) <= asked.sampling.max_commits(oracle.block)


@pytest.mark.parametrize(
    "sampling",
    [
        {"policy": "threshold", "threshold": 1.0},
        {"policy": "threshold", "tokens_per_step": 1, "threshold": 0.1},
        {"policy": "factor", "factor": 0.0},
        {"policy": "entropy_bound", "entropy_bound": 0.0},
        {"policy": "confidence", "tokens_per_step": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("steering", [None, STEERING], ids=["plain", "steered"])
def test_at_its_careful_end_a_policy_writes_what_confidence_writes(make_engine, sampling, steering):
    engine = make_engine(EOT)
    asked = one(EOT, 1, BLOCK + 2, 2 * BLOCK, steering=steering, **sampling)
    plain = dataclasses.replace(asked, sampling=SamplingParams(seed=101))
    plain = dataclasses.replace(plain, sampling=dataclasses.replace(plain.sampling, ignore_eos=True))
    careful, reference = engine.generate([asked, plain])
    assert_same(careful, reference)
    assert careful.num_denoising_steps == 2 * BLOCK


def test_at_its_generous_end_a_policy_fills_a_block_in_one_step(make_engine):
    engine = make_engine(EOT)
    ends = [("threshold", 1e-6), ("factor", 1000.0), ("entropy_bound", 1000.0)]
    asked = [
        one(EOT, i, BLOCK + 3, 2 * BLOCK, policy=policy, **{policy: value}) for i, (policy, value) in enumerate(ends)
    ]
    for output in engine.generate(asked):
        assert [c.denoising_step for c in output.commits] == [0] * (BLOCK - 3) + [1] * BLOCK + [2] * 3
        assert output.num_denoising_steps == 3


def test_ends_and_min_tokens_hold_under_every_policy(make_engine, oracle):
    """Several commits of one step may lie right of an end that the same step commits."""
    asked = [
        one(EOT, 3 * i, num_prompt, 40, ignore_eos=False, min_tokens=least, logit_bias={END: 3.0}, **policy)
        for i, policy in enumerate(POLICIES.values())
        for num_prompt, least in ((0, 0), (5, 4), (BLOCK, 0), (BLOCK + 7, 20))
    ]
    outputs = make_engine(EOT).generate(asked)
    for request, output in zip(asked, outputs, strict=True):
        compare_output(output, generate(oracle(EOT), request, uniform))
        assert len(output.token_ids) >= request.sampling.min_tokens
    assert sum(output.finish_reason is FinishReason.STOP for output in outputs) > len(outputs) // 2


@pytest.fixture(scope="module", params=[EOT, NO_CORRECTION], ids=lambda recipe: recipe.name)
def alone(request, checkpoint):
    """A recipe, eight requests of all policies, and what each gives in an engine of its own."""
    recipe = request.param
    asked = requests(recipe)[1::3][:8]
    assert {item.sampling.policy for item in asked} == {"confidence", "threshold", "factor", "entropy_bound"}
    config = EngineConfig(device="cpu", num_pages=64, max_rows=16, share_prefixes=False)
    return recipe, asked, [Engine.from_checkpoint(checkpoint(recipe), config).generate([item])[0] for item in asked]


@pytest.mark.parametrize("config", CONFIGS)
def test_policies_mixed_in_one_batch_give_what_they_give_alone(make_engine, alone, config):
    """A row must not run under the policy, the parameter or the cap of another row of its pass."""
    recipe, asked, expected = alone
    engine = make_engine(recipe, **CONFIGS[config])
    first, second = run(engine, asked), run(engine, asked, [5, 0, 3, 9, 1, 0, 12, 2])
    for output, other in zip(first + second, expected * 2, strict=True):
        assert_same(output, other)
    if "share" not in str(CONFIGS[config]):
        assert any(output.num_cached_tokens for output in second), "the second run finds prefixes"
    if "too few" in config:
        assert any(output.num_preemptions for output in first + second), "this config is here to preempt"


@pytest.mark.parametrize("index", range(8))
def test_preempted_at_any_step_an_adaptive_request_continues_to_the_same_end(make_engine, alone, index):
    recipe, asked, expected = alone
    engine = make_engine(recipe, max_prefill_rows=2)
    for stop in range(1, expected[index].num_denoising_steps):
        request_id = engine.add_request(asked[index])
        for _ in range(stop):
            engine.step()
        if not engine.preempt(request_id):
            break
        (output,) = [event.output for event in drain(engine) if hasattr(event, "output")]
        assert output.num_preemptions == 1
        assert_same(output, expected[index])
    assert stop > 1


def drain(engine):
    """Events until nobody is left."""
    while engine.has_work:
        yield from engine.step()
