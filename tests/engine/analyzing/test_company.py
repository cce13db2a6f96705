"""Analyses beside generation and beside each other: nobody's result depends on company, and every page comes back."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

import pytest
import torch

from engine import (
    Analysis,
    AnalysisResult,
    AsyncEngine,
    Embedding,
    EmbedTokens,
    Engine,
    EngineConfig,
    EngineStopped,
    EstimateLikelihood,
    Finished,
    GenerateRequest,
    Inspection,
    InspectTokens,
    Likelihood,
    NonFiniteLogits,
    Output,
    SamplingParams,
    Scores,
    ScoreTokens,
)
from tests.checkpoints import EOT

TOLERANCE = 2e-5


def requests() -> list[GenerateRequest]:
    """Prompts that share prefixes with the analyses, and some that do not."""
    return [
        GenerateRequest(
            prompt_token_ids=EOT.plain_ids(length, seed=seed),
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=temperature, seed=seed, ignore_eos=True),
        )
        for length, seed, max_tokens, temperature in (
            (37, 0, 40, 0.0),
            (0, 1, 25, 1.0),
            (33, 0, 20, 0.8),
            (16, 2, 50, 0.0),
            (64, 0, 5, 0.0),
        )
    ]


def analyses() -> list[Analysis]:
    text = tuple(EOT.plain_ids(50))
    return [
        ScoreTokens(token_ids=text[:45], num_logprobs=2),
        EmbedTokens(token_ids=text),
        EstimateLikelihood(
            prompt_token_ids=text[:35], continuation_token_ids=text[35:], num_samples=5, batch_size=2, cfg_scale=1.0
        ),
        InspectTokens(token_ids=text[:40], top_k=3),
        ScoreTokens(token_ids=tuple(EOT.plain_ids(20, seed=7))),
        EmbedTokens(token_ids=text[:17], pooling="last", kind="known"),
    ]


def numbers(result: AnalysisResult) -> list[float]:
    """All numbers of a result, ids included."""
    match result:
        case Scores():
            tops = [number for top in result.top_logprobs for pair in top for number in pair]
            return [0.0 if value is None else value for value in result.logprobs] + tops
        case Likelihood():
            return [result.log_likelihood, result.standard_error]
        case Embedding():
            return list(result.vector)
        case Inspection():
            found = [c for token in result.tokens for c in (*token.known, *token.discovered)]
            return [number for c in found for number in (c.concept_id, c.weight, c.contribution)]
    raise AssertionError(f"{result} is no result")


def tokens(outputs: list[Output]) -> list[tuple[tuple[int, int], ...]]:
    return [tuple((commit.position, commit.token_id) for commit in output.commits) for output in outputs]


@pytest.fixture(scope="module")
def alone(checkpoint):
    """Each request and each analysis in an engine of its own."""

    def engine() -> Engine:
        return Engine.from_checkpoint(checkpoint(EOT), EngineConfig(device="cpu", dtype="float32", num_pages=64))

    outputs = [engine().generate([request])[0] for request in requests()]
    return outputs, [numbers(engine().analyze(analysis)) for analysis in analyses()]


CONFIGS = {
    "plenty": {},
    "two rows a pass": {"max_rows": 2, "max_lanes": 2},
    "too few pages for all": {"num_pages": 12},
    "results one pass late": {"async_scheduling": True},
    "late results, too few pages for all": {"async_scheduling": True, "num_pages": 12, "max_rows": 5},
    "nothing shared": {"share_prefixes": False, "num_pages": 16},
    "lockstep": {"batching": "lockstep", "num_pages": 14},
}


@pytest.mark.parametrize("config", CONFIGS)
def test_requests_and_analyses_side_by_side_give_what_they_give_alone(make_engine, alone, config):
    engine = make_engine(EOT, **CONFIGS[config])
    ids: list[str] = []
    futures: list[Future[AnalysisResult]] = []
    outputs: dict[str, Output] = {}
    for step in range(3000):
        if step < 2 * len(requests()) and step % 2 == 0:
            ids.append(engine.add_request(requests()[step // 2]))
        if step < len(analyses()):
            futures.append(engine.begin_analysis(analyses()[step]))
        outputs |= {event.request_id: event.output for event in engine.step() if isinstance(event, Finished)}
        engine.check_integrity()
        if step > 20 and not engine.has_work:
            break
    assert tokens([outputs[id_] for id_ in ids]) == tokens(alone[0])
    for future, expected in zip(futures, alone[1], strict=True):
        assert numbers(future.result(timeout=0)) == pytest.approx(expected, abs=TOLERANCE, rel=1e-5)
    assert engine.stats().pages_held == 0


def test_many_analyses_that_want_all_pages_end_one_after_the_other(make_engine):
    engine = make_engine(EOT, num_pages=4)
    futures = [engine.begin_analysis(ScoreTokens(token_ids=EOT.plain_ids(60, seed=i))) for i in range(5)]
    for _ in range(2000):
        engine.step()
        engine.check_integrity()
        if not engine.has_work:
            break
    assert all(len(future.result(timeout=0).logprobs) == 60 for future in futures)


def test_a_request_held_up_by_analyses_runs_though_more_of_them_keep_coming(make_engine):
    engine = make_engine(EOT, num_pages=5)
    futures = [engine.begin_analysis(ScoreTokens(token_ids=EOT.plain_ids(30, seed=i))) for i in range(2)]
    engine.step()
    asked = GenerateRequest(prompt_token_ids=EOT.plain_ids(60, seed=9), max_tokens=10)
    request_id = engine.add_request(asked)
    events, number = [], 2
    while not any(isinstance(event, Finished) for event in events):
        if sum(not future.done() for future in futures) < 2:
            futures.append(engine.begin_analysis(ScoreTokens(token_ids=EOT.plain_ids(30, seed=number))))
            number += 1
        events += engine.step()
        assert number < 400, "the request waits for ever"
    assert {event.request_id for event in events} == {request_id}
    while engine.has_work:
        engine.step()


LONG = [
    ScoreTokens(token_ids=EOT.plain_ids(500)),
    EmbedTokens(token_ids=EOT.plain_ids(500)),
    InspectTokens(token_ids=EOT.plain_ids(500), top_k=3),
    EstimateLikelihood(
        prompt_token_ids=EOT.plain_ids(300), continuation_token_ids=EOT.plain_ids(60, seed=1), cfg_scale=1.0
    ),
]


@pytest.mark.parametrize("num_slices", [0, 1, 3, 10])
@pytest.mark.parametrize("analysis", LONG, ids=lambda a: type(a).__name__)
def test_a_cancelled_analysis_gives_its_pages_back(make_engine, analysis, num_slices):
    engine = make_engine(EOT, max_rows=2, num_pages=60)
    future = engine.begin_analysis(analysis)
    for _ in range(num_slices):
        engine.step()
    assert (engine.stats().pages_held > 0) == (num_slices > 0)
    assert future.cancel()
    engine.step()
    assert not engine.has_work
    engine.check_integrity()
    assert engine.stats().pages_held == 0


def test_ending_all_analyses_gives_their_pages_back(make_engine):
    engine = make_engine(EOT, max_rows=2, num_pages=16)
    futures = [engine.begin_analysis(analysis) for analysis in analyses()]
    for _ in range(4):
        engine.step()
    assert engine.stats().pages_held > 0
    engine.end_analyses(EngineStopped("stopped"))
    assert engine.stats().pages_held == 0
    assert all(isinstance(future.exception(timeout=0), EngineStopped) for future in futures)


@pytest.mark.parametrize("analysis", analyses()[:4], ids=lambda a: type(a).__name__)
def test_numbers_that_are_not_finite_fail_the_analysis_and_leave_no_page_behind(make_engine, alone, analysis):
    """Offered to everybody, a broken block would fail each later text with that prefix."""
    engine = make_engine(EOT)
    index = analyses().index(analysis)
    weight = engine.runner.model.transformer.layers[0].mlp.up.weight
    sound = weight.clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    with pytest.raises(NonFiniteLogits, match="no finite numbers"):
        engine.analyze(analysis)
    with torch.no_grad():
        weight.copy_(sound)
    assert engine.stats().pages_free == engine.stats().num_pages
    assert numbers(engine.analyze(analysis)) == pytest.approx(alone[1][index], abs=TOLERANCE, rel=1e-5)


def test_an_analysis_whose_pass_fails_gives_its_pages_back(make_engine):
    engine = make_engine(EOT, max_rows=4)
    layers, calls = engine.runner.text_passes._backend.layers, []

    class Failing:
        def layers(self, *args):
            calls.append(args)
            if len(calls) == 3:
                raise RuntimeError("the device is out of memory")
            return layers(*args)

    engine.runner.text_passes._backend = Failing()
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.analyze(analyses()[0])
    engine.check_integrity()
    assert engine.stats().pages_held == 0
    assert len(calls) == 3


def test_many_tasks_ask_at_once_and_one_that_leaves_disturbs_nobody(make_engine, alone):
    engine = make_engine(EOT, num_pages=24)

    async def ask() -> list[AnalysisResult]:
        served = AsyncEngine(engine)
        try:
            leaving = asyncio.ensure_future(served.analyze(ScoreTokens(token_ids=EOT.plain_ids(300))))
            staying = [asyncio.ensure_future(served.analyze(analysis)) for analysis in analyses()]
            await asyncio.sleep(0)
            leaving.cancel()
            return await asyncio.gather(*staying)
        finally:
            served.stop()

    for result, expected in zip(asyncio.run(ask()), alone[1], strict=True):
        assert numbers(result) == pytest.approx(expected, abs=TOLERANCE, rel=1e-5)
    # What the one that left held comes back with its turn, or with the end of the engine.
    engine.check_integrity()
    assert engine.stats().pages_held == 0
