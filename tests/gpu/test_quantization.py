"""float8 on a GPU: our kernels against torchao's own way, and a whole model against bfloat16."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("triton", reason="triton comes with torch's CUDA builds")
pytest.importorskip("torchao", reason="an option's package")

from torchao import quantization as torchao

from engine import (
    AttributionParams,
    ConceptConfig,
    Engine,
    EngineConfig,
    GenerateRequest,
    Intervention,
    ModelConfig,
    Output,
    SamplingParams,
    SteeringParams,
    Suppression,
)
from engine.model.kernels.float8 import quantize_rows, swiglu_rows
from engine.model.kernels.matmul import Plan, Tile, matmul, matmul_slow
from engine.model.quantization import Float8Linear, check_float8, quantize
from engine.model.steerling import SteerlingModel
from engine.model.weights import load_model
from engine.runner.memory import module_bytes

DEVICE = torch.device("cuda")
DEMO = Path(__file__).resolve().parents[2] / "demo_model" / "steerling-demo"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="this GPU knows no float8"
    ),
]


@pytest.mark.parametrize("width", [80, 4096, 16384])
def test_rows_are_quantised_as_the_library_does_it(width: int) -> None:
    torch.manual_seed(0)
    magnitude = torch.logspace(-6, 6, 9, device=DEVICE)[:, None]
    x = (torch.randn(9, width, device=DEVICE) * magnitude).bfloat16()
    x[4] = 0
    values, scale = quantize_rows(x)
    theirs = torchao.Float8Tensor.from_hp(x, granularity=torchao.PerRow(), hp_value_lb=1e-12)
    torch.testing.assert_close(scale, theirs.scale, rtol=2**-8, atol=0.0)
    ours_back, theirs_back = values.float() * scale, theirs.qdata.float() * theirs.scale
    # Scales differ in the last bits of bfloat16, so a value between two float8 numbers may go either way.
    torch.testing.assert_close(ours_back, theirs_back, rtol=2**-3 + 2**-7, atol=0.0)
    largest = x.float().abs().amax(dim=-1, keepdim=True)
    assert ((ours_back - x.float()).abs() <= 2**-4 * x.float().abs() + 2**-18 * largest).all()
    assert not ours_back[4].any()


def test_a_nan_stays_in_its_row() -> None:
    x = torch.randn(3, 128, device=DEVICE).bfloat16()
    x[1, 5] = torch.nan
    linear = nn.Linear(128, 64, bias=False, device=DEVICE, dtype=torch.bfloat16).requires_grad_(False)
    y = Float8Linear(linear, torchao)(x)
    assert not y[1].isfinite().any() and y[0].isfinite().all() and y[2].isfinite().all()


def test_swiglu_rows_equal_swiglu_then_rows() -> None:
    torch.manual_seed(1)
    inner = torch.randn(70, 2 * 1504, device=DEVICE).bfloat16()
    value, gate = inner.float().chunk(2, dim=-1)
    slow_values, slow_scale = quantize_rows(F.silu(gate) * value)
    values, scale = swiglu_rows(inner)
    torch.testing.assert_close(scale, slow_scale, rtol=1e-5, atol=0.0)
    equal = (values.view(torch.uint8) == slow_values.view(torch.uint8)).float().mean()
    assert equal > 0.999


@pytest.mark.parametrize(("num_columns", "width"), [(128, 96), (5120, 4096), (4096, 16384)])
def test_a_float8_product_equals_the_library_s(num_columns: int, width: int) -> None:
    torch.manual_seed(2)
    linear = nn.Linear(width, num_columns, bias=False, device=DEVICE, dtype=torch.bfloat16).requires_grad_(False)
    layer = Float8Linear(linear, torchao)
    x = torch.randn(3, 64, width, device=DEVICE).bfloat16()
    fast, slow, exact = layer(x), layer.forward_slow(x), linear(x)
    assert fast.shape == exact.shape and fast.dtype == torch.bfloat16
    assert (fast - slow).float().norm() < 0.02 * slow.float().norm()
    error = (fast - exact).float().norm() / exact.float().norm()
    assert 0.005 < error < 0.06


def test_our_product_of_float8_equals_its_slow_twin() -> None:
    torch.manual_seed(3)
    x, w = torch.randn(130, 544, device=DEVICE), torch.randn(80, 544, device=DEVICE)
    (x8, x_scale), (w8, w_scale) = quantize_rows(x), quantize_rows(w)
    plan = Plan(short=Tile(64, 64, 64, 3, 4), slices=2)
    counters = torch.zeros(plan.num_counters(80), dtype=torch.int32, device=DEVICE)
    options = {"out_dtype": torch.float32, "scales": (x_scale, w_scale)}
    slow = matmul_slow(x8, w8, plan, **options)
    for fast in (matmul(x8, w8, plan, **options), matmul(x8, w8, plan, counters=counters, **options)):
        assert (fast - slow).norm() < 2e-3 * slow.norm()


@pytest.mark.parametrize("weight_sharing", [True, False])
def test_a_model_in_float8_stays_close_and_is_half_as_large(weight_sharing: bool) -> None:
    check_float8(DEVICE)
    torch.manual_seed(4)
    config = ModelConfig(
        vocab_size=1000,
        n_layers=4,
        n_head=4,
        n_embd=512,
        n_kv_heads=2,
        block_size=256,
        concept=ConceptConfig(n_concepts=64, n_discovered=64, concept_dim=512, factorize_rank=32),
        mask_token_id=999,
        eos_token_id=998,
        pad_token_id=997,
        weight_sharing=weight_sharing,
    )
    model = SteerlingModel(config, vocab_multiple=64).requires_grad_(False).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.06)
    model = model.to(DEVICE, torch.bfloat16)
    assert model.transformer.rotary is not None
    model.transformer.rotary.float()
    num_linear = sum(m.weight.numel() for m in model.transformer.layers.modules() if isinstance(m, nn.Linear))
    ids = torch.randint(0, 997, (2, 256), device=DEVICE)
    before = model.transformer.logits(model.hidden_dense(ids)).float()
    held = torch.cuda.memory_allocated()
    quantize(model)
    # lm_head gets a float8 copy beside the rows that steering reads; scales and rounding of allocations aside.
    grown = torch.cuda.memory_allocated() - held
    assert grown < -num_linear + model.transformer.lm_head.out_features * 512 + 2**20
    after = model.transformer.logits(model.hidden_dense(ids)).float()
    error = (after - before).norm() / before.norm()
    assert 0.005 < error < 0.15
    is_same = after.argmax(dim=-1) == before.argmax(dim=-1)
    best, second = before.topk(2, dim=-1).values.unbind(dim=-1)
    # Random weights leave many positions undecided; where the lead is clear the rounding must not turn it.
    is_clear = best - second > 8 * (after - before).std()
    assert is_clear.any() and is_same[is_clear].all() and is_same.float().mean() > 0.5


@pytest.fixture(scope="module")
def plain_model() -> SteerlingModel:
    """The demo checkpoint in bfloat16."""
    return load_model(DEMO, device=DEVICE, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Loaded with the option, with graphs."""
    return Engine.from_checkpoint(DEMO, EngineConfig(device="cuda", dtype="fp8", num_pages=128, max_rows=6))


