"""The engine's behaviour at its door: events, attribution, log-probabilities, failures, refusals."""

import pickle
from dataclasses import astuple, replace
from typing import get_args

import numpy as np
import pytest
import torch

from engine import (
    AttributionParams,
    BlockFinished,
    BlockStarted,
    Committed,
    ConceptNotFound,
    Engine,
    EngineConfig,
    Finished,
    FinishReason,
    GenerateRequest,
    Intervention,
    InvalidConfig,
    InvalidRequest,
    InvalidValue,
    NullRecorder,
    Policy,
    PromptTooLong,
    QueueFull,
    RequestTooLarge,
    SamplingParams,
    Started,
    SteeringParams,
    Suppression,
    Unsupported,
)
from tests.checkpoints import DEFAULT_MODEL, EOT, NO_DISCOVERED, STEERLING_LIKE, Recipe, save_tensors
from tests.parity_cases import uniform
from tests.reference import generate

BLOCK = EOT.block


def request(
    num_prompt=BLOCK + 3, max_tokens=30, recipe=EOT, *, prompt=None, steering=None, attribution=None, **sampling
):
    values = {"temperature": 0.0, "repetition_penalty": 1.0, "ignore_eos": True, **sampling}
    return GenerateRequest(
        prompt_token_ids=recipe.plain_ids(num_prompt) if prompt is None else prompt,
        max_tokens=max_tokens,
        sampling=SamplingParams(**values),
        steering=steering,
        attribution=attribution,
    )


def drain(engine):
    events = []
    while engine.has_work:
        events += engine.step()
    return events


class TestEvents:
    def test_come_in_order_and_cover_every_position_once(self, make_engine):
        engine = make_engine(EOT)
        asked = request(BLOCK + 3, 30, attribution=AttributionParams())
        engine.add_request(asked)
        events = drain(engine)
        assert isinstance(events[0], Started) and isinstance(events[-1], Finished)
        assert (events[0].block_size, events[0].num_prompt_tokens, events[0].prompt_tail) == (BLOCK, BLOCK + 3, 3)
        blocks = [e for e in events if isinstance(e, BlockStarted)]
        assert [(e.block, e.start, e.end) for e in blocks] == [(1, 19, 32), (2, 32, 48), (3, 48, 49)]
        for block in blocks:
            own = [e for e in events if getattr(e, "block", None) == block.block]
            assert isinstance(own[0], BlockStarted) and isinstance(own[-1], BlockFinished)
            assert all(isinstance(e, Committed) for e in own[1:-1])
            positions = [c.position for e in own[1:-1] for c in e.commits]
            assert sorted(positions) == list(range(block.start, block.end))

    def test_without_attribution_each_pass_hands_out_its_commits_at_once(self, make_engine):
        engine = make_engine(EOT, explain_interval_s=1000.0)
        engine.add_request(request(BLOCK, BLOCK, tokens_per_step=4))
        commits = [sum(len(e.commits) for e in engine.step() if isinstance(e, Committed)) for _ in range(4)]
        assert commits == [4, 4, 4, 4]

    @pytest.mark.parametrize("interval", [0.0, 1000.0])
    def test_commits_are_explained_when_due_or_when_their_block_ends(self, checkpoint, interval):
        now = iter(range(10_000))
        config = EngineConfig(device="cpu", num_pages=32, explain_interval_s=interval)
        model = Engine.from_checkpoint(checkpoint(EOT), config).runner.model
        engine = Engine(model, config, clock=lambda: float(next(now)))
        engine.add_request(request(BLOCK, 2 * BLOCK, attribution=AttributionParams()))
        sizes = [sum(len(e.commits) for e in engine.step() if isinstance(e, Committed)) for _ in range(2 * BLOCK)]
        if interval:
            assert sizes == [*[0] * (BLOCK - 1), BLOCK] * 2
        else:
            assert sizes == [1] * 2 * BLOCK

    def test_how_many_are_explained_at_once_changes_nothing_in_them(self, make_engine, monkeypatch):
        asked = [request(attribution=AttributionParams(top_k=k), seed=0, tokens_per_step=BLOCK) for k in (None, 2)]
        whole = make_engine(EOT).generate(asked)
        monkeypatch.setattr("engine.runner.explaining._GRAPH_SIZES", (1, 3))
        for output, expected in zip(make_engine(EOT).generate(asked), whole, strict=True):
            for a, b in zip(output.commits, expected.commits, strict=True):
                assert (a.token_id, len(a.attribution.known)) == (b.token_id, len(b.attribution.known))
                assert a.attribution.epsilon == pytest.approx(b.attribution.epsilon, abs=1e-4)

    def test_when_commits_are_explained_changes_nothing_in_them(self, make_engine):
        asked = request(attribution=AttributionParams(), seed=0)
        outputs = [make_engine(EOT, explain_interval_s=s).generate([asked])[0] for s in (0.0, 1000.0)]
        first, second = ([astuple(c)[:3] for c in output.commits] for output in outputs)
        assert first == second
        for a, b in zip(outputs[0].commits, outputs[1].commits, strict=True):
            assert a.attribution.epsilon == pytest.approx(b.attribution.epsilon, abs=1e-4)
            assert {c.concept_id for c in a.attribution.known} == {c.concept_id for c in b.attribution.known}

    def test_generation_without_requests_returns_nothing(self, make_engine):
        engine = make_engine(EOT)
        assert engine.generate([]) == []
        assert engine.step() == [] and not engine.has_work


