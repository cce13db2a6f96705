"""The lossless policy gives the commits of `confidence` one at a time, whatever its drafts turn out to be."""

import dataclasses

import pytest

from engine import (
    AttributionParams,
    Engine,
    EngineConfig,
    Finished,
    FinishReason,
    GenerateRequest,
    Intervention,
    SamplingParams,
    SteeringParams,
    Suppression,
    WeightOverride,
)
from tests.checkpoints import EOT, NO_CORRECTION, NO_ROPE, STEERLING_LIKE
from tests.engine.test_independence import assert_same, run
from tests.records import Records

CHECKPOINTS = [STEERLING_LIKE, EOT, NO_CORRECTION, NO_ROPE]
BLOCK = EOT.block
END = EOT.special_ids["eot_id"]
STEERING = SteeringParams(
    interventions=(
        Intervention(concept_ids=(3,), strength=6.0, layer=1, schedule="hard_cutoff", cutoff_tokens=9),
        Intervention(concept_ids=(5, 8), strength=-2.0, unit="raw", layer=2),
    ),
    suppress=(Suppression(concept_id=2, strength=2.0),),
    overrides=(WeightOverride(concept_id=6, weight=2.0), WeightOverride(concept_id=4, head="discovered", weight=-1.0)),
)
SAMPLERS = [
    {"temperature": 0.0, "repetition_penalty": 1.0},
    {"temperature": 0.0, "repetition_penalty": 1.4},
    {"repetition_penalty": 1.1},
    {"temperature": 0.7, "top_p": 0.9, "num_logprobs": 2},
]


def requests(recipe, policy="lossless"):
    """Prompts and lengths around blocks, every sampler, every second one steered, every third explained."""
    lengths = [(0, 9), (1, BLOCK), (7, 2 * BLOCK), (BLOCK, BLOCK + 1), (2 * BLOCK + 3, 19), (BLOCK - 1, 3 * BLOCK)]
    return [
        GenerateRequest(
            prompt_token_ids=recipe.plain_ids(num_prompt, seed=index),
            max_tokens=max_tokens,
            sampling=SamplingParams(
                policy=policy, seed=100 * seed + index, ignore_eos=True, **SAMPLERS[(index + seed) % len(SAMPLERS)]
            ),
            steering=STEERING if (index + seed) % 2 else None,
            attribution=AttributionParams() if index % 3 == 0 else None,
        )
        for seed in range(3)
        for index, (num_prompt, max_tokens) in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def alone(checkpoint):
    """Outputs of the policy `confidence`, each request by itself."""
    made = {}
    for recipe in CHECKPOINTS:
        engine = Engine.from_checkpoint(checkpoint(recipe), EngineConfig(device="cpu", num_pages=64))
        made[recipe.name] = [engine.generate([asked])[0] for asked in requests(recipe, "confidence")]
    return made


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("recipe", CHECKPOINTS, ids=lambda recipe: recipe.name)
def test_the_commits_are_those_of_one_at_a_time_in_fewer_passes(make_engine, alone, recipe, is_async):
    records = Records()
    engine = make_engine(recipe, recorder=records, async_scheduling=is_async)
    saved = 0
    for asked, expected in zip(requests(recipe), alone[recipe.name], strict=True):
        (output,) = engine.generate([asked])
        assert_same(output, expected)
        saved += expected.num_forward_passes - output.num_forward_passes
    counted = records.counts
    assert counted["drafts"] >= counted["drafts_position_right"] >= counted["drafts_token_right"] > 0
    assert counted["drafts_token_right"] >= counted["drafts_committed"] > 0
    # Each accepted draft saves a pass; where results come late, a block whose end was not known may cost one more.
    assert 0 < saved <= counted["drafts_committed"]
    assert is_async or saved == counted["drafts_committed"]


@pytest.mark.parametrize(
    "config",
    [
        {"draft_row_limit": 0},
        {"draft_row_limit": 3},
        {"draft_row_limit": 16, "max_rows": 16},
        {"draft_row_limit": 16, "max_rows": 16, "async_scheduling": True, "num_pages": 11},
        {"max_rows": 2},
    ],
    ids=str,
)
def test_in_company_with_many_drafts_or_none_every_request_gives_the_same(make_engine, alone, config):
    asked = requests(EOT)
    others = requests(EOT, "confidence")[:4]
    outputs = run(make_engine(EOT, **config), [*asked, *others])
    for output, expected in zip(outputs, [*alone[EOT.name], *alone[EOT.name][:4]], strict=True):
        assert_same(output, expected)


@pytest.mark.parametrize("is_async", [False, True])
def test_texts_that_end_early_end_the_same(make_engine, is_async):
    """A commit that ends the text makes its draft void: that one has seen masks right of the end."""
    reasons = []
    engine, plain = make_engine(EOT, async_scheduling=is_async), make_engine(EOT)
    for seed in range(12):
        sampling = SamplingParams(seed=seed, ignore_eos=False, logit_bias={END: 3.0 + seed % 3}, repetition_penalty=1.2)
        asked = GenerateRequest(
            prompt_token_ids=EOT.plain_ids(seed, seed=seed),
            max_tokens=3 * BLOCK,
            sampling=dataclasses.replace(sampling, policy="lossless"),
            attribution=AttributionParams() if seed % 2 else None,
        )
        (ours,) = engine.generate([asked])
        (expected,) = plain.generate([dataclasses.replace(asked, sampling=sampling)])
        assert_same(ours, expected)
        reasons.append(ours.finish_reason)
    assert FinishReason.STOP in reasons


@pytest.mark.parametrize("is_async", [False, True])
def test_preempted_at_any_step_it_continues_to_the_same_end(make_engine, alone, is_async):
    asked, expected = requests(EOT)[5], alone[EOT.name][5]
    engine = make_engine(EOT, async_scheduling=is_async)
    for stop in range(1, 40, 3):
        request_id = engine.add_request(asked)
        events = [event for _ in range(stop) if engine.has_work for event in engine.step()]
        engine.preempt(request_id)
        while engine.has_work:
            events += engine.step()
        assert isinstance(events[-1], Finished)
        assert_same(events[-1].output, expected)


def test_a_canvas_of_one_position_has_nothing_to_expect(make_engine):
    """The second pick of a single position was looked up."""
    recipe = dataclasses.replace(EOT, name="eot_block_1", model={**EOT.model, "diff_block_size": 1})
    sampling = SamplingParams(seed=3, ignore_eos=True)
    asked = GenerateRequest(prompt_token_ids=recipe.plain_ids(3), max_tokens=5, sampling=sampling)
    engine = make_engine(recipe)
    (expected,) = engine.generate([asked])
    (ours,) = engine.generate([dataclasses.replace(asked, sampling=dataclasses.replace(sampling, policy="lossless"))])
    assert_same(ours, expected)
