"""Concept weights that requests set, on a GPU: the commits of a CPU, no waiting, no compiling, no slower company."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import (
    AttributionParams,
    Commit,
    Engine,
    EngineConfig,
    GenerateRequest,
    Intervention,
    Output,
    SamplingParams,
    SteeringParams,
    WeightOverride,
)
from engine.model.steerling import SteerlingModel
from tests.gpu.test_engine_on_cuda import CONFIG, run

triton = pytest.importorskip("triton", reason="triton comes with torch's CUDA builds")

# Behind the line that skips: without triton these modules are skipped themselves, and empty.
from tests.gpu.test_deterministic import CONFIG as DETERMINISTIC_CONFIG  # noqa: E402
from tests.gpu.test_deterministic import assert_equal_to_alone, serve  # noqa: E402
from tests.gpu.test_passes import no_synchronisation  # noqa: E402

pytestmark = pytest.mark.gpu
DEMO = Path(__file__).resolve().parents[2] / "demo_model" / "steerling-demo"
WEIGHTS = (
    WeightOverride(concept_id=3, weight=1.5),
    WeightOverride(concept_id=20, weight=0.0),
    WeightOverride(concept_id=5, head="discovered", weight=1.0),
    WeightOverride(concept_id=31, head="discovered", weight=-0.5),
)
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "num_logprobs": 3},
    {},
    {"policy": "lossless"},
    {"temperature": 1.1, "top_k": 40, "tokens_per_step": 3},
    {"policy": "threshold", "threshold": 0.4},
]


def mixed_requests(count: int, vocab_size: int) -> list[GenerateRequest]:
    """Those that set no weights, and those that do in both modes, among every kind of sampling, length and phase."""
    set_here = SteeringParams(overrides=WEIGHTS)
    steered = dataclasses.replace(set_here, interventions=(Intervention(concept_ids=(9,), strength=2.0),))
    as_the_package = dataclasses.replace(set_here, overrides=WEIGHTS[:3], override_mode="reference")
    steerings = (None, set_here, as_the_package, steered)
    return [
        GenerateRequest(
            prompt_token_ids=[(7 * index + j) % (vocab_size - 10) for j in range(37 * index % 140)],
            max_tokens=20 + 31 * index % 80,
            sampling=SamplingParams(seed=index, **KINDS[index % len(KINDS)]),
            steering=steerings[index % len(steerings)],
            attribution=AttributionParams(top_k=None if index % 5 else 4) if index % 3 else None,
        )
        for index in range(count)
    ]


def random_model(use_epsilon_correction: bool) -> SteerlingModel:
    """Weights wide enough that positions and tokens differ clearly."""
    concept = dataclasses.replace(CONFIG.concept, use_epsilon_correction=use_epsilon_correction)
    torch.manual_seed(5)
    model = SteerlingModel(dataclasses.replace(CONFIG, concept=concept), vocab_multiple=64)
    for parameter in model.requires_grad_(False).eval().parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.4)
    return model


@pytest.mark.parametrize("use_graphs", [False, True])
@pytest.mark.parametrize("use_epsilon_correction", [True, False])
def test_float32_gives_the_same_commits_as_on_the_cpu(use_graphs: bool, use_epsilon_correction: bool) -> None:
    model, asked = random_model(use_epsilon_correction), mixed_requests(12, CONFIG.vocab_size)
    on_cpu = run(model, "cpu", torch.float32, asked)
    on_gpu = run(model, "cuda", torch.float32, asked, use_graphs=use_graphs)
    assert_alike(on_cpu, on_gpu)
    plain = run(model, "cpu", torch.float32, [dataclasses.replace(one, steering=None) for one in asked])
    assert all((a.token_ids == b.token_ids) == (i % 4 == 0) for i, (a, b) in enumerate(zip(on_cpu, plain, strict=True)))


def assert_alike(some: list[Output], others: list[Output]) -> None:
    """Equal decisions up to where two positions tie; logits and attributions to float32's rounding.

    Confidences of wide weights saturate, and between equal ones a last bit decides.
    """
    whole = 0
    for a, b in zip(some, others, strict=True):
        pairs = list(zip(a.commits, b.commits, strict=False))
        same = list(itertools.takewhile(lambda pair: decision(pair[0]) == decision(pair[1]), pairs))
        whole += len(same) == len(a.commits) == len(b.commits)
        for one, other in pairs[len(same) : len(same) + 1]:
            assert one.confidence == pytest.approx(other.confidence, abs=1e-5), "they differ where nothing ties"
        for one, other in same:
            assert one.target_logit == pytest.approx(other.target_logit, abs=2e-3)
            assert (one.attribution is None) == (other.attribution is None)
            if one.attribution is not None and other.attribution is not None:
                assert one.attribution.epsilon == pytest.approx(other.attribution.epsilon, abs=2e-3)
                assert sorted(c.concept_id for c in one.attribution.known) == sorted(
                    c.concept_id for c in other.attribution.known
                )
    assert 2 * whole >= len(some), f"only {whole} of {len(some)} agree to the end"


def decision(commit: Commit) -> tuple[int, int, int]:
    return commit.position, commit.token_id, commit.denoising_step


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_checkpoint(DEMO, EngineConfig(device="cuda", max_rows=12, num_pages=200))


def test_steps_never_make_the_host_wait_but_where_they_read_results(engine: Engine) -> None:
    asked = mixed_requests(16, 6000)
    ids = [engine.add_request(one) for one in asked]
    finished = 0
    with no_synchronisation():
        for step in range(3000):
            finished += sum(hasattr(event, "output") for event in engine.step())
            if step == 15:
                engine.preempt(ids[1])
            if step == 20:
                engine.abort(ids[2])
            if not engine.has_work:
                break
    assert finished == len(asked)


def test_nothing_is_compiled_for_weights_that_are_set(engine: Engine) -> None:
    compiled: list[str] = []

    def note(*, key: str, **_: object) -> None:
        compiled.append(key)

    previous = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = note
    try:
        for count in (2, 3, 8, 16):
            engine.generate(mixed_requests(count, 6000))
    finally:
        triton.knobs.runtime.jit_post_compile_hook = previous
    assert compiled == []


def test_only_passes_with_such_rows_leave_the_graphs(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of other requests replay what they always did, so they are no slower."""
    calls: list[bool] = []
    decide = engine.runner._program.decide

    def counted(*args: Any, **values: Any) -> Any:
        calls.append(bool(values.get("overrides")))
        return decide(*args, **values)

    monkeypatch.setattr(engine.runner._program, "decide", counted)
    plain, setting = mixed_requests(2, 6000)
    engine.generate([plain])
    assert calls == []
    (output,) = engine.generate([setting])
    assert len(calls) >= output.num_denoising_steps and all(calls)


def test_deterministic_requests_are_bit_equal_alone_and_together() -> None:
    torch.manual_seed(5)
    model = SteerlingModel(DETERMINISTIC_CONFIG, vocab_multiple=64).requires_grad_(False).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.3)
    model = model.to("cuda", torch.bfloat16)
    assert model.transformer.rotary is not None
    model.transformer.rotary.float()
    asked = mixed_requests(12, DETERMINISTIC_CONFIG.vocab_size)
    plain = {"draft_row_limit": 0, "share_prefixes": False, "async_scheduling": False, "use_graphs": False}
    alone = [serve(model, [one], **plain)[0] for one in asked]
    for settings in ({}, {"use_graphs": False}, {"max_rows": 3}, {"explain_interval_s": 1000.0}):
        assert_equal_to_alone(alone, serve(model, asked, **settings))
