"""Each Triton kernel against its slow twin."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="triton comes with torch's CUDA builds")

from engine.config import ConceptConfig, ModelConfig
from engine.model.attention import MAX_SPLITS, PAGES_PER_SPLIT, num_splits_for, paged_attention_by_row
from engine.model.kernels.attention import AttentionWorkspace, paged_attention
from engine.model.kernels.norm import residual_norm
from engine.model.kernels.qkv import prepare_qkv
from engine.model.kernels.swiglu import swiglu
from engine.model.transformer import Attention, RMSNorm, Rotary

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
ROWS, PAGE, HEADS, GROUPS, WIDTH, PAGES, TABLE = 3, 64, 8, 2, 128, 70, 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("table_length", [PAGES_PER_SPLIT, TABLE])
def test_attention_equals_one_row_and_head_at_a_time(dtype: torch.dtype, table_length: int) -> None:
    """Key lengths within one split, at its edge, one key beyond it, and over several."""
    torch.manual_seed(0)
    q = torch.randn(4, PAGE, HEADS, WIDTH, device=DEVICE, dtype=dtype)
    k, v = torch.randn(2, PAGES, PAGE, GROUPS, WIDTH, device=DEVICE, dtype=dtype)
    table = torch.stack([torch.randperm(PAGES, device=DEVICE)[:table_length] for _ in range(4)])
    longest = table_length * PAGE
    edge = PAGES_PER_SPLIT * PAGE
    lengths = torch.tensor([5, edge, min(edge + 1, longest), longest - 61], device=DEVICE)
    workspace = AttentionWorkspace(len(q), num_splits_for(table_length), PAGE, HEADS, WIDTH, DEVICE)
    fast = paged_attention(q, k, v, table, lengths, workspace)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(fast, paged_attention_by_row(q, k, v, table, lengths), atol=tolerance, rtol=tolerance)


def test_attention_over_more_pages_than_short_splits_cover_has_longer_ones() -> None:
    torch.manual_seed(8)
    num_pages = PAGES_PER_SPLIT * MAX_SPLITS + 3
    q = torch.randn(1, 16, 1, 16, device=DEVICE)
    k, v = torch.randn(2, 5, 16, 1, 16, device=DEVICE)
    table = torch.randint(0, 5, (1, num_pages), device=DEVICE)
    length = torch.tensor([num_pages * 16 - 5], device=DEVICE)
    assert num_splits_for(num_pages) == MAX_SPLITS
    fast = paged_attention(q, k, v, table, length, AttentionWorkspace(1, MAX_SPLITS, 16, 1, 16, DEVICE))
    torch.testing.assert_close(fast, paged_attention_by_row(q, k, v, table, length), atol=1e-5, rtol=1e-5)


def test_a_row_gives_the_same_bits_whatever_the_batch_may_be_split_into() -> None:
    torch.manual_seed(1)
    q = torch.randn(2, PAGE, HEADS, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    k, v = torch.randn(2, PAGES, PAGE, GROUPS, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    table = torch.stack([torch.randperm(PAGES, device=DEVICE)[:TABLE] for _ in range(2)])
    lengths = torch.tensor([300, TABLE * PAGE - 3], device=DEVICE)

    def attend(rows: slice, num_splits: int) -> torch.Tensor:
        queries = q[rows].contiguous()
        workspace = AttentionWorkspace(len(queries), num_splits, PAGE, HEADS, WIDTH, DEVICE)
        return paged_attention(queries, k, v, table[rows].contiguous(), lengths[rows].contiguous(), workspace)

    together = attend(slice(0, 2), num_splits_for(TABLE))
    assert torch.equal(together[:1], attend(slice(0, 1), 1))
    assert torch.equal(together[1:], attend(slice(1, 2), num_splits_for(TABLE)))


def test_prepared_queries_keys_and_values_equal_the_attention_module() -> None:
    torch.manual_seed(2)
    config = ModelConfig(
        vocab_size=50,
        n_head=HEADS,
        n_embd=HEADS * WIDTH,
        n_kv_heads=GROUPS,
        block_size=512,
        clip_qkv=0.9,
        concept=ConceptConfig(concept_dim=HEADS * WIDTH),
        mask_token_id=49,
        eos_token_id=48,
        pad_token_id=47,
    )
    attention, rotary = Attention(config).to(DEVICE), Rotary(config).to(DEVICE)
    assert isinstance(attention.q_norm, RMSNorm) and isinstance(attention.k_norm, RMSNorm)
    seen: dict[str, torch.Tensor] = {}

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.update(q=q, k=k, v=v)
        return q

    with torch.no_grad():
        attention.q_norm.weight.normal_()
        attention.k_norm.weight.normal_()
        x = torch.randn(ROWS, PAGE, config.n_embd, device=DEVICE)
        block = torch.tensor([0, 3, 7], device=DEVICE)
        page = torch.tensor([4, 2, 9], device=DEVICE)
        attention(x, block[:, None] * PAGE + torch.arange(PAGE, device=DEVICE), rotary, attend, 0)
        k_pages, v_pages = torch.zeros(2, PAGES, PAGE, GROUPS, WIDTH, device=DEVICE)
        q = prepare_qkv(
            attention.qkv(x)[None],
            block,
            page,
            rotary.cos_SE,
            rotary.sin_SE,
            attention.q_norm.weight,
            attention.k_norm.weight,
            k_pages,
            v_pages,
            heads=HEADS,
            clip=0.9,
            eps=config.norm_eps,
        )
    torch.testing.assert_close(q, seen["q"], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(k_pages[page], seen["k"], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(v_pages[page], seen["v"])


@pytest.mark.parametrize("width", [96, 4096])
def test_residual_norm_equals_its_parts(width: int) -> None:
    torch.manual_seed(3)
    norm = RMSNorm(width, 1e-5).to(DEVICE).requires_grad_(False)
    norm.weight.normal_()
    x, branch = torch.randn(2, ROWS, PAGE, width, device=DEVICE)
    added, masked = torch.randn(ROWS, width, device=DEVICE), torch.rand(ROWS, PAGE, device=DEVICE) > 0.5
    fused = residual_norm(x, branch[None], norm.weight, 1e-5, added_RD=added, masked_RC=masked)
    torch.testing.assert_close(fused, x + norm(branch) + added[:, None] * masked[:, :, None], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(residual_norm(None, branch[None], norm.weight, 1e-5), norm(branch), atol=1e-5, rtol=1e-5)


def test_swiglu_equals_its_formula() -> None:
    inner = torch.randn(ROWS, PAGE, 2 * 1500, device=DEVICE)
    value, gate = inner.chunk(2, dim=-1)
    torch.testing.assert_close(swiglu(inner), F.silu(gate) * value, atol=1e-5, rtol=1e-5)
