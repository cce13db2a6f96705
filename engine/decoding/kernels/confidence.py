"""Confidence of every masked position in one reading of the logits.

Applies suppression, bias, repetition penalty and bans on the fly and keeps only sums, so no adjusted copy of
R * C * V logits is ever written. The slow twin is `sampler.adjusted_logits` followed by `sampler.confidence`.

Shapes: R rows, C canvas positions, V vocabulary, W logits' row length (V padded), S slices of the vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_SLICE = 4096
_COLUMNS = 1024


@triton.jit
def _slice_kernel(
    logits_ptr,
    masked_ptr,
    position_ptr,
    first_end_ptr,
    offset_ptr,
    present_ptr,
    penalty_ptr,
    banned_ptr,
    is_end_ptr,
    top_ptr,
    total_ptr,
    bad_ptr,
    vocab_size,
    row_length,
    num_slices,
    PAGE: tl.constexpr,
    SLICE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    if tl.load(masked_ptr + token):
        row = token // PAGE
        penalty = tl.load(penalty_ptr + row)
        is_early = tl.load(position_ptr + token) < tl.load(first_end_ptr + row)
        top = float("-inf")
        total = 0.0
        num_bad = 0
        for start in range(piece * SLICE, piece * SLICE + SLICE, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            exists = column < vocab_size
            raw = tl.load(logits_ptr + token * row_length + column, mask=exists, other=0.0).to(tl.float32)
            # NaN compares unequal to itself and an infinity exceeds every float.
            is_bad = exists & ((raw != raw) | (tl.abs(raw) > 3.4e38))
            num_bad += tl.sum(is_bad.to(tl.int32), axis=0)
            value = raw + tl.load(offset_ptr + row * vocab_size + column, mask=exists, other=0.0)
            is_present = tl.load(present_ptr + row * vocab_size + column, mask=exists, other=0) != 0
            factor = tl.where(is_present, penalty, 1.0)
            value = tl.where(value > 0, value / factor, value * factor)
            is_banned = tl.load(banned_ptr + column, mask=exists, other=1) != 0
            is_end = tl.load(is_end_ptr + row * vocab_size + column, mask=exists, other=0) != 0
            value = tl.where(exists & ~(is_banned | (is_end & is_early)) & (value == value), value, float("-inf"))
            new_top = tl.maximum(top, tl.max(value, axis=0))
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            total = total * tl.exp(top - shift) + tl.sum(tl.exp(value - shift), axis=0)
            top = new_top
        index = token * num_slices + piece
        tl.store(top_ptr + index, top)
        tl.store(total_ptr + index, total)
        tl.store(bad_ptr + index, num_bad)


@triton.jit
def _join_kernel(masked_ptr, top_ptr, total_ptr, bad_ptr, confidence_ptr, finite_ptr, num_slices, PADDED: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    confidence = 0.0
    is_finite = True
    if tl.load(masked_ptr + token):
        piece = tl.arange(0, PADDED)
        exists = piece < num_slices
        index = token * num_slices + piece
        tops = tl.load(top_ptr + index, mask=exists, other=float("-inf"))
        totals = tl.load(total_ptr + index, mask=exists, other=0.0)
        num_bad = tl.sum(tl.load(bad_ptr + index, mask=exists, other=0), axis=0)
        top = tl.max(tops, axis=0)
        # Where everything is banned there is no token to choose.
        is_finite = (num_bad == 0) & (tl.abs(top) < 3.4e38)
        shift = tl.where(is_finite, top, 0.0)
        total = tl.sum(totals * tl.exp(tops - shift), axis=0)
        confidence = tl.where(is_finite, 1.0 / total, 0.0)
    tl.store(confidence_ptr + token, confidence)
    tl.store(finite_ptr + token, is_finite)


def confidence(
    logits_RCW: Tensor,
    masked_RC: Tensor,
    position_RC: Tensor,
    first_end_R: Tensor,
    offset_RV: Tensor,
    present_RV: Tensor,
    penalty_R: Tensor,
    banned_V: Tensor,
    is_end_RV: Tensor,
) -> tuple[Tensor, Tensor]:
    """Largest probability after penalties and bans, confidence_RC (float32), and is_finite_RC (bool).

    Zero and True at positions that are not masked; zero and False where a raw logit is not finite or nothing may be
    chosen. `logits_RCW` may be padded beyond the vocabulary of `offset_RV`.
    """
    num_rows, page, row_length = logits_RCW.shape
    vocab_size = offset_RV.shape[1]
    num_slices = triton.cdiv(vocab_size, _SLICE)
    device = logits_RCW.device
    top = torch.empty(num_rows, page, num_slices, dtype=torch.float32, device=device)
    total, bad = torch.empty_like(top), torch.empty_like(top, dtype=torch.int32)
    confidence_RC = torch.empty(num_rows, page, dtype=torch.float32, device=device)
    is_finite_RC = torch.empty(num_rows, page, dtype=torch.bool, device=device)
    _slice_kernel[(num_rows * page, num_slices)](
        logits_RCW,
        masked_RC,
        position_RC,
        first_end_R,
        offset_RV,
        present_RV,
        penalty_R,
        banned_V,
        is_end_RV,
        top,
        total,
        bad,
        vocab_size,
        row_length,
        num_slices,
        PAGE=page,
        SLICE=_SLICE,
        COLUMNS=_COLUMNS,
        num_warps=4,
    )
    _join_kernel[(num_rows * page,)](
        masked_RC,
        top,
        total,
        bad,
        confidence_RC,
        is_finite_RC,
        num_slices,
        PADDED=triton.next_power_of_2(num_slices),
        num_warps=1,
    )
    return confidence_RC, is_finite_RC
