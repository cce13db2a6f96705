"""Attribution to inputs and replay of traces on a GPU: against the CPU, in bfloat16, and within the memory kept."""

from __future__ import annotations

import copy

import pytest
import torch

from engine import (
    AttributeInputs,
    ConceptConfig,
    Engine,
    EngineConfig,
    GenerateRequest,
    InputAttribution,
    Intervention,
    ModelConfig,
    ReplayTrace,
    SamplingParams,
    SteeringParams,
    Trace,
    TracedCommit,
    Unsupported,
    trace_of,
)
from engine.model import fused_support
from engine.model.steerling import SteerlingModel
from engine.runner.kv_cache import replay_bytes

pytestmark = pytest.mark.gpu

VOCAB = 211


def config(**values: int) -> ModelConfig:
    width = values.get("n_embd", 256)
    shape = {"n_layers": 4, "n_head": 4, "n_embd": width, "n_kv_heads": 2, "block_size": 512, "mlp_ratio": 2}
    return ModelConfig(
        vocab_size=VOCAB,
        **{**shape, **values},
        concept=ConceptConfig(
            n_concepts=50,
            n_discovered=90,
            concept_dim=width,
            topk_known=6,
            topk_known_features=6,
            factorize_rank=16,
            discovered_topk=9,
        ),
        mask_token_id=VOCAB - 1,
        eos_token_id=VOCAB - 2,
        pad_token_id=VOCAB - 3,
    )


def make_model(model_config: ModelConfig) -> SteerlingModel:
    torch.manual_seed(5)
    model = SteerlingModel(model_config, vocab_multiple=64).requires_grad_(False).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=1.6 * parameter.shape[-1] ** -0.5)
    return model


@pytest.fixture(scope="module")
def model() -> SteerlingModel:
    return make_model(config())


def make_engine(model: SteerlingModel, device: str, dtype: torch.dtype, **settings: object) -> Engine:
    moved = copy.deepcopy(model).to(device, dtype)
    assert moved.transformer.rotary is not None
    moved.transformer.rotary.float()
    return Engine(moved, EngineConfig(num_pages=64, max_rows=8, **settings))  # type: ignore[arg-type]


def request(num_prompt: int = 70, max_tokens: int = 70) -> GenerateRequest:
    generator = torch.Generator().manual_seed(3)
    return GenerateRequest(
        prompt_token_ids=torch.randint(0, VOCAB - 3, (num_prompt,), generator=generator).tolist(),
        max_tokens=max_tokens,
        sampling=SamplingParams(temperature=0.0, repetition_penalty=1.0, tokens_per_step=2),
        steering=SteeringParams(
            interventions=(
                Intervention(concept_ids=(3, 9), strength=2.0, schedule="hard_cutoff", cutoff_tokens=20),
                Intervention(concept_ids=(4,), strength=2.0, layer=1),
            )
        ),
    )


@pytest.fixture(scope="module")
def trace(model: SteerlingModel) -> Trace:
    asked = request()
    (output,) = make_engine(model, "cpu", torch.float32).generate([asked])
    return trace_of(asked, output)


@pytest.fixture(scope="module")
def exact(model: SteerlingModel, trace: Trace) -> InputAttribution:
    found = make_engine(model, "cpu", torch.float32).analyze(ask(trace))
    assert isinstance(found, InputAttribution)
    return found


def ask(trace: Trace) -> AttributeInputs:
    return AttributeInputs(trace=trace, targets=(72, 100, 128, 139), num_steps=6)


def contributions(found: object) -> torch.Tensor:
    assert isinstance(found, InputAttribution)
    return torch.tensor([target.contributions for target in found.targets])


def test_float32_gives_the_contributions_of_the_cpu(
    model: SteerlingModel, trace: Trace, exact: InputAttribution
) -> None:
    engine = make_engine(model, "cuda", torch.float32)
    found = engine.analyze(ask(trace))
    torch.testing.assert_close(contributions(found), contributions(exact), atol=1e-3, rtol=1e-2)
    replay = engine.analyze(ReplayTrace(trace=trace))
    assert replay.largest_difference < 1e-3  # type: ignore[union-attr, operator]
    assert all(commit.rank == 0 for commit in replay.commits)  # type: ignore[union-attr]


def test_bfloat16_contributions_point_the_way_of_the_exact_ones(
    model: SteerlingModel, trace: Trace, exact: InputAttribution
) -> None:
    """Summed from gradients of bfloat16 layers in float32: noisy in each position, alike as a whole."""
    found = contributions(make_engine(model, "cuda", torch.bfloat16).analyze(ask(trace)))
    assert found.isfinite().all()
    likeness = torch.nn.functional.cosine_similarity(found, contributions(exact), dim=-1)
    assert likeness.min() > 0.95, likeness


@pytest.mark.parametrize("settings", [{"use_graphs": True}, {"async_scheduling": False}, {"deterministic": True}])
def test_generation_beside_it_is_as_alone(model: SteerlingModel, trace: Trace, settings: dict[str, bool]) -> None:
    if settings.get("deterministic") and not fused_support.HAS_TRITON:
        pytest.skip("deterministic needs Triton")
    asked = request(65, 60)
    (alone,) = make_engine(model, "cuda", torch.bfloat16, **settings).generate([asked])
    engine = make_engine(model, "cuda", torch.bfloat16, **settings)
    results = [engine.begin_analysis(ask(trace)), engine.begin_analysis(ReplayTrace(trace=trace))]
    (beside,) = engine.generate([asked])
    assert beside.commits == alone.commits
    while engine.has_work:
        engine.step()
    first, second = (contributions(result) for result in (results[0].result(), engine.analyze(ask(trace))))
    torch.testing.assert_close(first, second, atol=2e-2, rtol=5e-2)
    assert len(results[1].result().commits) == 70  # type: ignore[union-attr]
    engine.check_integrity()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [{"n_layers": 16}, {"n_layers": 4, "n_embd": 1024, "n_head": 8}])
def test_a_slice_at_full_context_takes_no_more_than_is_kept(dtype: torch.dtype, shape: dict[str, int]) -> None:
    """Least of all the scores of all positions with all others, of every head."""
    model_config = config(block_size=4096, **shape)
    engine = make_engine(make_model(model_config), "cuda", dtype)
    commits = [TracedCommit(4032 + offset, 7, 0) for offset in range(64)]
    long = Trace(prompt_token_ids=[3] * 4032, max_tokens=64, commits=commits)
    peaks = {}
    for name, analysis in (
        ("attribution", AttributeInputs(trace=long, targets=(4095,), num_steps=2)),
        ("replay", ReplayTrace(trace=long)),
    ):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        engine.analyze(analysis)
        peaks[name] = torch.cuda.max_memory_allocated() - before
    planned = replay_bytes(model_config, 4096, dtype)
    assert max(peaks.values()) <= planned, (peaks, planned)


def test_float8_is_refused_by_name_and_replayed(trace: Trace, model: SteerlingModel) -> None:
    pytest.importorskip("torchao")
    engine = make_engine(model, "cuda", torch.bfloat16, dtype="fp8")
    with pytest.raises(Unsupported, match="fp8"):
        engine.begin_analysis(ask(trace))
    replay = engine.analyze(ReplayTrace(trace=trace))
    assert len(replay.commits) == 70  # type: ignore[union-attr]
    assert replay.largest_difference < 2.0  # type: ignore[union-attr, operator]