class TestAttribution:
    def test_is_not_computed_unless_asked_for(self, make_engine):
        (output,) = make_engine(EOT).generate([request()])
        assert all(c.attribution is None for c in output.commits)

    @pytest.mark.parametrize("top_k", [0, 2, None])
    def test_top_k_cuts_the_lists_and_never_the_totals(self, make_engine, top_k):
        engine = make_engine(EOT)
        whole, cut = engine.generate([request(attribution=AttributionParams(top_k=k)) for k in (None, top_k)])
        for a, b in zip(whole.commits, cut.commits, strict=True):
            most = len(a.attribution.known) if top_k is None else top_k
            assert [c.concept_id for c in b.attribution.known] == [c.concept_id for c in a.attribution.known][:most]
            assert len(b.attribution.discovered) == (len(a.attribution.discovered) if top_k is None else top_k)
            assert b.attribution.known_total == pytest.approx(a.attribution.known_total, abs=1e-4)
            assert b.attribution.known_total == pytest.approx(
                sum(c.contribution for c in a.attribution.known), abs=1e-4
            )

    @pytest.mark.parametrize("top_k", [2**31, 2**63 - 1, 2**63, 10**30])
    def test_top_k_of_any_size_returns_what_there_is(self, make_engine, top_k):
        """One request with 2**63 made `islice` raise in the engine's thread, and the engine was gone for everybody."""
        whole, cut = make_engine(EOT).generate([request(attribution=AttributionParams(top_k=k)) for k in (None, top_k)])
        for a, b in zip(whole.commits, cut.commits, strict=True):
            assert [c.concept_id for c in b.attribution.known] == [c.concept_id for c in a.attribution.known]
            assert [c.concept_id for c in b.attribution.discovered] == [c.concept_id for c in a.attribution.discovered]

    def test_parts_sum_to_the_target_logit_under_steering_and_penalty(self, make_engine):
        steering = SteeringParams(
            interventions=(Intervention(concept_ids=(3,), strength=6.0),),
            suppress=(Suppression(concept_id=1, strength=2.0),),
        )
        asked = request(steering=steering, repetition_penalty=1.4, logit_bias={5: 3.0}, attribution=AttributionParams())
        (output,) = make_engine(EOT).generate([asked])
        for c in output.commits:
            parts = c.attribution.known_total + c.attribution.discovered_total + c.attribution.epsilon
            assert parts == pytest.approx(c.target_logit, abs=1e-4)

    def test_a_checkpoint_without_discovered_head_reports_none(self, make_engine):
        (output,) = make_engine(NO_DISCOVERED).generate(
            [request(recipe=NO_DISCOVERED, attribution=AttributionParams())]
        )
        assert all(c.attribution.discovered == () and c.attribution.discovered_total == 0 for c in output.commits)

    def test_weights_are_probabilities_and_ids_lie_in_their_head(self, make_engine):
        (output,) = make_engine(EOT).generate([request(attribution=AttributionParams())])
        for c in output.commits:
            for found, size in ((c.attribution.known, 50), (c.attribution.discovered, 70)):
                assert all(0 < item.weight < 1 and 0 <= item.concept_id < size for item in found)


