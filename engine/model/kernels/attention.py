"""Paged block attention in Triton; the slow twin is `engine.model.attention.paged_attention_by_row`.

A program takes some queries of one head of one row and walks that row's pages. A tile of keys is a page, complete
or absent, save the row's own last one. Long rows are split: a split is a fixed number of pages of the row's own
length, so a row's result is the same whatever else is in the batch.

Shapes: R rows, C canvas positions, H query heads, G KV heads, E head width, P pages, B page table length.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention import PAGES_PER_SPLIT


@triton.jit
def _attend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    page_table_ptr,
    key_length_ptr,
    y_ptr,
    partial_ptr,
    partial_lse_ptr,
    scale_log2,
    table_length,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    QUERIES: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1) % HEADS
    tile = tl.program_id(1) // HEADS
    split = tl.program_id(2)
    key_length = tl.load(key_length_ptr + row).to(tl.int32)
    num_pages = tl.cdiv(key_length, PAGE)
    first = split * SPLIT
    if first < num_pages:
        last = tl.minimum(first + SPLIT, num_pages)
        group = head // (HEADS // GROUPS)
        query = tile * QUERIES + tl.arange(0, QUERIES)
        slot = tl.arange(0, PAGE)
        column = tl.arange(0, WIDTH)
        y_offset = ((row * PAGE + query)[:, None] * HEADS + head) * WIDTH + column[None, :]
        q = tl.load(q_ptr + y_offset)
        top = tl.full((QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        mixed = tl.zeros((QUERIES, WIDTH), tl.float32)
        for index in range(first, last):
            page = tl.load(page_table_ptr + row * table_length + index).to(tl.int64)
            kv_offset = ((page * PAGE + slot)[:, None] * GROUPS + group) * WIDTH + column[None, :]
            k = tl.load(k_ptr + kv_offset)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
            scores = tl.where((index * PAGE + slot < key_length)[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            weights = tl.exp2(scores - new_top[:, None])
            rescale = tl.exp2(top - new_top)
            total = total * rescale + tl.sum(weights, axis=1)
            v = tl.load(v_ptr + kv_offset)
            mixed = mixed * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            top = new_top
        mixed = mixed / total[:, None]
        if NUM_SPLITS == 1:
            tl.store(y_ptr + y_offset, mixed.to(y_ptr.dtype.element_ty))
        else:
            if num_pages <= SPLIT:
                tl.store(y_ptr + y_offset, mixed.to(y_ptr.dtype.element_ty))
            else:
                partial = ((row * NUM_SPLITS + split) * PAGE + query) * HEADS + head
                tl.store(partial_ptr + partial[:, None] * WIDTH + column[None, :], mixed)
                tl.store(partial_lse_ptr + partial, top + tl.log2(total))


@triton.jit
def _combine_kernel(
    partial_ptr,
    partial_lse_ptr,
    key_length_ptr,
    y_ptr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    QUERIES: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1) % HEADS
    tile = tl.program_id(1) // HEADS
    num_pages = tl.cdiv(tl.load(key_length_ptr + row).to(tl.int32), PAGE)
    if num_pages > SPLIT:
        query = tile * QUERIES + tl.arange(0, QUERIES)
        column = tl.arange(0, WIDTH)
        top = tl.full((QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        mixed = tl.zeros((QUERIES, WIDTH), tl.float32)
        for split in range(0, tl.cdiv(num_pages, SPLIT)):
            partial = ((row * NUM_SPLITS + split) * PAGE + query) * HEADS + head
            lse = tl.load(partial_lse_ptr + partial)
            new_top = tl.maximum(top, lse)
            rescale = tl.exp2(top - new_top)
            weight = tl.exp2(lse - new_top)
            part = tl.load(partial_ptr + partial[:, None] * WIDTH + column[None, :])
            mixed = mixed * rescale[:, None] + part * weight[:, None]
            total = total * rescale + weight
            top = new_top
        y_offset = ((row * PAGE + query)[:, None] * HEADS + head) * WIDTH + column[None, :]
        tl.store(y_ptr + y_offset, (mixed / total[:, None]).to(y_ptr.dtype.element_ty))


class AttentionWorkspace:
    """Partial results of split rows, shared by all layers of a pass."""

    def __init__(self, num_rows: int, num_splits: int, page: int, heads: int, width: int, device: torch.device) -> None:
        shape = (num_rows, num_splits, page, heads) if num_splits > 1 else (1,)
        self.num_splits = num_splits
        self.partial = torch.empty(*shape, width, dtype=torch.float32, device=device)
        self.partial_lse = torch.empty(shape, dtype=torch.float32, device=device)


def paged_attention(
    q_RCHE: Tensor,
    k_PCGE: Tensor,
    v_PCGE: Tensor,
    page_table_RB: Tensor,
    key_length_R: Tensor,
    workspace: AttentionWorkspace,
    *,
    queries_per_program: int = 64,
    num_warps: int = 4,
    num_stages: int = 2,
) -> Tensor:
    """Attention of each row to its own pages, y_RCHE in q's dtype. All tensors contiguous.

    `workspace` must have been made for `num_splits_for` the longest row, or more.
    """
    num_rows, page, heads, width = q_RCHE.shape
    groups = k_PCGE.shape[2]
    y_RCHE = torch.empty_like(q_RCHE)
    queries = min(queries_per_program, page)
    tiles = page // queries
    num_splits = workspace.num_splits
    shape = {"HEADS": heads, "WIDTH": width, "PAGE": page, "QUERIES": queries, "SPLIT": PAGES_PER_SPLIT}
    _attend_kernel[(num_rows, heads * tiles, num_splits)](
        q_RCHE,
        k_PCGE,
        v_PCGE,
        page_table_RB,
        key_length_R,
        y_RCHE,
        workspace.partial,
        workspace.partial_lse,
        1.4426950408889634 / width**0.5,
        page_table_RB.stride(0),
        GROUPS=groups,
        NUM_SPLITS=num_splits,
        num_warps=num_warps,
        num_stages=num_stages,
        **shape,
    )
    if num_splits > 1:
        _combine_kernel[(num_rows, heads * tiles)](
            workspace.partial, workspace.partial_lse, key_length_R, y_RCHE, NUM_SPLITS=num_splits, **shape
        )
    return y_RCHE
