"""Paged block attention in Triton; the slow twin is `engine.model.attention.paged_attention_by_row`.

A program takes the queries of one head of one row and walks that row's pages. A tile of keys is a page, complete or
absent, save the row's own last one. Long rows are split, as `engine.model.attention` says: by the row's
own length, so a row's result is the same whatever else is in the batch.

Shapes: R rows, C canvas positions, H query heads, G KV heads, E head width, P pages, B page table length.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention import MAX_SPLITS, PAGES_PER_SPLIT
from ..tuning import AttentionSettings
from .overlap import allow_next, launch_options, wait_for_previous

_QUERIES = 64
_COMBINED_QUERIES = 4
_DEFAULT = AttentionSettings()


@triton.jit
def _pages_per_split(num_pages, PAGES: tl.constexpr, SPLITS: tl.constexpr):
    """The rule of `num_splits_for`, which has the reason."""
    return tl.maximum(PAGES, tl.cdiv(num_pages, SPLITS))


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
    SPLITS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    allow_next(OVERLAPS)
    wait_for_previous(OVERLAPS)
    row, split, num_splits = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    head, tile = tl.program_id(1) % HEADS, tl.program_id(1) // HEADS
    key_length = tl.load(key_length_ptr + row).to(tl.int32)
    num_pages = tl.cdiv(key_length, PAGE)
    split_pages = _pages_per_split(num_pages, SPLIT, SPLITS)
    first = split * split_pages
    if first < num_pages:
        last = tl.minimum(first + split_pages, num_pages)
        group = head // (HEADS // GROUPS)
        query = tile * QUERIES + tl.arange(0, QUERIES)
        slot = tl.arange(0, PAGE)
        column = tl.arange(0, WIDTH)
        y_offset = ((row * PAGE + query) * HEADS + head)[:, None] * WIDTH + column[None, :]
        q = tl.load(q_ptr + y_offset)
        top = tl.full((QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        mixed = tl.zeros((QUERIES, WIDTH), tl.float32)
        # A step ahead of its use: keys and values cannot be asked for before it is known where they are.
        next_page = tl.load(page_table_ptr + row * table_length + first)
        for index in range(first, last):
            page = next_page
            next_page = tl.load(page_table_ptr + row * table_length + tl.minimum(index + 1, last - 1))
            kv_offset = ((page * PAGE + slot) * GROUPS + group)[:, None] * WIDTH + column[None, :]
            k = tl.load(k_ptr + kv_offset)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            scores = tl.where((index * PAGE + slot < key_length)[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1) * scale_log2)
            weights = tl.exp2(scores * scale_log2 - new_top[:, None])
            rescale = tl.exp2(top - new_top)
            total = total * rescale + tl.sum(weights, axis=1)
            v = tl.load(v_ptr + kv_offset)
            mixed = tl.dot(weights.to(v.dtype), v, mixed * rescale[:, None], input_precision="ieee")
            top = new_top
        mixed = mixed / total[:, None]
        if IS_SPLIT:
            if num_pages <= split_pages:
                tl.store(y_ptr + y_offset, mixed.to(y_ptr.dtype.element_ty))
            else:
                partial = ((row * num_splits + split) * PAGE + query) * HEADS + head
                tl.store(partial_ptr + partial[:, None] * WIDTH + column[None, :], mixed)
                tl.store(partial_lse_ptr + partial, top + tl.log2(total))
        else:
            tl.store(y_ptr + y_offset, mixed.to(y_ptr.dtype.element_ty))


@triton.jit
def _combine_kernel(
    partial_ptr,
    partial_lse_ptr,
    key_length_ptr,
    y_ptr,
    num_splits,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    QUERIES: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
):
    row = tl.program_id(0)
    num_pages = tl.cdiv(tl.load(key_length_ptr + row).to(tl.int32), PAGE)
    split_pages = _pages_per_split(num_pages, SPLIT, SPLITS)
    if num_pages > split_pages:
        # Queries and heads are neighbours in memory, and all the same to this kernel.
        vector = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
        column = tl.arange(0, WIDTH)
        split = tl.arange(0, PADDED_SPLITS)
        exists = (split < tl.cdiv(num_pages, split_pages))[:, None]
        source = (row * num_splits + split)[:, None] * (PAGE * HEADS) + vector[None, :]
        lse = tl.load(partial_lse_ptr + source, mask=exists, other=float("-inf"))
        weight = tl.exp2(lse - tl.max(lse, axis=0)[None, :])
        offset = source[:, :, None] * WIDTH + column[None, None, :]
        part = tl.load(partial_ptr + offset, mask=exists[:, :, None], other=0.0)
        mixed = tl.sum(part * weight[:, :, None], axis=0) / tl.sum(weight, axis=0)[:, None]
        y_offset = (row * PAGE * HEADS + vector)[:, None] * WIDTH + column[None, :]
        tl.store(y_ptr + y_offset, mixed.to(y_ptr.dtype.element_ty))


class AttentionWorkspace:
    """Partial results of split rows, shared by all layers of a pass."""

    def __init__(self, num_rows: int, num_splits: int, page: int, heads: int, width: int, device: torch.device) -> None:
        self.num_splits = num_splits
        shape = (num_rows, num_splits, page, heads) if num_splits > 1 else (1,)
        self.partial = torch.empty(*shape, width, dtype=torch.float32, device=device)
        self.partial_lse = torch.empty(shape, dtype=torch.float32, device=device)


def paged_attention(
    q_RCHE: Tensor,
    k_PCGE: Tensor,
    v_PCGE: Tensor,
    page_table_RB: Tensor,
    key_length_R: Tensor,
    workspace: AttentionWorkspace,
    settings: AttentionSettings = _DEFAULT,
    *,
    overlaps: bool = False,
) -> Tensor:
    """Attention of each row to its own pages, y_RCHE in q's dtype. All tensors contiguous.

    `workspace` must have been made for `num_splits_for` the longest row, or more.
    """
    num_rows, page, heads, width = q_RCHE.shape
    groups = k_PCGE.shape[2]
    queries = min(page, _QUERIES)
    y_RCHE = torch.empty_like(q_RCHE)
    num_splits = workspace.num_splits
    shape = {"HEADS": heads, "WIDTH": width, "PAGE": page, "SPLIT": PAGES_PER_SPLIT, "SPLITS": MAX_SPLITS}
    _attend_kernel[(num_rows, heads * (page // queries), num_splits)](
        q_RCHE,
        k_PCGE,
        v_PCGE,
        page_table_RB,
        key_length_R,
        y_RCHE,
        workspace.partial,
        workspace.partial_lse,
        scale_log2=1.4426950408889634 / width**0.5,
        table_length=page_table_RB.stride(0),
        GROUPS=groups,
        QUERIES=queries,
        IS_SPLIT=num_splits > 1,
        num_warps=settings.num_warps,
        num_stages=settings.num_stages,
        **shape,
        **launch_options(overlaps),
    )
    if num_splits > 1:
        _combine_kernel[(num_rows, page * heads // _COMBINED_QUERIES)](
            workspace.partial,
            workspace.partial_lse,
            key_length_R,
            y_RCHE,
            num_splits=num_splits,
            QUERIES=_COMBINED_QUERIES,
            PADDED_SPLITS=triton.next_power_of_2(MAX_SPLITS),
            num_warps=4,
            **shape,
        )
    return y_RCHE