def test_top_logprobs_are_the_raw_distribution_s_best(make_engine, oracle):
    engine = make_engine(EOT)
    counts = [0, 4, 20]
    asked = [request(num_logprobs=n, repetition_penalty=1.5, seed=0) for n in counts]
    outputs = engine.generate(asked)
    assert len({output.token_ids for output in outputs}) == 1
    model = oracle(EOT)
    ids = [*asked[0].prompt_token_ids, *[model.mask_id] * 30]
    first = outputs[2].commits[0]
    logprobs = model.forward(ids[: 2 * BLOCK]).logits_SV[first.position].log_softmax(dim=-1)
    best = logprobs.sort(descending=True)
    assert [token for token, _ in first.top_logprobs] == best.indices[:20].tolist()
    assert [value for _, value in first.top_logprobs] == pytest.approx(best.values[:20].tolist(), abs=1e-4)
    assert first.logprob == pytest.approx(float(logprobs[first.token_id]), abs=1e-4)
    for n, output in zip(counts, outputs, strict=True):
        assert all(len(c.top_logprobs) == n for c in output.commits)


def test_steering_is_reported_as_it_was_resolved(make_engine):
    steering = SteeringParams(
        interventions=(
            Intervention(concept_ids=(3,), strength=6.0),
            Intervention(concept_ids=(4, 5), weights=(1.0, -2.0), strength=3.0, unit="raw", layer=2),
        )
    )
    (output,) = make_engine(EOT).generate([request(steering=steering)])
    first, second = output.steering
    assert (first.concept_ids, first.weights, first.layer) == ((3,), (1.0,), DEFAULT_MODEL["n_layers"] // 2)
    assert first.alpha * first.peak == pytest.approx(6.0, abs=1e-5)
    assert (second.weights, second.alpha, second.layer) == ((1.0, -2.0), 3.0, 2)


def test_steering_moves_the_text_towards_its_concept_and_more_the_stronger_it_is(make_engine):
    """Steering once had no effect because what it added was taken out again as reconstruction error."""
    engine = make_engine(STEERLING_LIKE)
    favoured = {token for token, _ in engine.concept_top_tokens(9, 5)}

    def steered(strength):
        steering = SteeringParams(interventions=(Intervention(concept_ids=(9,), strength=strength, layer=2),))
        return request(70, 58, STEERLING_LIKE, steering=steering)

    outputs = engine.generate([steered(s) for s in (-10.0, 0.0, 10.0, 40.0)])
    share = [sum(t in favoured for t in output.token_ids) for output in outputs]
    assert share[0] <= share[1] < share[2] < share[3]


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    """A checkpoint whose token 7 embeds to NaN; no other token is affected."""
    recipe = Recipe(name="poisoned", model={"weight_sharing": False})
    folder = recipe.write(tmp_path_factory.mktemp("poisoned"))
    tensors = recipe.tensors()
    tensors["transformer.tok_emb.weight"][7] = float("nan")
    save_tensors(folder, tensors)
    return recipe, folder


class TestFailures:
    def engine(self, folder, **config):
        return Engine.from_checkpoint(folder, EngineConfig(device="cpu", **{"num_pages": 40, **config}))

    def clean(self, recipe):
        prompts = [[t for t in recipe.plain_ids(n, seed=n) if t != 7] for n in (3, 20, 40)]
        return [request(prompt=prompt, max_tokens=21, logit_bias={7: float("-inf")}, seed=0) for prompt in prompts]

    @pytest.mark.parametrize("where", [1, BLOCK + 1])
    def test_non_finite_logits_end_their_request_and_no_other(self, poisoned, where):
        """One bad request must not stop a batch, nor poison pages that others get after it."""
        recipe, folder = poisoned
        engine = self.engine(folder, num_pages=14)
        alone = [self.engine(folder).generate([asked])[0] for asked in self.clean(recipe)]
        prompt = recipe.plain_ids(BLOCK + 4)
        prompt[where] = 7
        for _ in range(3):
            clean = self.clean(recipe)
            bad, *outputs = engine.generate([request(prompt=prompt), *clean])
            assert (bad.finish_reason, bad.commits) == (FinishReason.ERROR, ())
            assert "finite" in bad.error
            for output, expected in zip(outputs, alone, strict=True):
                assert output.token_ids == expected.token_ids
                assert output.finish_reason is FinishReason.LENGTH
            engine.check_integrity()
        assert engine.stats().pages_held == 0

    @pytest.mark.parametrize("policy", get_args(Policy))
    def test_a_bias_that_leaves_no_token_ends_the_request_with_an_error(self, make_engine, policy):
        everything = dict.fromkeys(range(EOT.vocab_size), float("-inf"))
        bad, good = make_engine(EOT).generate([request(logit_bias=everything, policy=policy), request(seed=0)])
        assert bad.commits == ()
        assert bad.finish_reason is FinishReason.ERROR and bad.error
        assert good.token_ids == make_engine(EOT).generate([request(seed=0)])[0].token_ids

    def test_a_non_finite_logit_in_the_middle_keeps_the_commits_before_it(self, poisoned):
        """Token 7 is chosen at some point, and the next pass that reads it is not finite any more."""
        recipe, folder = poisoned
        asked = request(prompt=[t for t in recipe.plain_ids(30, seed=3) if t != 7], max_tokens=40, logit_bias={7: 4.0})
        (output,) = self.engine(folder).generate([replace(asked, attribution=AttributionParams())])
        assert output.finish_reason is FinishReason.ERROR
        assert output.commits[-1].token_id == 7
        assert all(c.attribution is not None for c in output.commits)

    @pytest.mark.parametrize(
        "sampling",
        [
            {"top_k": 2**70, "temperature": 1.0},
            {"choice_index": 2**63 - 1, "seed": 2**63 - 1, "temperature": 1.0},
            {"temperature": 5e-324},
            {"temperature": 1e30},
            {"top_p": np.float64(0.5), "temperature": np.float64(0.5)},
            {"logit_bias": {3: 1e30}, "temperature": 1e-6},
            {"logit_bias": dict.fromkeys(range(EOT.vocab_size), -1e30), "repetition_penalty": 1e6},
            {"entropy_sampling": True, "logit_bias": {3: 1e30, 4: -1e30}, "repetition_penalty": 1e-6},
            {"stop_token_ids": (EOT.special_ids["mask_token_id"], EOT.special_ids["eos_token_id"])},
            {"policy": "threshold", "threshold": 1e-6, "logit_bias": {3: 1e30}},
            {"policy": "factor", "factor": 1e30, "tokens_per_step": BLOCK},
            {"policy": "entropy_bound", "entropy_bound": np.float64(1e30), "logit_bias": {3: 1e30, 4: -1e30}},
            {"tokens_per_step": BLOCK, "min_tokens": 30, "stop_token_ids": tuple(range(60)), "ignore_eos": False},
        ],
        ids=str,
    )
    def test_extreme_values_end_nobody_s_request(self, make_engine, sampling):
        """Some overflowed a tensor when the request got its lane, some drew the mask token from NaN probabilities;
        either error came out of a pass, so it ended the engine for everyone."""
        extreme = request(**{"seed": 1, **sampling})
        steered = SteeringParams(
            interventions=(
                Intervention(concept_ids=(3,), strength=-1e30, schedule="hard_cutoff", cutoff_tokens=2**70),
                Intervention(concept_ids=(3, 3), weights=(1.0, -1.0), strength=1e30),
            ),
            suppress=(Suppression(concept_id=5, strength=1e30),),
        )
        ordinary = request(seed=0, temperature=0.9)
        first, _, last = make_engine(EOT).generate([extreme, replace(extreme, steering=steered), ordinary])
        assert first.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
        assert not {c.token_id for c in first.commits} & set(make_engine(EOT).model_config.banned_token_ids)
        assert last.token_ids == make_engine(EOT).generate([ordinary])[0].token_ids

    def test_a_concept_that_is_not_a_number_harms_only_who_steers_towards_it(self, tmp_path):
        """Its request's prompt pages would be NaN too, and shared before the first canvas shows it."""
        recipe = Recipe(name="nan_concept")
        folder = recipe.write(tmp_path)
        tensors = recipe.tensors()
        tensors["known_head.concept_embedding.weight"][3] = float("nan")
        save_tensors(folder, tensors)
        engine = self.engine(folder, max_rows=2)
        steering = SteeringParams(interventions=(Intervention(concept_ids=(3,), strength=1.0),))
        asked = request(4 * BLOCK, 8, recipe, seed=0)
        bad, good = engine.generate([replace(asked, steering=steering), asked])
        assert (bad.finish_reason, good.finish_reason) == (FinishReason.ERROR, FinishReason.LENGTH)
        assert good.token_ids == self.engine(folder).generate([asked])[0].token_ids

    def test_a_recorder_that_raises_is_told_of_once_and_costs_no_request(self, checkpoint, caplog):
        """It ended the engine's thread; in an abort, it left a request that never ended."""

        class Broken(NullRecorder):
            def count(self, name, amount=1.0, **labels):
                raise RuntimeError("the metrics are down")

        engine = Engine.from_checkpoint(checkpoint(EOT), EngineConfig(device="cpu", num_pages=40), recorder=Broken())
        engine.abort(engine.add_request(request()))
        assert [event.output.finish_reason for event in drain(engine)] == [FinishReason.ABORT]
        assert len(engine.generate([request()])[0].token_ids) == 30
        assert sum("metrics are down" in (record.exc_text or "") for record in caplog.records) == 1

    def test_the_gauges_of_an_idle_engine_say_that_nothing_is_in_use(self, checkpoint):
        """They told of the state before the last pass had ended its requests, for as long as no other came."""
        gauges: dict[str, float] = {}
        seen: set[float] = set()

        class Kept(NullRecorder):
            def gauge(self, name, value, **labels):
                gauges[name] = value
                if name == "lanes_in_use":
                    seen.add(value)

        engine = Engine.from_checkpoint(checkpoint(EOT), EngineConfig(device="cpu", num_pages=40), recorder=Kept())
        engine.generate([request(), request()])
        assert (gauges["lanes_in_use"], gauges["pages_held"], gauges["requests_waiting"]) == (0, 0, 0)
        assert 2 in seen
        request_id = engine.add_request(request())
        engine.step()
        assert gauges["lanes_in_use"] == 1
        engine.abort(request_id)
        drain(engine)
        assert (gauges["lanes_in_use"], gauges["pages_held"]) == (0, 0)

    def test_memory_that_does_not_suffice_is_an_error_of_the_configuration(self, checkpoint):
        """torch's own error names neither field. The pages asked for are more than an address space holds."""
        recipe = Recipe(name="wide_pages", model={"n_layers": 8, "n_embd": 128, "n_kv_heads": None})
        with pytest.raises(InvalidConfig, match=r"32 lanes, 2147483648 pages .*lower max_lanes, num_pages"):
            self.engine(checkpoint(recipe), num_pages=2**31)


class TestGenerate:
    """What a list leaves behind when it is not served to its end."""

    def assert_is_clean(self, engine):
        engine.check_integrity()
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.pages_held) == (0, 0, 0)
        assert not engine.has_work and engine.step() == []

    @pytest.mark.parametrize("num_passes", [1, 4, 20])
    @pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
    def test_an_interrupt_or_a_failing_pass_leaves_a_clean_engine(self, make_engine, num_passes, error):
        """The requests of an interrupted cell went on in the next one's passes, and their ids were in use."""
        engine = make_engine(EOT, max_lanes=2, explain_interval_s=1000.0)
        asked = [replace(request(attribution=AttributionParams(), seed=n), request_id=f"r{n}") for n in range(3)]
        launch, passes = engine.runner.launch, iter(range(num_passes))

        def failing(*arguments):
            if next(passes, None) is None:
                raise error
            return launch(*arguments)

        engine.runner.launch = failing
        with pytest.raises(error):
            engine.generate(asked)
        engine.runner.launch = launch
        self.assert_is_clean(engine)
        again, expected = engine.generate(asked), make_engine(EOT).generate(asked)
        assert [output.token_ids for output in again] == [output.token_ids for output in expected]

    def test_a_refused_request_leaves_the_ids_of_the_others_free(self, make_engine):
        """Those before it were aborted, and kept their ids until somebody made a step."""
        engine = make_engine(EOT)
        named = replace(request(), request_id="mine")
        for bad in (request(prompt=[97]), named, None):
            with pytest.raises(InvalidValue):
                engine.generate([named, bad])
            self.assert_is_clean(engine)
        assert engine.generate([named])[0].request_id == "mine"

    def test_other_requests_of_the_engine_outlive_a_list_that_is_refused(self, make_engine):
        engine = make_engine(EOT)
        other = engine.add_request(request())
        engine.abort(engine.add_request(request()))
        with pytest.raises(InvalidValue):
            engine.generate([request(), request(prompt=[97])])
        ended = {event.request_id: event.output.finish_reason for event in drain(engine) if isinstance(event, Finished)}
        assert len(ended) == 2 and ended[other] is FinishReason.LENGTH

    def test_a_list_longer_than_the_queue_is_served_all_the_same(self, make_engine):
        """It was refused, and the advice to try again later is none for somebody who waits for a list."""
        asked = [request(max_tokens=n % 3 + 1, seed=n) for n in range(9)]
        outputs = make_engine(EOT, max_lanes=2, max_waiting=2).generate(asked)
        assert outputs[5].token_ids == make_engine(EOT).generate([asked[5]])[0].token_ids
        assert [len(output.token_ids) for output in outputs] == [1, 2, 3] * 3

    def test_an_id_that_is_in_a_list_twice_is_refused_even_if_the_first_would_have_ended(self, make_engine):
        engine = make_engine(EOT, max_lanes=1, max_waiting=1)
        asked = [replace(request(max_tokens=1), request_id=name) for name in ("a", "b", "c", "a")]
        with pytest.raises(InvalidValue, match="'a' is in the list twice"):
            engine.generate(asked)
        self.assert_is_clean(engine)

    def test_other_requests_that_end_first_are_not_taken_for_those_of_the_list(self, make_engine):
        """Their outputs were counted, and the list ended with a KeyError."""
        engine = make_engine(EOT)
        for _ in range(2):
            engine.add_request(request(max_tokens=2))
        outputs = engine.generate([request(max_tokens=n) for n in (9, 5)])
        assert [len(output.token_ids) for output in outputs] == [9, 5]
        assert engine.generate([]) == []

    def test_a_prompt_may_leave_one_position_and_an_answer_may_take_all(self, make_engine):
        engine = make_engine(EOT)
        last, whole = engine.generate([request(LARGE - 1, 1), request(0, LARGE, tokens_per_step=BLOCK)])
        assert [c.position for c in last.commits] == [LARGE - 1]
        assert len(whole.token_ids) == LARGE and whole.num_denoising_steps == LARGE // BLOCK


