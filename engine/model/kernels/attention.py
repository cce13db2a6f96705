"""Paged block attention in Triton; the slow twin is `engine.model.attention.paged_attention_by_row`.

A program takes the queries of one or more heads of one row and walks that row's pages. A tile of keys is a page,
complete or absent, save the row's own last one. Long rows are split, as `engine.model.attention` says: by the row's
own length, so a row's result is the same whatever else is in the batch.

Shapes: R rows, C canvas positions, H query heads, G KV heads, E head width, P pages, B page table length.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..attention import MAX_SPLITS, PAGES_PER_SPLIT
from ..tuning import AttentionSettings
from .overlap import allow_next, launch_options, wait_for_previous

_QUERIES = 64
_COMBINED_QUERIES = 4
_DEFAULT = AttentionSettings()


@triton.jit
def _pages_per_split(num_pages, PAGES: tl.constexpr, SPLITS: tl.constexpr):
    return tl.maximum(PAGES, tl.cdiv(num_pages, SPLITS))


@triton.jit
def _attend_kernel(
    q_ptr,
    k_in,
    v_in,
    page_table_ptr,
    key_length_ptr,
    y_ptr,
    partial_ptr,
    partial_lse_ptr,
    num_done_ptr,
    scale_log2,
    table_length,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    QUERIES: tl.constexpr,
    TAKEN: tl.constexpr,
    STEP: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    COMBINES: tl.constexpr,
    USES_TMA: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    allow_next(OVERLAPS)
    wait_for_previous(OVERLAPS)
    row, split, num_splits = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    first_head = tl.program_id(1) % (HEADS // TAKEN) * TAKEN
    tile = tl.program_id(1) // (HEADS // TAKEN)
    place = row * tl.num_programs(1) + tl.program_id(1)
    key_length = tl.load(key_length_ptr + row).to(tl.int32)
    num_pages = tl.cdiv(key_length, PAGE)
    split_pages = _pages_per_split(num_pages, SPLIT, SPLITS)
    first = split * split_pages
    if first < num_pages:
        last = tl.minimum(first + split_pages, num_pages)
        group = first_head // (HEADS // GROUPS)
        lane = tl.arange(0, TAKEN * QUERIES)
        query, head = tile * QUERIES + lane % QUERIES, first_head + lane // QUERIES
        slot = tl.arange(0, STEP * PAGE)
        column = tl.arange(0, WIDTH)
        y_offset = ((row * PAGE + query) * HEADS + head)[:, None] * WIDTH + column[None, :]
        q = tl.load(q_ptr + y_offset)
        top = tl.full((TAKEN * QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((TAKEN * QUERIES,), tl.float32)
        mixed = tl.zeros((TAKEN * QUERIES, WIDTH), tl.float32)
        # A step ahead of its use: keys and values cannot be asked for before it is known where they are.
        block = first if STEP == 1 else tl.minimum(first + slot // PAGE, last - 1)
        next_page = tl.load(page_table_ptr + row * table_length + block)
        for index in range(first, last, STEP):
            page = next_page
            # The step may reach past the last page; its keys are masked, but have to be numbers.
            block = tl.minimum(index + STEP if STEP == 1 else index + STEP + slot // PAGE, last - 1)
            next_page = tl.load(page_table_ptr + row * table_length + block)
            if USES_TMA:
                k = k_in.load([page.to(tl.int32) * PAGE, group * WIDTH])
            else:
                kv_offset = ((page * PAGE + slot % PAGE) * GROUPS + group)[:, None] * WIDTH + column[None, :]
                k = tl.load(k_in + kv_offset)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            scores = tl.where((index * PAGE + slot < key_length)[None, :], scores, float("-inf"))
            if STEP > 1:
                scores = tl.where((index * PAGE + slot < last * PAGE)[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1) * scale_log2)
            weights = tl.exp2(scores * scale_log2 - new_top[:, None])
            rescale = tl.exp2(top - new_top)
            total = total * rescale + tl.sum(weights, axis=1)
            if USES_TMA:
                v = v_in.load([page.to(tl.int32) * PAGE, group * WIDTH])
            else:
                v = tl.load(v_in + kv_offset)
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
                if COMBINES:
                    own_splits = tl.cdiv(num_pages, split_pages)
                    # All threads have written before one of them counts the program as done.
                    tl.debug_barrier()
                    counter = num_done_ptr + place
                    if tl.atomic_add(counter, 1, sem="acq_rel") == own_splits - 1:
                        tl.debug_barrier()
                        # In the order of the splits, whichever program came last.
                        top = tl.full((TAKEN * QUERIES,), float("-inf"), tl.float32)
                        total = tl.zeros((TAKEN * QUERIES,), tl.float32)
                        mixed = tl.zeros((TAKEN * QUERIES, WIDTH), tl.float32)
                        for other in range(0, own_splits):
                            partial = ((row * num_splits + other) * PAGE + query) * HEADS + head
                            lse = tl.load(partial_lse_ptr + partial, cache_modifier=".cg")
                            offset = partial[:, None] * WIDTH + column[None, :]
                            part = tl.load(partial_ptr + offset, cache_modifier=".cg")
                            new_top = tl.maximum(top, lse)
                            rescale, weight = tl.exp2(top - new_top), tl.exp2(lse - new_top)
                            mixed = mixed * rescale[:, None] + part * weight[:, None]
                            total = total * rescale + weight
                            top = new_top
                        tl.store(y_ptr + y_offset, (mixed / total[:, None]).to(y_ptr.dtype.element_ty))
                        tl.store(counter, 0)
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
    OVERLAPS: tl.constexpr,
):
    allow_next(OVERLAPS)
    wait_for_previous(OVERLAPS)
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
        tiles = page // min(page, _QUERIES)
        self.num_done = torch.zeros(num_rows * heads * tiles, dtype=torch.int32, device=device)
        """Splits that are done of each row, heads and queries that programs share; zero between two calls."""


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
    taken = math.gcd(settings.heads_per_program, heads // groups)
    y_RCHE = torch.empty_like(q_RCHE)
    programs, num_splits = heads // taken * (page // queries), workspace.num_splits
    combines = settings.combines_inside
    shape = {"HEADS": heads, "WIDTH": width, "PAGE": page, "SPLIT": PAGES_PER_SPLIT, "SPLITS": MAX_SPLITS}
    _attend_kernel[(num_rows, programs, num_splits)](
        q_RCHE,
        _pages(k_PCGE, settings),
        _pages(v_PCGE, settings),
        page_table_RB,
        key_length_R,
        y_RCHE,
        workspace.partial,
        workspace.partial_lse,
        workspace.num_done,
        scale_log2=1.4426950408889634 / width**0.5,
        table_length=page_table_RB.stride(0),
        GROUPS=groups,
        QUERIES=queries,
        TAKEN=taken,
        STEP=settings.pages_per_step,
        IS_SPLIT=num_splits > 1,
        COMBINES=combines,
        USES_TMA=settings.uses_tma,
        num_warps=settings.num_warps,
        num_stages=settings.num_stages,
        **shape,
        **launch_options(overlaps),
    )
    if num_splits > 1 and not combines:
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
            **launch_options(overlaps),
        )
    return y_RCHE


def _pages(pages_PCGE: Tensor, settings: AttentionSettings) -> Tensor | TensorDescriptor:
    """Keys or values as the kernel loads them."""
    if not settings.uses_tma:
        return pages_PCGE
    assert settings.pages_per_step == 1, f"pages lie apart, so a tile is one page, not {settings.pages_per_step}"
    num_pages, page, groups, width = pages_PCGE.shape
    return TensorDescriptor.from_tensor(pages_PCGE.view(num_pages * page, groups * width), [page, width])
