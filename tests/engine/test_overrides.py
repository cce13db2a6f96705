"""Concept weights that a request sets: refusals, company, drafts, cached prefixes, attribution and dose."""

import dataclasses
from pathlib import Path

import pytest

from engine import (
    AttributionParams,
    ConceptNotFound,
    Engine,
    EngineConfig,
    GenerateRequest,
    InvalidValue,
    SamplingParams,
    SteeringParams,
    Unsupported,
    WeightOverride,
)
from tests.checkpoints import EOT, NO_CORRECTION, NO_DISCOVERED
from tests.engine.decoding.test_overrides import LARGE_HEADS, LARGE_HEADS_NO_CORRECTION
from tests.engine.test_independence import assert_same, run
from tests.parity import compare_output
from tests.reference import generate

DEMO = Path(__file__).resolve().parents[2] / "demo_model" / "steerling-demo"
MODES = ["delta", "reference"]


def steering(*weights, mode="delta"):
    """Sets the weights of (concept, head, weight)."""
    overrides = tuple(WeightOverride(concept_id=concept, head=head, weight=weight) for concept, head, weight in weights)
    return SteeringParams(overrides=overrides, override_mode=mode)


BOTH = ((2, "known", 4.0), (11, "known", 0.0), (4, "discovered", -3.0))


def request(recipe, num_prompt=9, max_tokens=30, *, seed=0, steering=None, attribution=None, **sampling):
    values = {"temperature": 0.0, "repetition_penalty": 1.0, "ignore_eos": True, "seed": seed, **sampling}
    return GenerateRequest(
        prompt_token_ids=recipe.plain_ids(num_prompt, seed=seed),
        max_tokens=max_tokens,
        sampling=SamplingParams(**values),
        steering=steering,
        attribution=attribution,
    )


@pytest.mark.parametrize(
    ("recipe", "asked", "kind", "param", "parts"),
    [
        (EOT, steering((50, "known", 1.0)), ConceptNotFound, "overrides[0].concept_id", ["50", "known", "[0, 50)"]),
        (
            EOT,
            steering((3, "known", 1.0), (70, "discovered", 1.0)),
            ConceptNotFound,
            "overrides[1].concept_id",
            ["70", "discovered", "[0, 70)"],
        ),
        (NO_DISCOVERED, steering((3, "discovered", 1.0)), Unsupported, "overrides[0].head", ["no discovered head"]),
        (NO_CORRECTION, steering((3, "known", 1.0), mode="reference"), Unsupported, "override_mode", ["'delta'"]),
    ],
    ids=["unknown known", "unknown discovered", "no discovered head", "topk_on_logits"],
)
def test_what_a_checkpoint_cannot_do_is_refused_by_name(make_engine, recipe, asked, kind, param, parts):
    engine = make_engine(recipe)
    with pytest.raises(kind) as caught:
        engine.add_request(request(recipe, steering=asked))
    assert caught.value.param == f"steering.{param}"
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert not engine.has_work


def test_a_concept_is_set_once_in_each_head():
    """Equal ids of two heads are two concepts."""
    steering((3, "known", 1.0), (3, "discovered", 1.0))
    with pytest.raises(InvalidValue, match="discovered concept 3 twice"):
        steering((3, "known", 1.0), (3, "discovered", 1.0), (3, "discovered", 0.0))


@pytest.mark.parametrize(
    ("recipe", "asked"),
    [
        (EOT, steering((49, "known", 1.0), (69, "discovered", 1.0), mode="reference")),
        (NO_DISCOVERED, steering((3, "known", 1.0), mode="reference")),
        (NO_CORRECTION, steering((3, "known", 1.0), (3, "discovered", 1.0))),
        (NO_CORRECTION, SteeringParams(override_mode="reference")),
    ],
    ids=["last concepts", "no discovered head", "topk_on_logits", "a mode and nothing to set"],
)
def test_what_it_can_do_is_served(make_engine, recipe, asked):
    (output,) = make_engine(recipe).generate([request(recipe, steering=asked)])
    assert len(output.token_ids) == 30


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recipe", [LARGE_HEADS, LARGE_HEADS_NO_CORRECTION], ids=lambda recipe: recipe.name)
def test_heads_too_large_for_dense_sums_give_what_the_package_gives(make_engine, oracle, recipe, mode):
    asked = [
        request(recipe, num_prompt, 10, seed=num_prompt, steering=wanted, attribution=AttributionParams())
        for num_prompt, wanted in ((5, steering(*BOTH, mode=mode)), (18, steering(*BOTH[2:], mode=mode)))
    ]
    for one, output in zip(asked, make_engine(recipe).generate(asked), strict=True):
        assert compare_output(output, generate(oracle(recipe), one)).num_commits == 10