LARGE = EOT.model_config.block_size


class TestRefusals:
    @pytest.mark.parametrize(
        ("asked", "kind", "param", "parts"),
        [
            (request(LARGE - 9, 10), PromptTooLong, "max_tokens", [str(LARGE - 9), "10", str(LARGE)]),
            (request(prompt=[0] * LARGE, max_tokens=1), PromptTooLong, "prompt_token_ids", [str(LARGE)]),
            (request(400, 20), RequestTooLarge, "max_tokens", ["27", "25", "num_pages"]),
            (request(prompt=[1, EOT.special_ids["mask_token_id"]]), InvalidValue, "prompt_token_ids", ["[1]", "mask"]),
            (request(prompt=[1, 97]), InvalidValue, "prompt_token_ids", ["[1]", "97"]),
            (request(prompt=[-1]), InvalidValue, "prompt_token_ids", ["-1"]),
            (request(prompt=[True]), InvalidValue, "prompt_token_ids", ["True"]),
            (request(prompt=["a"]), InvalidValue, "prompt_token_ids", ["'a'"]),
            (request(prompt=[np.int64(1)]), InvalidValue, "prompt_token_ids", ["np.int64(1)", "an int"]),
            (None, InvalidValue, None, ["None", "GenerateRequest"]),
            (request(logit_bias={97: 1.0}), InvalidValue, "sampling.logit_bias", ["97"]),
            (request(stop_token_ids=(97,)), InvalidValue, "sampling.stop_token_ids", ["97"]),
            (request(min_tokens=31), InvalidValue, "sampling.min_tokens", ["31", "30"]),
            (request(tokens_per_step=17), InvalidValue, "sampling.tokens_per_step", ["17", "16"]),
            (
                request(steering=SteeringParams(interventions=(Intervention(concept_ids=(3, 50), strength=1.0),))),
                ConceptNotFound,
                "steering.interventions[0].concept_ids",
                ["50"],
            ),
            (
                request(
                    steering=SteeringParams(interventions=(Intervention(concept_ids=(3,), strength=1.0, layer=3),))
                ),
                InvalidValue,
                "steering.interventions[0].layer",
                ["3", "2 layers"],
            ),
            (
                request(steering=SteeringParams(suppress=(Suppression(concept_id=50, strength=1.0),))),
                ConceptNotFound,
                "steering.suppress[0].concept_id",
                ["50"],
            ),
        ],
        ids=lambda value: value if isinstance(value, str) else None,
    )
    def test_name_the_field_the_value_and_the_limit(self, make_engine, asked, kind, param, parts):
        engine = make_engine(EOT, num_pages=25)
        with pytest.raises(InvalidRequest) as caught:
            engine.add_request(asked)
        assert (type(caught.value), caught.value.param) == (kind, param)
        assert all(part in str(caught.value) for part in parts), str(caught.value)
        assert not engine.has_work

    def test_begin_just_past_the_limit(self, make_engine):
        """The same requests, one smaller, are served."""
        engine = make_engine(EOT, num_pages=LARGE // BLOCK)
        outputs = engine.generate(
            [
                request(LARGE - 10, 10),
                request(min_tokens=30),
                request(tokens_per_step=16),
                request(stop_token_ids=(96,)),
                request(
                    steering=SteeringParams(interventions=(Intervention(concept_ids=(49,), strength=1.0, layer=2),))
                ),
            ]
        )
        assert all(len(output.token_ids) in (10, 30) for output in outputs)

    def test_one_bad_request_in_a_list_starts_none(self, make_engine):
        engine = make_engine(EOT)
        with pytest.raises(InvalidValue):
            engine.generate([request(), request(prompt=[97])])
        drain(engine)
        assert engine.stats().pages_held == 0 and engine.stats().num_running == 0

    def test_a_request_that_just_fits_the_pool_runs_and_one_page_more_never_could(self, make_engine):
        engine = make_engine(EOT, num_pages=4)
        (output,) = engine.generate([request(2 * BLOCK, 2 * BLOCK)])
        assert len(output.token_ids) == 2 * BLOCK
        with pytest.raises(RequestTooLarge, match=r"needs 5 pages .* has 4"):
            engine.add_request(request(2 * BLOCK, 2 * BLOCK + 1))

    def test_an_id_in_use_is_refused_and_free_again_when_its_request_has_ended(self, make_engine):
        engine = make_engine(EOT)
        named = replace(request(), request_id="mine")
        engine.add_request(named)
        with pytest.raises(InvalidValue, match="'mine' belongs to a request that has not ended") as caught:
            engine.add_request(named)
        assert caught.value.param == "request_id"
        drain(engine)
        assert engine.generate([named])[0].request_id == "mine"

    def test_a_full_queue_is_told_and_changes_nothing(self, make_engine):
        engine = make_engine(EOT, max_waiting=2, max_lanes=1)
        for _ in range(2):
            engine.add_request(request(max_tokens=4))
        with pytest.raises(QueueFull, match=r"2 .*max_waiting"):
            engine.add_request(request())
        engine.step()
        engine.add_request(request(max_tokens=4))
        outputs = [event.output for event in drain(engine) if isinstance(event, Finished)]
        assert [len(output.token_ids) for output in outputs] == [4, 4, 4]


def test_a_smaller_priority_value_is_served_first(make_engine):
    engine = make_engine(EOT, max_lanes=1)
    ids = [engine.add_request(replace(request(max_tokens=4), priority=p)) for p in (5, 0, -1)]
    order = [event.request_id for event in drain(engine) if isinstance(event, Finished)]
    assert order == [ids[2], ids[1], ids[0]]


def test_the_tokens_a_concept_promotes_are_told_for_both_heads(make_engine, oracle):
    engine = make_engine(STEERLING_LIKE)
    theirs = oracle(STEERLING_LIKE).generator.concept_top_tokens(7, k=5)
    assert [token for token, _ in engine.concept_top_tokens(7, 5)] == [int(text) for text, _ in theirs]
    assert len(engine.concept_top_tokens(69, 5, head="discovered")) == 5
    with pytest.raises(Unsupported, match="no discovered head"):
        make_engine(NO_DISCOVERED).concept_top_tokens(0, head="discovered")


def test_the_concepts_near_one_are_told_for_both_heads(make_engine):
    engine = make_engine(STEERLING_LIKE)
    for head in ("known", "discovered"):
        near = engine.concept_neighbors(3, 4, head=head)
        (back,) = [cosine for other, cosine in engine.concept_neighbors(near[0][0], 69, head=head) if other == 3]
        assert len(near) == 4 and back == pytest.approx(near[0][1])
    with pytest.raises(Unsupported, match="no discovered head"):
        make_engine(NO_DISCOVERED).concept_neighbors(0, head="discovered")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"concept_id": 70, "head": "discovered"}, "70"),
        ({"concept_id": -1}, "-1"),
        ({"concept_id": True}, "True"),
        ({"concept_id": "3"}, "'3'"),
        ({"concept_id": 3, "k": -1}, "k is -1"),
        ({"concept_id": 3, "head": "unknown"}, "head is 'unknown'"),
    ],
    ids=str,
)
def test_a_concept_or_head_that_is_not_there_is_refused_by_name(make_engine, values, message):
    engine = make_engine(STEERLING_LIKE)
    for ask in (engine.concept_top_tokens, engine.concept_neighbors):
        with pytest.raises(InvalidRequest, match=message):
            ask(**values)


