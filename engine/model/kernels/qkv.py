"""From the QKV projection to attention's inputs in one kernel: clamp, qk-norm, rotary, page write.

Shapes: R rows, C canvas positions, H query heads, G KV heads, E head width, P pages, S partial sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .overlap import allow_next, launch_options, wait_for_previous

_HEADS_PER_PROGRAM = 8


@triton.jit
def _prepare_kernel(
    qkv_ptr,
    block_ptr,
    page_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    q_ptr,
    k_page_ptr,
    v_page_ptr,
    num_tokens,
    clip,
    eps,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    allow_next(OVERLAPS)
    wait_for_previous(OVERLAPS)
    token = tl.program_id(0)
    row = token // PAGE
    slot = token % PAGE
    head = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    half = tl.arange(0, HALF)
    width: tl.constexpr = 2 * HALF
    exists = (head < HEADS + 2 * GROUPS)[:, None]
    first = tl.zeros((CHUNK, HALF), tl.float32)
    second = tl.zeros((CHUNK, HALF), tl.float32)
    for part in tl.static_range(PARTS):
        source = ((part * num_tokens + token) * (HEADS + 2 * GROUPS) + head)[:, None] * width + half[None, :]
        first += tl.load(qkv_ptr + source, mask=exists, other=0.0).to(tl.float32)
        second += tl.load(qkv_ptr + source + HALF, mask=exists, other=0.0).to(tl.float32)
    first = tl.minimum(tl.maximum(first, -clip), clip)
    second = tl.minimum(tl.maximum(second, -clip), clip)
    is_query = (head < HEADS)[:, None]
    is_key = ((head >= HEADS) & (head < HEADS + GROUPS))[:, None]
    is_value = ((head >= HEADS + GROUPS) & (head < HEADS + 2 * GROUPS))[:, None]
    scale = 1.0 / tl.sqrt((tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / width + eps)
    q_first = tl.load(q_weight_ptr + half).to(tl.float32)[None, :]
    q_second = tl.load(q_weight_ptr + HALF + half).to(tl.float32)[None, :]
    k_first = tl.load(k_weight_ptr + half).to(tl.float32)[None, :]
    k_second = tl.load(k_weight_ptr + HALF + half).to(tl.float32)[None, :]
    normed_first = first * scale[:, None] * tl.where(is_query, q_first, k_first)
    normed_second = second * scale[:, None] * tl.where(is_query, q_second, k_second)
    position = tl.load(block_ptr + row) * PAGE + slot
    cos = tl.load(cos_ptr + position * width + half)[None, :]
    sin = tl.load(sin_ptr + position * width + half)[None, :]
    turned_first = normed_first * cos - normed_second * sin
    turned_second = normed_second * cos + normed_first * sin
    q_offset = (token * HEADS + head)[:, None] * width + half[None, :]
    tl.store(q_ptr + q_offset, turned_first.to(q_ptr.dtype.element_ty), mask=is_query)
    tl.store(q_ptr + q_offset + HALF, turned_second.to(q_ptr.dtype.element_ty), mask=is_query)
    page = tl.load(page_ptr + row).to(tl.int64)
    k_offset = ((page * PAGE + slot) * GROUPS + head - HEADS)[:, None] * width + half[None, :]
    tl.store(k_page_ptr + k_offset, turned_first.to(k_page_ptr.dtype.element_ty), mask=is_key)
    tl.store(k_page_ptr + k_offset + HALF, turned_second.to(k_page_ptr.dtype.element_ty), mask=is_key)
    v_offset = k_offset - GROUPS * width
    tl.store(v_page_ptr + v_offset, first.to(v_page_ptr.dtype.element_ty), mask=is_value)
    tl.store(v_page_ptr + v_offset + HALF, second.to(v_page_ptr.dtype.element_ty), mask=is_value)


def prepare_qkv(
    qkv_SRCX: Tensor,
    block_R: Tensor,
    page_R: Tensor,
    cos_SE: Tensor,
    sin_SE: Tensor,
    q_weight_E: Tensor,
    k_weight_E: Tensor,
    k_PCGE: Tensor,
    v_PCGE: Tensor,
    *,
    heads: int,
    clip: float,
    eps: float,
    overlaps: bool = False,
) -> Tensor:
    """Queries q_RCHE, normed and rotated; keys and values go to page `page_R[r]` of each row.

    `qkv_SRCX`, summed over its S, is the projection with X = (H + 2 G) * E; cos and sin [positions, E] are float32;
    `clip` may be infinite. Queries have the dtype of the pages.
    """
    parts, num_rows, page, _ = qkv_SRCX.shape
    groups, width = k_PCGE.shape[2], k_PCGE.shape[3]
    q_RCHE = torch.empty(num_rows, page, heads, width, dtype=k_PCGE.dtype, device=qkv_SRCX.device)
    grid = (num_rows * page, triton.cdiv(heads + 2 * groups, _HEADS_PER_PROGRAM))
    _prepare_kernel[grid](
        qkv_SRCX,
        block_R,
        page_R,
        cos_SE,
        sin_SE,
        q_weight_E,
        k_weight_E,
        q_RCHE,
        k_PCGE,
        v_PCGE,
        num_tokens=num_rows * page,
        clip=clip,
        eps=eps,
        PARTS=parts,
        HEADS=heads,
        GROUPS=groups,
        HALF=width // 2,
        PAGE=page,
        CHUNK=_HEADS_PER_PROGRAM,
        num_warps=4,
        **launch_options(overlaps),
    )
    return q_RCHE
