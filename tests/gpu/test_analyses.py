"""Analyses on a GPU against the same analyses on the CPU, and what they must not do there."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from engine import (
    Analysis,
    AnalysisResult,
    Embedding,
    EmbedTokens,
    Engine,
    EngineConfig,
    EstimateLikelihood,
    GenerateRequest,
    Inspection,
    InspectTokens,
    Likelihood,
    SamplingParams,
    Scores,
    ScoreTokens,
)

triton = pytest.importorskip("triton", reason="triton comes with torch's CUDA builds")
pytestmark = pytest.mark.gpu
DEMO = Path(__file__).resolve().parents[2] / "demo_model" / "steerling-demo"


def text(length: int, seed: int = 0) -> tuple[int, ...]:
    """Ids that are no special ones of the demo model, which are its last."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(10, 400, (length,), generator=generator).tolist())


def analyses() -> list[Analysis]:
    """Lengths around block edges; a sample of the likelihood takes more rows than some of the engines' passes have."""
    return [
        ScoreTokens(token_ids=text(64)),
        ScoreTokens(token_ids=text(150), num_logprobs=5),
        EmbedTokens(token_ids=text(150)),
        EmbedTokens(token_ids=text(150), kind="known", pooling="last"),
        EmbedTokens(token_ids=text(129), kind="discovered"),
        InspectTokens(token_ids=text(70), top_k=4),
        EstimateLikelihood(
            prompt_token_ids=text(70), continuation_token_ids=text(100, seed=1), num_samples=6, batch_size=3
        ),
        EstimateLikelihood(
            prompt_token_ids=text(70), continuation_token_ids=text(30, seed=1), num_samples=6, cfg_scale=1.0
        ),
    ]


def numbers(result: AnalysisResult) -> list[float]:
    """What is a measurement in a result; ids of nearly equal ones may swap."""
    match result:
        case Scores():
            tops = [value for top in result.top_logprobs for _, value in top]
            return [0.0 if value is None else value for value in result.logprobs] + tops
        case Likelihood():
            return [result.log_likelihood]
        case Embedding():
            return list(result.vector)
        case Inspection():
            return [c.weight for token in result.tokens for c in (*token.known, *token.discovered)]
    raise AssertionError(f"{result} is no result")


def make_engine(**config: object) -> Engine:
    values: dict[str, object] = {"device": "cuda", "dtype": "float32", "max_rows": 12, "num_pages": 200}
    return Engine.from_checkpoint(DEMO, EngineConfig(**{**values, **config}))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def on_cpu() -> list[list[float]]:
    engine = make_engine(device="cpu")
    return [numbers(engine.analyze(analysis)) for analysis in analyses()]


@pytest.mark.parametrize(
    "config", [{}, {"max_rows": 2}, {"use_graphs": False, "num_pages": 20}, {"share_prefixes": False}], ids=str
)
def test_analyses_on_the_gpu_give_what_they_give_on_the_cpu(
    on_cpu: list[list[float]], config: dict[str, object]
) -> None:
    engine = make_engine(**config)
    for analysis, expected in zip(analyses(), on_cpu, strict=True):
        assert numbers(engine.analyze(analysis)) == pytest.approx(expected, abs=5e-3, rel=1e-4), analysis
    engine.check_integrity()
    assert engine.stats().pages_held == 0


def test_in_bfloat16_they_are_as_near_as_bfloat16_allows(on_cpu: list[list[float]]) -> None:
    engine = make_engine(dtype="bfloat16")
    for analysis, expected in zip(analyses(), on_cpu, strict=True):
        found = torch.tensor(numbers(engine.analyze(analysis)), dtype=torch.float64)
        error = (found - torch.tensor(expected, dtype=torch.float64)).abs() / (
            1 + torch.tensor(expected, dtype=torch.float64).abs()
        )
        assert float(error.mean()) < 0.03, analysis


def test_beside_requests_neither_changes_and_the_host_waits_for_nothing_but_results() -> None:
    """Events may be waited for: that is where results are read. Whatever else makes the host wait holds up passes."""
    engine = make_engine()
    requests = [
        GenerateRequest(
            prompt_token_ids=text(length, seed=length),
            max_tokens=80,
            sampling=SamplingParams(temperature=0.0, ignore_eos=True),
        )
        for length in (10, 64, 150)
    ]
    alone = [output.token_ids for output in make_engine().generate(requests)]
    for analysis in analyses():  # kernels of these shapes compile, and libraries allocate
        engine.analyze(analysis)
    futures: list[Future[AnalysisResult]] = [engine.begin_analysis(analysis) for analysis in analyses()]
    ids = [engine.add_request(request) for request in requests]
    outputs = {}
    torch.cuda.set_sync_debug_mode("error")
    try:
        while engine.has_work:
            outputs |= {event.request_id: event.output for event in engine.step() if hasattr(event, "output")}
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [outputs[id_].token_ids for id_ in ids] == alone
    assert all(future.exception(timeout=0) is None for future in futures)
    engine.check_integrity()


def test_deterministic_results_have_equal_bits_whatever_pages_rows_and_company_there_are() -> None:
    plenty = make_engine(deterministic=True, dtype="bfloat16", score_cache_bytes=0)
    few = make_engine(deterministic=True, dtype="bfloat16", max_rows=5, num_pages=24)
    alone = [plenty.analyze(analysis) for analysis in analyses()]
    few.add_request(GenerateRequest(prompt_token_ids=text(64), max_tokens=200))
    futures = [few.begin_analysis(analysis) for analysis in analyses()]
    while few.has_work:
        few.step()
    assert [future.result(timeout=0) for future in futures] == alone
    assert [plenty.analyze(analysis) for analysis in analyses()] == alone, "on pages found in the index"
    assert [few.analyze(analysis) for analysis in analyses()] == alone, "with cached scores"


def test_in_float8_any_number_of_positions_can_be_scored() -> None:
    pytest.importorskip("torchao", reason="float8 needs torchao")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no float8 on this GPU")
    engine = make_engine(dtype="fp8", max_rows=7)
    wide = make_engine(dtype="bfloat16")
    for length in (2, 5, 70):
        asked = ScoreTokens(token_ids=text(length))
        found, expected = numbers(engine.analyze(asked)), numbers(wide.analyze(asked))
        error = (torch.tensor(found) - torch.tensor(expected)).abs().mean()
        assert float(error) < 0.5, length
