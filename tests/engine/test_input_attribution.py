"""Integrated gradients over a replayed trace: the package's on its ground, a dense twin's on ours."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from engine import (
    AttributeInputs,
    GenerateRequest,
    Intervention,
    InvalidValue,
    ReplayTrace,
    SamplingParams,
    SteeringParams,
    Suppression,
    Trace,
    TracedCommit,
    Unsupported,
    WeightOverride,
    trace_of,
)
from engine.analyzing.snapshots import Snapshot, snapshots
from engine.limits import MAX_INTEGRATION_STEPS, MAX_TARGETS
from tests.checkpoints import EOT, NO_CORRECTION, NO_ROPE, RECIPES, Recipe
from tests.parity_cases import compare_inputs
from tests.reference import resolve_steering

TINY = Recipe(name="tiny", model={"n_layers": 3}, seed=7)
WITH_GRADIENTS = [recipe for recipe in RECIPES if not recipe.chooses_from_concepts]
STEERED = SteeringParams(
    interventions=(
        Intervention(concept_ids=(3,), strength=6.0, layer=1),
        Intervention(concept_ids=(2, 5), weights=(1.0, -0.5), strength=3.0, layer=2, unit="raw"),
        Intervention(concept_ids=(7,), strength=5.0, schedule="hard_cutoff", cutoff_tokens=9),
    ),
    suppress=(Suppression(concept_id=1, strength=3.0),),
)


def asked(recipe, length, max_tokens, *, steering=None, **sampling):
    values = {"temperature": 0.0, "repetition_penalty": 1.0, "ignore_eos": True, **sampling}
    return GenerateRequest(
        prompt_token_ids=recipe.plain_ids(length),
        max_tokens=max_tokens,
        sampling=SamplingParams(**values),
        steering=steering,
    )


def traced(engine, request):
    (output,) = engine.generate([request])
    return trace_of(request, output)


def densely(oracle, request, snapshot: Snapshot, position, token_id, num_steps, length):
    """Contributions and the logits at both ends: the package's layers over every position, one point at a time.

    `length` positions, masks past the snapshot; steering by the package's own embeddings, at masks.
    """
    ids = torch.tensor([*snapshot.token_ids, *[oracle.mask_id] * (length - len(snapshot.token_ids))])
    masked_S1 = (ids == oracle.mask_id)[:, None]
    masked_S1[len(snapshot.token_ids) :] = False
    transformer = oracle.model.transformer
    vectors = [
        (layer, alpha * direction_D)
        for layer, alpha, direction_D, cutoff in resolve_steering(oracle, request)
        if cutoff is None or snapshot.num_committed < cutoff
    ]
    hooks = []
    for index, block in enumerate(transformer.blocks):
        total_D = sum((vector for layer, vector in vectors if index + 1 >= layer), torch.zeros(1))
        hooks.append(block.register_forward_hook(lambda _m, _a, out, total=total_D: out + masked_S1 * total))

    def logit(embeddings_SD):
        hidden = transformer(input_ids=ids[None], input_embeds=embeddings_SD[None], return_hidden=True)
        return transformer.lm_head(hidden)[0, position, token_id]

    with torch.no_grad():
        actual_SD, mask_SD = transformer.tok_emb(ids), transformer.tok_emb(torch.full_like(ids, oracle.mask_id))
        baseline = float(logit(mask_SD))
    gradient_SD = torch.zeros_like(actual_SD)
    for step in range(1, num_steps + 1):
        point_SD = (mask_SD + step / num_steps * (actual_SD - mask_SD)).requires_grad_()
        value = logit(point_SD)
        gradient_SD += torch.autograd.grad(value, point_SD)[0] / num_steps
    value = value.detach()
    for hook in hooks:
        hook.remove()
    return ((actual_SD - mask_SD) * gradient_SD).sum(dim=-1).tolist(), float(value), baseline


@pytest.mark.parametrize("tokens_per_step", [1, 4])
@pytest.mark.parametrize("recipe", WITH_GRADIENTS, ids=lambda recipe: recipe.name)
def test_contributions_equal_the_package_s(make_engine, oracle, recipe, tokens_per_step):
    result = compare_inputs(oracle(recipe), make_engine(recipe), tokens_per_step=tokens_per_step)
    assert result.num_commits == 4 * tokens_per_step
    assert result.largest > 0


@pytest.mark.parametrize("steering", [None, STEERED], ids=["plain", "steered"])
@pytest.mark.parametrize("length", [0, 1, 15, 21])
def test_contributions_equal_those_of_whole_dense_passes(make_engine, oracle, length, steering):
    """Off the grid, steered and past the first block, with later blocks there instead of left out."""
    request = asked(TINY, length, 37, tokens_per_step=3, steering=steering)
    engine = make_engine(TINY)
    trace = traced(engine, request)
    found = {target.position: target for target in engine.analyze(AttributeInputs(trace=trace, num_steps=4)).targets}
    assert found.keys() == {c.position for c in trace.commits} and len(found) == 37
    recorded = {c.position: c.target_logit for c in trace.commits}
    whole = -(-trace.limit // TINY.block) * TINY.block
    for snapshot in list(snapshots(trace, engine.model_config))[::3]:
        for commit in snapshot.commits:
            # The block's own end is the text's: past it nothing exists, so nothing may be put there.
            length_seen = trace.limit if len(snapshot.token_ids) == trace.limit else whole
            twin = densely(
                oracle(TINY), request, snapshot, commit.position, commit.token_id, num_steps=4, length=length_seen
            )
            target, (contributions, target_logit, baseline_logit) = found[commit.position], twin
            torch.testing.assert_close(
                torch.tensor(target.contributions),
                torch.tensor(contributions)[: trace.limit],
                atol=2e-4,
                rtol=1e-3,
            )
            assert target.target_logit == pytest.approx(target_logit, abs=1e-4)
            assert target.baseline_logit == pytest.approx(baseline_logit, abs=1e-4)
            assert target.target_logit == pytest.approx(recorded[commit.position], abs=1e-4)


def test_steering_changes_what_the_replay_sees(make_engine):
    engine = make_engine(TINY)
    trace = traced(engine, asked(TINY, 21, 20, steering=STEERED))
    ask = AttributeInputs(trace=trace, num_steps=2)
    unsteered = dataclasses.replace(ask, trace=dataclasses.replace(trace, steering=None))
    steered, plain = engine.analyze(ask), engine.analyze(unsteered)
    differences = [abs(a.target_logit - b.target_logit) for a, b in zip(steered.targets, plain.targets, strict=True)]
    assert min(differences) > 1e-3


def test_masks_and_later_blocks_contribute_nothing(make_engine):
    engine = make_engine(TINY)
    trace = traced(engine, asked(TINY, 5, 40))
    first = trace.commits[0].position
    (target,) = engine.analyze(AttributeInputs(trace=trace, targets=(first,))).targets
    assert len(target.contributions) == 45
    assert all(target.contributions[:5]) and not any(target.contributions[5:])


def test_more_points_leave_a_smaller_completeness_error(make_engine):
    engine = make_engine(TINY)
    trace = traced(engine, asked(TINY, 20, 16))
    errors = []
    for num_steps in (2, 16, 128):
        found = engine.analyze(AttributeInputs(trace=trace, targets=(21, 26, 31, 35), num_steps=num_steps))
        assert found.num_steps == num_steps
        for target in found.targets:
            summed = math.fsum(target.contributions) - (target.target_logit - target.baseline_logit)
            assert target.completeness_error == pytest.approx(summed, abs=1e-6)
        errors.append(sum(abs(target.completeness_error) for target in found.targets) / len(found.targets))
    assert errors[2] < errors[1] / 3 < errors[0] / 9
    assert errors[2] < 0.1


def test_how_many_points_share_a_slice_changes_nothing(make_engine):
    engine = make_engine(TINY)
    ask = AttributeInputs(trace=traced(engine, asked(TINY, 25, 15, steering=STEERED)), num_steps=5)
    one_at_a_time = make_engine(TINY, input_attribution_context=40).analyze(ask)
    for together, alone in zip(engine.analyze(ask).targets, one_at_a_time.targets, strict=True):
        torch.testing.assert_close(torch.tensor(together.contributions), torch.tensor(alone.contributions))
        assert together.baseline_logit == pytest.approx(alone.baseline_logit, abs=1e-5)


def test_an_end_token_hides_what_is_right_of_it(make_engine, oracle):
    """The canvas right of an end becomes end-of-text, which later steps see there."""
    engine = make_engine(EOT)
    requests = (asked(EOT, 5, 40, ignore_eos=False, seed=s, temperature=3.0, tokens_per_step=2) for s in range(40))
    for request in requests:
        trace = traced(engine, request)
        late = [s for s in snapshots(trace, engine.model_config) if engine.model_config.eos_token_id in s.token_ids]
        if late:
            break
    else:
        raise AssertionError("no generation went on left of an end")
    recorded = {c.position: c.target_logit for c in trace.commits}
    found = engine.analyze(AttributeInputs(trace=trace, num_steps=3))
    assert {target.position for target in found.targets} == recorded.keys()
    for target in found.targets:
        assert target.target_logit == pytest.approx(recorded[target.position], abs=1e-4)
    (commit, *_) = late[-1].commits
    twin, _, _ = densely(oracle(EOT), request, late[-1], commit.position, commit.token_id, 3, len(late[-1].token_ids))
    (target,) = (target for target in found.targets if target.position == commit.position)
    torch.testing.assert_close(
        torch.tensor(target.contributions[: len(twin)]), torch.tensor(twin), atol=2e-4, rtol=1e-3
    )
    assert any(target.contributions[position] for position in range(commit.position + 1, len(twin)))


def test_requests_beside_an_analysis_get_what_they_get_alone(make_engine):
    request = asked(TINY, 20, 20, temperature=1.0, seed=3)
    alone = traced(make_engine(TINY), request)
    engine = make_engine(TINY)
    trace = traced(engine, asked(TINY, 21, 12))
    result = engine.begin_analysis(AttributeInputs(trace=trace, num_steps=3))
    assert not result.done()
    assert traced(engine, request) == alone, "the analysis took turns with the generation's passes"
    while not result.done():
        engine.step()
    assert result.result() == make_engine(TINY).analyze(AttributeInputs(trace=trace, num_steps=3))


def test_parameters_that_want_gradients_get_none(make_engine):
    engine = make_engine(TINY)
    model = engine.runner.model.requires_grad_(True)
    with torch.no_grad():
        engine.analyze(AttributeInputs(trace=traced(engine, asked(TINY, 4, 8)), num_steps=2))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_analysis_that_nobody_waits_for_ends_within_a_slice(make_engine):
    engine = make_engine(TINY, input_attribution_context=40)
    result = engine.begin_analysis(AttributeInputs(trace=traced(engine, asked(TINY, 20, 20)), num_steps=9))
    for _ in range(3):
        engine.step()
    assert engine.has_work
    result.cancel()
    engine.step()
    assert not engine.has_work


COMMITS = tuple(TracedCommit(2 + i, 7, i) for i in range(4))
PLAIN = Trace(prompt_token_ids=(3, 4), max_tokens=4, commits=COMMITS)


def changed(**values):
    return dataclasses.replace(PLAIN, **values)


@pytest.mark.parametrize(
    ("trace", "words"),
    [
        (changed(cfg_scale=1.5), "cfg_scale is 1.5"),
        (changed(steering=SteeringParams(overrides=(WeightOverride(concept_id=1, weight=0.5),))), "overrides"),
    ],
)
def test_traces_of_other_kinds_of_generation_are_refused_by_name(make_engine, trace, words):
    engine = make_engine(TINY)
    for ask in (AttributeInputs(trace=trace), ReplayTrace(trace=trace)):
        with pytest.raises(Unsupported, match=words):
            engine.begin_analysis(ask)
    assert not engine.has_work


def test_checkpoints_that_choose_from_concept_features_are_refused(make_engine):
    recipe = NO_CORRECTION
    with pytest.raises(Unsupported, match="use_epsilon_correction is false"):
        make_engine(recipe).begin_analysis(AttributeInputs(trace=PLAIN))


def test_switched_off_it_is_refused_and_says_by_what(make_engine):
    engine = make_engine(TINY, input_attribution_context=0)
    for ask in (AttributeInputs(trace=PLAIN), ReplayTrace(trace=PLAIN)):
        with pytest.raises(Unsupported, match="input_attribution_context is 0"):
            engine.begin_analysis(ask)


def test_the_longest_trace_is_served_and_a_longer_one_refused(make_engine):
    engine = make_engine(TINY, input_attribution_context=6)
    assert len(engine.analyze(AttributeInputs(trace=PLAIN, num_steps=2)).targets) == 4
    with pytest.raises(Unsupported, match=r"2 prompt tokens and max_tokens is 5; together at most 6"):
        engine.begin_analysis(AttributeInputs(trace=changed(max_tokens=5)))


def test_targets_and_points_have_limits_that_the_refusal_names():
    def many(number):
        commits = [TracedCommit(position, 7, position) for position in range(number)]
        return Trace(prompt_token_ids=(), max_tokens=number, commits=commits)

    assert AttributeInputs(trace=many(MAX_TARGETS)).targets is None
    with pytest.raises(InvalidValue, match=rf"{MAX_TARGETS + 1} tokens .* at most {MAX_TARGETS}"):
        AttributeInputs(trace=many(MAX_TARGETS + 1))
    assert AttributeInputs(trace=many(MAX_TARGETS + 1), targets=(3, 3, 0)).targets == (0, 3)
    AttributeInputs(trace=PLAIN, num_steps=MAX_INTEGRATION_STEPS)
    with pytest.raises(InvalidValue, match=f"num_steps is {MAX_INTEGRATION_STEPS + 1}"):
        AttributeInputs(trace=PLAIN, num_steps=MAX_INTEGRATION_STEPS + 1)
    with pytest.raises(InvalidValue, match="position 9, which the trace does not commit"):
        AttributeInputs(trace=PLAIN, targets=(2, 9))


@pytest.mark.parametrize(
    ("trace", "error", "words"),
    [
        (changed(commits=(TracedCommit(2, 97, 0),)), InvalidValue, r"token 97 at 2; token ids lie in \[0, 97\)"),
        (changed(commits=(TracedCommit(2, 96, 0),)), InvalidValue, "never chosen"),
        (changed(max_tokens=20, commits=(TracedCommit(17, 7, 0),)), InvalidValue, r"canvas was \[2, 16\)"),
        (
            changed(stop_token_ids=(8,), commits=(TracedCommit(3, 8, 0), TracedCommit(4, 7, 1))),
            InvalidValue,
            "right of an end in it is final",
        ),
        (changed(prompt_token_ids=(96, 4)), InvalidValue, "mask token"),
        (changed(max_tokens=600), Unsupported, "together at most 512"),
    ],
    ids=["vocabulary", "banned", "block", "end", "mask", "context"],
)
def test_traces_that_no_generation_leaves_are_refused(make_engine, trace, error, words):
    engine = make_engine(TINY)
    for ask in (AttributeInputs(trace=trace), ReplayTrace(trace=trace)):
        with pytest.raises(error, match=words):
            engine.begin_analysis(ask)
    assert not engine.has_work


def test_without_rotary_embeddings_too(make_engine, oracle):
    engine = make_engine(NO_ROPE)
    request = asked(NO_ROPE, 7, 12)
    trace = traced(engine, request)
    last = list(snapshots(trace, engine.model_config))[-1]
    (commit,) = last.commits
    (target,) = engine.analyze(AttributeInputs(trace=trace, targets=(commit.position,), num_steps=3)).targets
    twin, _, _ = densely(oracle(NO_ROPE), request, last, commit.position, commit.token_id, 3, len(last.token_ids))
    torch.testing.assert_close(
        torch.tensor(target.contributions[: len(twin)]), torch.tensor(twin), atol=2e-4, rtol=1e-3
    )
