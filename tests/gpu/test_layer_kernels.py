"""The layers' own GEMMs and what may be chosen about the kernels around them, against plain modules.

None of these choices may change what is computed; most may not even change a bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("triton", reason="triton comes with torch's CUDA builds")

from engine.config import ConceptConfig, ModelConfig
from engine.model import fused
from engine.model.attention import PAGES_PER_SPLIT, num_splits_for, paged_attention_by_row
from engine.model.kernels.attention import AttentionWorkspace, paged_attention
from engine.model.kernels.gemm import gated_product, partial_products
from engine.model.kernels.norm import residual_norm
from engine.model.transformer import MLP, RMSNorm, Transformer, TransformerLayer
from engine.model.tuning import HOPPER, PLAIN, AttentionSettings, GemmSettings, Tuning

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
ROWS, PAGE, HEADS, GROUPS, WIDTH, LAYERS, PAGES, TABLE = 3, 64, 4, 2, 32, 2, 24, 20
CONFIG = ModelConfig(
    vocab_size=50,
    n_layers=LAYERS,
    n_head=HEADS,
    n_embd=HEADS * WIDTH,
    n_kv_heads=GROUPS,
    block_size=TABLE * PAGE,
    mlp_ratio=2,
    clip_qkv=2.0,
    concept=ConceptConfig(concept_dim=HEADS * WIDTH),
    mask_token_id=49,
    eos_token_id=48,
    pad_token_id=47,
)
POSITIONS, D = ROWS * PAGE, CONFIG.n_embd
SMALL = GemmSettings(block_m=64, block_n=32, block_k=32, splits=2, num_stages=3)
TUNED = Tuning(
    products={
        (POSITIONS, D + 2 * GROUPS * WIDTH, D): dataclasses.replace(SMALL, splits=3),
        (POSITIONS, D, D): SMALL,
        (POSITIONS, D, CONFIG.mlp_width): dataclasses.replace(SMALL, splits=4),
    },
    gated={(POSITIONS, 2 * CONFIG.mlp_width, D): dataclasses.replace(SMALL, splits=1)},
    attention=AttentionSettings(num_stages=3),
)
IS_HOPPER = DEVICE.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not IS_HOPPER, reason="only a Hopper GPU gets these settings")


@pytest.mark.parametrize("splits", [1, 3, 4])
def test_partial_products_are_those_of_parts_of_the_inputs(splits: int) -> None:
    """Eight steps in three splits: they cannot be equally long."""
    torch.manual_seed(0)
    x = torch.randn(2, PAGE, 256, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(96, 256, device=DEVICE, dtype=torch.bfloat16)
    settings = dataclasses.replace(SMALL, splits=splits)
    parts = partial_products(x, weight, settings)
    assert parts.shape == (splits, 2, PAGE, 96) and parts.dtype == torch.float32
    ends = [(split + 1) * 8 // splits * 32 for split in range(splits)]
    for part, start, end in zip(parts, [0, *ends], ends, strict=False):
        product = x[..., start:end].float() @ weight[:, start:end].float().T
        torch.testing.assert_close(part, product, atol=1e-3, rtol=1e-4)


def test_the_gated_product_equals_the_first_half_of_the_mlp() -> None:
    torch.manual_seed(1)
    x = torch.randn(2, PAGE, 64, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(2 * 96, 64, device=DEVICE, dtype=torch.bfloat16)
    fast = gated_product(x, weight, dataclasses.replace(SMALL, splits=1))
    value, gate = (x.float() @ weight.float().T).chunk(2, dim=-1)
    torch.testing.assert_close(fast.float(), F.silu(gate) * value, atol=1e-2, rtol=1e-2)


@needs_hopper
@pytest.mark.parametrize(("positions", "num_outputs", "num_inputs"), HOPPER.products)
def test_measured_products_equal_the_linear_layer(positions: int, num_outputs: int, num_inputs: int) -> None:
    torch.manual_seed(9)
    x = torch.randn(positions, num_inputs, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(num_outputs, num_inputs, device=DEVICE, dtype=torch.bfloat16)
    fast = partial_products(x, weight, HOPPER.products[positions, num_outputs, num_inputs]).sum(dim=0)
    torch.testing.assert_close(fast, x.float() @ weight.float().T, atol=1e-2, rtol=1e-3)


@needs_hopper
@pytest.mark.parametrize(("positions", "num_outputs", "num_inputs"), HOPPER.gated)
def test_measured_gated_products_equal_the_mlp(positions: int, num_outputs: int, num_inputs: int) -> None:
    torch.manual_seed(10)
    x = torch.randn(positions, num_inputs, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(num_outputs, num_inputs, device=DEVICE, dtype=torch.bfloat16) / num_inputs**0.5
    fast = gated_product(x, weight, HOPPER.gated[positions, num_outputs, num_inputs])
    value, gate = (x.float() @ weight.float().T).chunk(2, dim=-1)
    torch.testing.assert_close(fast.float(), F.silu(gate) * value, atol=1e-2, rtol=1e-2)


def test_settings_that_do_not_fit_a_gemm_are_told() -> None:
    x, weight = torch.zeros(1, PAGE, 64, device=DEVICE), torch.zeros(96, 64, device=DEVICE)
    with pytest.raises(AssertionError, match=r"\(64, 64, 32\) do not divide the GEMM's \(64, 96, 64\)"):
        partial_products(x, weight, dataclasses.replace(SMALL, block_n=64))
    with pytest.raises(AssertionError, match="K is split in 2"):
        gated_product(x, torch.zeros(64, 64, device=DEVICE), SMALL)


def test_a_row_has_the_same_products_whatever_the_other_rows_hold() -> None:
    torch.manual_seed(2)
    x = torch.randn(2, PAGE, 256, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(64, 256, device=DEVICE, dtype=torch.bfloat16)
    other = torch.cat((torch.randn_like(x[:1]), x[:1]))
    assert torch.equal(partial_products(x, weight, SMALL)[:, 0], partial_products(other, weight, SMALL)[:, 1])
    settings = dataclasses.replace(SMALL, splits=1)
    assert torch.equal(gated_product(x, weight, settings)[0], gated_product(other, weight, settings)[1])


def test_the_norm_of_partial_sums_is_that_of_their_sum() -> None:
    torch.manual_seed(3)
    norm = RMSNorm(D, 1e-5).to(DEVICE).requires_grad_(False)
    x, parts = torch.randn(ROWS, PAGE, D, device=DEVICE), torch.randn(3, ROWS, PAGE, D, device=DEVICE)
    fast = residual_norm(x, parts, norm.weight, 1e-5)
    torch.testing.assert_close(fast, x + norm(parts.sum(dim=0)), atol=1e-5, rtol=1e-5)


ATTENTION_SETTINGS = [AttentionSettings(), AttentionSettings(num_stages=3), AttentionSettings(num_warps=8)]


def attention_case(num_rows: int = 2) -> tuple[torch.Tensor, ...]:
    """q, k, v, page table, key lengths: one row within a split, one over two."""
    torch.manual_seed(4)
    q = torch.randn(2, PAGE, HEADS, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    k, v = torch.randn(2, PAGES, PAGE, GROUPS, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    table = torch.stack([torch.randperm(PAGES, device=DEVICE)[:TABLE] for _ in range(2)])
    lengths = torch.tensor([5 * PAGE - 7, (TABLE - 1) * PAGE - 20], device=DEVICE)
    return q[-num_rows:].contiguous(), k, v, table[-num_rows:].contiguous(), lengths[-num_rows:].contiguous()


def attend(case: tuple[torch.Tensor, ...], settings: AttentionSettings) -> torch.Tensor:
    workspace = AttentionWorkspace(len(case[0]), num_splits_for(TABLE), PAGE, HEADS, WIDTH, DEVICE)
    return paged_attention(*case, workspace, settings)


@pytest.mark.parametrize("settings", ATTENTION_SETTINGS)
def test_attention_equals_its_slow_twin_under_all_settings(settings: AttentionSettings) -> None:
    case = attention_case()
    torch.testing.assert_close(attend(case, settings), paged_attention_by_row(*case), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("settings", ATTENTION_SETTINGS)
def test_attention_gives_a_row_the_same_bits_alone(settings: AttentionSettings) -> None:
    together = attend(attention_case(), settings)
    assert torch.equal(together[1:], attend(attention_case(num_rows=1), settings))


@pytest.fixture
def transformer() -> Transformer:
    torch.manual_seed(5)
    transformer = Transformer(CONFIG).to(DEVICE, torch.bfloat16).requires_grad_(False)
    assert transformer.rotary is not None
    transformer.rotary.float()
    return transformer


Pass = Callable[[Tuning], torch.Tensor]


def fused_pass(transformer: Transformer, table_length: int) -> tuple[Pass, torch.Tensor]:
    """A pass over three rows with history under a tuning, and what the plain modules give for it."""
    torch.manual_seed(6)
    token = torch.randint(0, CONFIG.vocab_size, (ROWS, PAGE), device=DEVICE)
    block = torch.tensor([0, 2, table_length - 1], device=DEVICE)
    table = torch.stack([torch.randperm(PAGES, device=DEVICE)[:table_length] for _ in range(ROWS)])
    table[:, 0] = torch.arange(ROWS, device=DEVICE)
    page = torch.arange(PAGES, PAGES + ROWS, device=DEVICE)
    table.scatter_(1, block[:, None], page[:, None])
    length = block * PAGE + torch.tensor([PAGE, 40, 9], device=DEVICE)
    masked = torch.rand(ROWS, PAGE, device=DEVICE) > 0.5
    added = torch.randn(LAYERS, ROWS, D, device=DEVICE)
    history = torch.randn(2, LAYERS, PAGES + ROWS, PAGE, GROUPS, WIDTH, device=DEVICE).bfloat16()
    k, v = history.clone()

    def attend_plainly(layer: int, q: torch.Tensor, k_row: torch.Tensor, v_row: torch.Tensor) -> torch.Tensor:
        k[layer][page], v[layer][page] = k_row, v_row
        return paged_attention_by_row(q, k[layer], v[layer], table, length)

    def inject(layer: int, x: torch.Tensor) -> torch.Tensor:
        return (x + added[layer][:, None] * masked[:, :, None]).to(x.dtype)

    positions = block[:, None] * PAGE + torch.arange(PAGE, device=DEVICE)
    plain = transformer(token, positions, attend_plainly, inject)
    cache_k, cache_v = history.clone()
    workspace = AttentionWorkspace(ROWS, num_splits_for(table_length), PAGE, HEADS, WIDTH, DEVICE)

    def run(tuning: Tuning) -> torch.Tensor:
        rows = (token, block, page, table, length, masked, added)
        return fused.forward(transformer, *rows, cache_k, cache_v, workspace, tuning)

    return run, plain


@pytest.mark.parametrize("tuning", [PLAIN, TUNED])
@pytest.mark.parametrize("table_length", [PAGES_PER_SPLIT, TABLE])
def test_fused_layers_equal_the_plain_modules(transformer: Transformer, table_length: int, tuning: Tuning) -> None:
    run, plain = fused_pass(transformer, table_length)
    fast = run(tuning)
    assert (fast - plain).float().norm() < 2e-2 * plain.float().norm()


def test_a_linear_layer_of_another_class_is_called() -> None:
    """Its weight may be quantised, or not even there."""

    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    torch.manual_seed(7)
    mlp = MLP(CONFIG).to(DEVICE, torch.bfloat16).requires_grad_(False)
    x = torch.randn(ROWS, PAGE, D, device=DEVICE, dtype=torch.bfloat16)
    ours = fused._project(mlp.down, fused._gate(mlp, x, TUNED), TUNED)
    assert len(ours) == 4
    doubled = Doubled(mlp.down.in_features, D, bias=False, device=DEVICE, dtype=torch.bfloat16)
    doubled.load_state_dict(mlp.down.state_dict())
    theirs = fused._project(doubled, fused._gate(mlp, x, TUNED), TUNED)
    assert len(theirs) == 1
    torch.testing.assert_close(theirs[0].float(), 2 * ours.sum(dim=0), atol=2e-2, rtol=2e-2)


@needs_hopper
@pytest.mark.parametrize("base", [PLAIN, TUNED])
def test_overlapping_kernels_change_no_bit(transformer: Transformer, base: Tuning) -> None:
    """Also as a graph, and replayed back to back, where a missing wait would let passes run into each other."""
    run, _ = fused_pass(transformer, PAGES_PER_SPLIT)  # Passes with split rows never overlap.
    expected = run(base).clone()
    tuning = dataclasses.replace(base, overlaps=True)
    assert torch.equal(run(tuning), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [run(tuning) for _ in range(3)]
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(hidden, expected) for hidden in captured)


def test_layers_of_the_test_are_what_the_fused_ones_expect(transformer: Transformer) -> None:
    """A table that names other shapes than the model's would let the tests above compare the plain way with itself."""
    layer = transformer.layers[0]
    assert isinstance(layer, TransformerLayer)
    products = (layer.attention.qkv, layer.attention.output, layer.mlp.down)
    assert {(POSITIONS, linear.out_features, linear.in_features) for linear in products} == set(TUNED.products)
    assert {(POSITIONS, layer.mlp.up.out_features, layer.mlp.up.in_features)} == set(TUNED.gated)
