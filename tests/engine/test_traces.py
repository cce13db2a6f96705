"""Traces: made from a generation, written, read back, and replayed against a model."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest
import torch

from engine import (
    Engine,
    EngineConfig,
    FinishReason,
    GenerateRequest,
    Intervention,
    InvalidValue,
    ReplayTrace,
    SamplingParams,
    SteeringParams,
    Suppression,
    Trace,
    TracedCommit,
    WeightOverride,
    trace_of,
)
from tests.checkpoints import EOT, RECIPES, Recipe

TINY = Recipe(name="tiny_traced", model={"n_layers": 3}, seed=9)
STEERED = SteeringParams(
    interventions=(
        Intervention(concept_ids=(3, 4), weights=(1.0, 2.0), strength=6.0, schedule="hard_cutoff", cutoff_tokens=7),
    ),
    suppress=(Suppression(concept_id=1, strength=3.0),),
)
TRACE = Trace(
    prompt_token_ids=[3, 4],
    max_tokens=4,
    commits=[TracedCommit(3, 7, 0, 1.5), TracedCommit(2, 8, 0), TracedCommit(5, 9, 1)],
    steering=dataclasses.replace(STEERED, overrides=(WeightOverride(concept_id=2, weight=0.5),)),
    cfg_scale=1.5,
    stop_token_ids=[11],
    ignore_eos=True,
)


def request(length, max_tokens, *, recipe=TINY, steering=None, **sampling):
    return GenerateRequest(
        prompt_token_ids=recipe.plain_ids(length),
        max_tokens=max_tokens,
        sampling=SamplingParams(**{"temperature": 0.0, **sampling}),
        steering=steering,
    )


def traced(engine, asked):
    (output,) = engine.generate([asked])
    return trace_of(asked, output), output


def test_a_trace_holds_the_generation_s_commits_in_order(make_engine):
    asked = request(5, 30, tokens_per_step=3, steering=STEERED, stop_token_ids=(9,), ignore_eos=True)
    trace, output = traced(make_engine(TINY), asked)
    assert (trace.prompt_token_ids, trace.max_tokens) == (asked.prompt_token_ids, 30)
    assert (trace.steering, trace.cfg_scale, trace.stop_token_ids, trace.ignore_eos) == (STEERED, 0.0, (9,), True)
    assert [(c.position, c.token_id, c.target_logit) for c in trace.commits] == [
        (c.position, c.token_id, c.target_logit) for c in output.commits
    ]
    steps = list(trace.steps())
    assert [commit.denoising_step for step in steps for commit in step] == [c.denoising_step for c in trace.commits]
    assert len(steps) == output.num_denoising_steps
    assert [len(step) for step in steps[:4]] == [3, 3, 3, 2], "the first canvas has eleven positions"


def test_steps_count_on_over_blocks(make_engine):
    """A block that one step fills, then another: they would be one step if numbers began anew."""
    trace, _ = traced(make_engine(TINY), request(0, 48, tokens_per_step=16))
    assert [c.denoising_step for c in trace.commits] == [0] * 16 + [1] * 16 + [2] * 16


def test_gaps_in_the_numbers_of_steps_are_closed(make_engine):
    asked = request(5, 6)
    _, output = traced(make_engine(TINY), asked)
    gapped = dataclasses.replace(
        output, commits=tuple(dataclasses.replace(c, denoising_step=3 * c.denoising_step + 2) for c in output.commits)
    )
    assert trace_of(asked, gapped) == trace_of(asked, output)


def test_preemption_leaves_the_trace_as_it_was(make_engine):
    asked = request(5, 40, tokens_per_step=2)
    alone, _ = traced(make_engine(TINY), asked)
    engine = make_engine(TINY)
    request_id, events = engine.add_request(asked), []
    for index in range(40):
        if index in (4, 11):
            assert engine.preempt(request_id)
        events += engine.step()
    while engine.has_work:
        events += engine.step()
    output = events[-1].output
    assert output.num_preemptions == 2
    assert trace_of(asked, output) == alone


def test_an_aborted_generation_has_a_trace_of_what_it_handed_out(make_engine):
    engine, asked = make_engine(TINY), request(5, 30)
    request_id, events = engine.add_request(asked), []
    for _ in range(6):
        events += engine.step()
    engine.abort(request_id)
    events += engine.step()
    output = events[-1].output
    assert output.finish_reason is FinishReason.ABORT
    trace = trace_of(asked, output)
    assert 0 < len(trace.commits) < 30
    replay = make_engine(TINY).analyze(ReplayTrace(trace=trace))
    assert replay.largest_difference < 1e-4


def test_an_output_of_another_request_is_refused(make_engine):
    _, output = traced(make_engine(TINY), request(5, 6))
    with pytest.raises(InvalidValue, match="prompt of 5 tokens and the request's has 4"):
        trace_of(request(4, 6), output)


def test_a_trace_survives_json_and_pickling():
    assert Trace.from_dict(json.loads(json.dumps(TRACE.to_dict()))) == TRACE
    assert pickle.loads(pickle.dumps(TRACE)) == TRACE
    plain = dataclasses.replace(TRACE, steering=None)
    assert Trace.from_dict(json.loads(json.dumps(plain.to_dict()))) == plain


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "version is 2; this engine reads version 1"),
        ({"seed": 1}, "trace has keys that it cannot have: seed"),
        ({"max_tokens": "4"}, "max_tokens is '4'"),
        ({"commits": {}}, "trace.commits is {}; it must be a list"),
        ({"commits": [{"position": 2, "token_id": 1}]}, r"trace.commits\[0\] lacks denoising_step"),
        ({"commits": [3]}, r"trace.commits\[0\] is 3; it must be an object"),
        ({"commits": [{"position": 2, "token_id": 1, "denoising_step": 0, "order": 1}]}, "cannot have: order"),
        ({"steering": {"interventions": [{"strength": 1.0}]}}, r"interventions\[0\] lacks concept_ids"),
        ({"steering": {"suppress": [{"concept_id": 1, "strength": -1}]}}, "strength is -1"),
        ({"steering": []}, r"trace.steering is \[\]; it must be an object"),
    ],
)
def test_what_is_no_trace_is_refused(change, words):
    with pytest.raises(InvalidValue, match=words):
        Trace.from_dict({**TRACE.to_dict(), **change})
    with pytest.raises(InvalidValue, match="trace is None"):
        Trace.from_dict(None)


def test_a_missing_key_is_named():
    raw = TRACE.to_dict()
    del raw["prompt_token_ids"]
    with pytest.raises(InvalidValue, match="trace lacks prompt_token_ids"):
        Trace.from_dict(raw)


@pytest.mark.parametrize(
    ("commits", "words"),
    [
        ([TracedCommit(2, 7, 1)], "denoising_step is 1; it must be 0"),
        ([TracedCommit(2, 7, 0), TracedCommit(3, 7, 2)], "denoising_step is 2; it must be 0 or 1"),
        ([TracedCommit(2, 7, 0), TracedCommit(3, 7, 1), TracedCommit(4, 7, 0)], "denoising_step is 0; it must be 1 or"),
        ([TracedCommit(2, 7, 0), TracedCommit(2, 7, 1)], "position 2 is committed twice"),
        ([TracedCommit(1, 7, 0)], r"position is 1; it must be a generated one, in \[2, 6\)"),
        ([TracedCommit(6, 7, 0)], "position is 6"),
        ([TracedCommit(2, -1, 0)], "token_id is -1"),
        ([TracedCommit(2, 7, 0, float("nan"))], "target_logit is nan"),
        ([TracedCommit(True, 7, 0)], "position is True"),
    ],
)
def test_commits_that_make_no_sense_are_refused(commits, words):
    with pytest.raises(InvalidValue, match=words) as caught:
        dataclasses.replace(TRACE, commits=commits)
    assert caught.value.param.startswith("trace.commits[")


@pytest.mark.parametrize("recipe", [*RECIPES, EOT], ids=lambda recipe: recipe.name)
def test_a_replay_finds_what_the_engine_recorded(make_engine, recipe):
    """On every switch of the configuration, also where tokens are chosen from concept features."""
    engine = make_engine(recipe)
    for asked in (
        request(recipe.block - 1, recipe.block + 3, recipe=recipe, tokens_per_step=2, repetition_penalty=1.0),
        request(recipe.block, 9, recipe=recipe, steering=STEERED, temperature=1.0, seed=1),
    ):
        trace, output = traced(engine, asked)
        replay = engine.analyze(ReplayTrace(trace=trace))
        assert replay.largest_difference < 2e-4
        for ours, commit in zip(replay.commits, output.commits, strict=True):
            assert (ours.position, ours.token_id) == (commit.position, commit.token_id)
            assert ours.logprob == pytest.approx(commit.logprob, abs=2e-4)
            assert ours.recorded_logit == commit.target_logit
        if asked.steering is None:
            assert all(ours.rank == 0 for ours in replay.commits), "greedy, and nothing changed the logits"
        else:
            assert max(ours.rank for ours in replay.commits) > 0


def test_another_model_s_trace_is_seen_to_be_one(make_engine):
    trace, _ = traced(make_engine(TINY), request(20, 20, repetition_penalty=1.0))
    other = make_engine(dataclasses.replace(TINY, name="tiny_other", seed=10))
    replay = other.analyze(ReplayTrace(trace=trace))
    assert replay.largest_difference > 0.1
    assert sum(commit.rank > 0 for commit in replay.commits) > 10


def test_a_trace_without_logits_is_replayed_without_comparing(make_engine):
    engine = make_engine(TINY)
    trace, _ = traced(engine, request(5, 6))
    bare = dataclasses.replace(trace, commits=[dataclasses.replace(c, target_logit=None) for c in trace.commits])
    replay = engine.analyze(ReplayTrace(trace=bare))
    assert replay.largest_difference is None
    assert [c.target_logit for c in replay.commits] == [
        c.target_logit for c in engine.analyze(ReplayTrace(trace=trace)).commits
    ]


def test_nothing_committed_is_nothing_replayed(make_engine):
    empty = Trace(prompt_token_ids=[3], max_tokens=4, commits=[])
    assert make_engine(TINY).analyze(ReplayTrace(trace=empty)).commits == ()


def test_a_replay_in_bfloat16_is_near(checkpoint):
    """Weights of another dtype, whose logits differ by rounding alone."""
    exact = Engine.from_checkpoint(checkpoint(TINY), EngineConfig(device="cpu", dtype="float32", num_pages=32))
    trace, _ = traced(exact, request(20, 20))
    rounded = Engine.from_checkpoint(checkpoint(TINY), EngineConfig(device="cpu", dtype="bfloat16", num_pages=32))
    assert rounded.runner.dtype == torch.bfloat16
    difference = rounded.analyze(ReplayTrace(trace=trace)).largest_difference
    assert 0 < difference < 1.0