@pytest.mark.parametrize("mode", MODES)
def test_requests_that_set_nothing_are_left_alone_by_those_that_do(make_engine, mode):
    """Weights of one row were to leak into others that share its pass, and of one request into the lane's next."""
    plain = [request(EOT, 5 * index, 25, seed=index, attribution=AttributionParams()) for index in range(4)]
    setting = [
        dataclasses.replace(one, steering=steering((3 + index, "known", 5.0), *BOTH[2:], mode=mode))
        for index, one in enumerate(plain)
    ]
    alone = [make_engine(EOT).generate([one])[0] for one in (*plain, *setting)]
    assert all(a.token_ids != b.token_ids for a, b in zip(alone[:4], alone[4:], strict=True))
    mixed = [one for two in zip(plain, setting, strict=True) for one in two]
    for config in ({}, {"max_lanes": 1}, {"max_lanes": 3, "max_rows": 3, "async_scheduling": True}):
        outputs = run(make_engine(EOT, **config), mixed)
        for output, expected in zip([*outputs[::2], *outputs[1::2]], alone, strict=True):
            assert_same(output, expected)


@pytest.mark.parametrize("mode", MODES)
def test_drafts_see_what_their_sequence_sets(make_engine, mode):
    for seed, is_async in ((1, False), (2, True)):
        asked = request(EOT, 7, 40, seed=seed, temperature=0.8, steering=steering(*BOTH, mode=mode))
        (expected,) = make_engine(EOT).generate([asked])
        lossless = dataclasses.replace(asked, sampling=dataclasses.replace(asked.sampling, policy="lossless"))
        (output,) = make_engine(EOT, async_scheduling=is_async).generate([lossless])
        assert_same(output, expected)
        assert output.num_forward_passes < expected.num_forward_passes


def test_pages_filled_by_a_request_that_sets_weights_serve_others(make_engine):
    """Keys and values of sealed blocks never see them."""
    engine = make_engine(EOT)
    setting = request(EOT, 3 * EOT.block, 2 * EOT.block, steering=steering(*BOTH))
    (first,) = engine.generate([setting])
    longer = dataclasses.replace(
        setting, prompt_token_ids=(*setting.prompt_token_ids, *first.token_ids[: EOT.block], 3), steering=None
    )
    (second,) = engine.generate([longer])
    assert second.num_cached_tokens == 4 * EOT.block
    assert_same(second, make_engine(EOT, share_prefixes=False).generate([longer])[0])


@pytest.mark.parametrize("mode", MODES)
def test_attributions_of_mixed_company_are_cut_to_what_each_asks_for(make_engine, mode):
    """Concepts that are set come beside those the head finds; entries without a concept never leave the engine."""
    wanted = steering(*BOTH, mode=mode)
    asked = [
        request(EOT, 3, 20, seed=index, steering=wanted if index % 2 else None, attribution=AttributionParams(top_k=k))
        for index, k in enumerate((None, None, 2, 3, 0, 0))
    ]
    outputs = run(make_engine(EOT, explain_interval_s=1000.0), asked)
    concept = EOT.concept_config
    for index, output in enumerate(outputs):
        top_k = asked[index].attribution.top_k
        for found in (commit.attribution for commit in output.commits):
            ids = [one.concept_id for one in found.known]
            assert min(ids, default=0) >= 0 and len(set(ids)) == len(ids)
            num_set = len(set(ids) & {2, 11})
            if top_k is not None:
                assert len(ids) == top_k
            elif index % 2:
                assert num_set == 2 and concept.topk_known <= len(ids) <= concept.topk_known + 2
                weights = {one.concept_id: one.weight for one in found.known}
                assert (weights[2], weights[11]) == (4.0, 0.0)
            else:
                assert len(ids) == concept.topk_known


@pytest.mark.parametrize("mode", MODES)
def test_the_more_a_concept_weighs_the_more_of_its_tokens_come(mode):
    engine = Engine.from_checkpoint(DEMO, EngineConfig(device="cpu", dtype="float32", num_pages=16, max_rows=4))
    food = 13
    tokens = {token for token, _ in engine.concept_top_tokens(food, 200)}
    counts = []
    for weight in (0.0, 1.0, 2.0, 4.0):
        asked = [
            GenerateRequest(
                prompt_token_ids=(),
                max_tokens=64,
                sampling=SamplingParams(seed=seed, tokens_per_step=4),
                steering=steering((food, "known", weight), mode=mode),
            )
            for seed in range(2)
        ]
        counts.append(sum(token in tokens for output in engine.generate(asked) for token in output.token_ids))
    assert counts == sorted(set(counts)), counts
    assert counts[-1] > 80, counts