def requests() -> list[GenerateRequest]:
    """Every phase of a block, steered and not, sampled and greedy."""
    steering = SteeringParams(
        interventions=(Intervention(concept_ids=(3, 9), strength=2.0),),
        suppress=(Suppression(concept_id=5, strength=0.5),),
    )
    return [
        GenerateRequest(
            prompt_token_ids=[300 + (7 * index + j) % 5000 for j in range(37 * index)],
            max_tokens=30 + 40 * (index % 2),
            sampling=SamplingParams(seed=index, num_logprobs=2, temperature=0.0 if index % 3 == 0 else None),
            steering=steering if index % 2 else None,
            attribution=AttributionParams(),
        )
        for index in range(6)
    ]


def assert_sound(outputs: list[Output]) -> None:
    """Positions are committed once, all of them unless a text ends; numbers are finite, attributions sum to logits."""
    for request, output in zip(requests(), outputs, strict=True):
        start = output.num_prompt_tokens
        positions = [commit.position for commit in output.commits]
        assert positions and len(set(positions)) == len(positions)
        if output.finish_reason == "length":
            assert sorted(positions) == list(range(start, start + request.max_tokens))
        for commit in output.commits:
            parts = commit.attribution
            assert parts is not None
            numbers = (commit.confidence, commit.target_logit, commit.logprob, parts.epsilon)
            assert all(map(math.isfinite, numbers))
            total = parts.known_total + parts.discovered_total + parts.epsilon
            assert total == pytest.approx(commit.target_logit, abs=1e-3)


def test_the_engine_serves_fp8_from_graphs(engine: Engine) -> None:
    assert isinstance(engine.runner.model.transformer.lm_head, Float8Linear)
    assert_sound(engine.generate(requests()))
    engine.check_integrity()


def test_graphs_change_nothing_of_fp8(engine: Engine) -> None:
    """A captured product makes its scales anew in every pass. Within one block all products have one size."""
    options = EngineConfig(device="cuda", dtype="fp8", num_pages=64, max_rows=6, use_graphs=False)
    request = GenerateRequest(prompt_token_ids=list(range(300, 320)), max_tokens=40, sampling=SamplingParams(seed=1))
    (plain,) = Engine.from_checkpoint(DEMO, options).generate([request])
    (graphed,) = engine.generate([request])
    assert graphed.commits == plain.commits


def test_a_ready_bfloat16_model_is_quantised_and_its_memory_given_back(plain_model: SteerlingModel) -> None:
    model = copy.deepcopy(plain_model)
    before = module_bytes(model)
    num_layers = sum(m.weight.numel() for m in model.transformer.layers.modules() if isinstance(m, nn.Linear))
    options = EngineConfig(device="cuda", dtype="fp8", num_pages=64, max_rows=6)
    made = Engine(model, options)
    head = model.transformer.lm_head
    assert isinstance(head, Float8Linear) and made.runner.dtype == torch.bfloat16
    scales = 4 * sum(m.out_features for m in model.modules() if isinstance(m, Float8Linear))
    assert made.runner.memory.weights == before - num_layers + head.in_features * head.out_features + scales
    assert_sound(made.generate(requests()))


def test_float8_s_error_in_logits_of_the_demo_checkpoint_is_a_few_percent(
    engine: Engine, plain_model: SteerlingModel, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = torch.randint(300, 5000, (4, 256), generator=torch.Generator().manual_seed(5)).to(DEVICE)
    plain, ours = (m.transformer.logits(m.hidden_dense(ids)).float() for m in (plain_model, engine.runner.model))
    error = float((ours - plain).norm() / plain.norm())
    same = float((ours.argmax(dim=-1) == plain.argmax(dim=-1)).float().mean())
    with capsys.disabled():
        print(f"\nfp8 against bfloat16: logits off by {error:.4f} of their norm, the same likeliest token {same:.4f}")
    assert 0.005 < error < 0.1
    assert same > 0.8