def test_a_prompt_is_left_as_it_is(make_engine, oracle):
    """Special tokens other than the mask are ordinary prompt tokens, end tokens included."""
    special = [v for k, v in EOT.special_ids.items() if k != "mask_token_id"]
    asked = request(prompt=EOT.plain_ids(BLOCK - 3) + special, ignore_eos=False, seed=2, temperature=0.9)
    (output,) = make_engine(EOT).generate([asked])
    expected = generate(oracle(EOT), asked, uniform)
    assert output.token_ids == expected.token_ids and len(output.token_ids) > 0
    assert min(c.position for c in output.commits) == len(asked.prompt_token_ids)


def test_stats_count_what_is_in_use(make_engine):
    engine = make_engine(EOT, num_pages=20, max_lanes=2)
    for _ in range(3):
        engine.add_request(request(BLOCK, 2 * BLOCK))
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_lanes, stats.num_pages) == (2, 1, 2, 20)
    assert stats.pages_held + stats.pages_free + stats.pages_cached == 20 and stats.pages_held > 0
    drain(engine)
    assert (engine.stats().num_running, engine.stats().pages_held) == (0, 0)


def test_what_comes_out_survives_pickling(make_engine):
    engine = make_engine(EOT)
    steering = SteeringParams(interventions=(Intervention(concept_ids=(3,), strength=6.0),))
    asked = request(steering=steering, attribution=AttributionParams(), num_logprobs=2)
    assert pickle.loads(pickle.dumps(asked)) == asked
    engine.add_request(replace(asked, request_id="\u00fc \U0001f600\n"))
    events = drain(engine)
    assert pickle.loads(pickle.dumps(events)) == events
    assert pickle.loads(pickle.dumps(engine.stats())) == engine.stats()
    assert pickle.loads(pickle.dumps(engine.config)) == engine.config
    assert pickle.loads(pickle.dumps(engine.model_config)) == engine.model_config


def test_runs_leave_no_gradients_behind(make_engine):
    engine = make_engine(EOT)
    engine.generate([request(attribution=AttributionParams())])
    assert not any(parameter.requires_grad for parameter in engine.runner.model.parameters())
    assert torch.is_grad_enabled()
