"""Confidence and entropy of every masked position in one reading of the logits.

Applies suppression, bias, repetition penalty and bans on the fly and keeps only sums, so no adjusted copy of
R * C * V logits is ever written. The slow twin is `sampler.confidence`.

A program takes a few masked positions of a row and a slice of the vocabulary: the lane's vectors, which together are
longer than a position's logits, are read once for all of its positions.

Shapes: R rows, C canvas positions, V vocabulary, W logits' row length (V padded), S slices of the vocabulary,
P positions of a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..sampler import Adjustment

SLICE = 2048
COLUMNS = 256
"""Read at once: what one warp takes in loads of 16 bytes, so that sums stay within a warp."""
POSITIONS = 8
NUM_WARPS = 4

_FLOOR = tl.constexpr(-3e38)
"""Below every logit that a choice could be made from, and finite: differences with it are not NaN."""


@triton.jit
def _slice_kernel(
    logits_ptr,
    masked_ptr,
    position_ptr,
    lane_ptr,
    offset_ptr,
    present_ptr,
    penalty_ptr,
    is_end_ptr,
    first_end_ptr,
    banned_ptr,
    top_ptr,
    total_ptr,
    moment_ptr,
    lane_stride,
    vocab_size,
    row_length,
    num_slices,
    CANVAS: tl.constexpr,
    PADDED_CANVAS: tl.constexpr,
    POSITIONS: tl.constexpr,
    SLICE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    piece, group = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    offset_C = tl.arange(0, PADDED_CANVAS)
    masked_C = tl.load(masked_ptr + row * CANVAS + offset_C, mask=offset_C < CANVAS, other=0).to(tl.int32)
    if group * POSITIONS >= tl.sum(masked_C, axis=0):
        return
    # The masked positions with ranks from group * POSITIONS on; -1 where there are not so many.
    rank_P = group * POSITIONS + tl.arange(0, POSITIONS)
    is_mine_PC = (masked_C != 0)[None, :] & ((tl.cumsum(masked_C, axis=0) - 1)[None, :] == rank_P[:, None])
    place_P = tl.max(tl.where(is_mine_PC, offset_C[None, :], -1), axis=1)
    exists_P = place_P >= 0
    token_P = row * CANVAS + tl.maximum(place_P, 0)
    lane = tl.load(lane_ptr + row)
    penalty = tl.load(penalty_ptr + lane)
    is_early_P = tl.load(position_ptr + token_P) < tl.load(first_end_ptr + lane)
    # Of each column of all tiles on its own, to be joined at the end: a reduction in every round would cost more.
    top = tl.full((POSITIONS, COLUMNS), _FLOOR, tl.float32)
    total = tl.zeros((POSITIONS, COLUMNS), tl.float32)
    moment = tl.zeros((POSITIONS, COLUMNS), tl.float32)
    for start in range(piece * SLICE, piece * SLICE + SLICE, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        # Rows are as long as their strides say. Masks at those, which 16 divides, leave loads wide.
        is_padded = column < lane_stride
        exists = column < vocab_size
        at = lane * lane_stride + column
        is_banned = tl.load(banned_ptr + column, mask=is_padded, other=1) != 0
        offset = tl.load(offset_ptr + at, mask=is_padded, other=0.0)
        offset = tl.where(exists & (is_banned == 0), offset, float("-inf"))
        is_end = tl.load(is_end_ptr + at, mask=is_padded, other=0) != 0
        is_present = tl.load(present_ptr + at, mask=is_padded, other=0) != 0
        shrinks = tl.where(is_present, 1.0 / penalty, 1.0)
        grows = tl.where(is_present, penalty, 1.0)
        raw = tl.load(
            logits_ptr + token_P[:, None] * row_length + column[None, :],
            mask=exists_P[:, None] & (column < row_length)[None, :],
            other=0.0,
        ).to(tl.float32)
        raw = tl.where(exists[None, :], raw, 0.0)
        # NaN makes the total NaN, plus infinity becomes the top; minus infinity would look like a banned token.
        raw = tl.where(raw == float("-inf"), float("nan"), raw)
        early_offset = tl.where(is_end, float("-inf"), offset)
        value = raw + tl.where(is_early_P[:, None], early_offset[None, :], offset[None, :])
        value = value * tl.where(value > 0, shrinks[None, :], grows[None, :])
        # Whichever is less is rescaled, by one and the same exponential.
        difference = value - top
        factor = tl.exp(-tl.abs(difference))
        is_larger = difference > 0
        is_counted = value > float("-inf")
        lesser = tl.where(is_counted, difference * factor, 0.0)
        moment = tl.where(is_larger, (moment - total * difference) * factor, moment + lesser)
        total = tl.where(is_larger, total * factor + 1.0, total + factor)
        top = tl.where(is_larger, value, top)
    slice_top = tl.max(top, axis=1)
    below = top - slice_top[:, None]
    factor = tl.exp(below)
    slice_moment = tl.sum((moment + total * below) * factor, axis=1)
    index = token_P * num_slices + piece
    tl.store(top_ptr + index, slice_top, mask=exists_P)
    tl.store(total_ptr + index, tl.sum(total * factor, axis=1), mask=exists_P)
    tl.store(moment_ptr + index, slice_moment, mask=exists_P)


@triton.jit
def _join_kernel(
    masked_ptr,
    top_ptr,
    total_ptr,
    moment_ptr,
    confidence_ptr,
    entropy_ptr,
    finite_ptr,
    num_slices,
    PADDED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    confidence = 0.0
    entropy = 0.0
    is_finite = True
    if tl.load(masked_ptr + token):
        piece = tl.arange(0, PADDED)
        exists = piece < num_slices
        index = token * num_slices + piece
        tops = tl.load(top_ptr + index, mask=exists, other=_FLOOR)
        totals = tl.load(total_ptr + index, mask=exists, other=0.0)
        moments = tl.load(moment_ptr + index, mask=exists, other=0.0)
        top = tl.max(tops, axis=0)
        below = tl.where(totals == 0, 0.0, tops - top)
        factor = tl.where(totals == 0, 0.0, tl.exp(below))
        total = tl.sum(totals * factor, axis=0)
        # Where everything is banned there is no token to choose. A comparison with NaN is false.
        is_finite = (total < float("inf")) & (top < float("inf")) & (top > _FLOOR)
        if is_finite:
            confidence = 1.0 / total
            entropy = tl.log(total) - tl.sum((moments + totals * below) * factor, axis=0) / total
    tl.store(confidence_ptr + token, confidence)
    tl.store(entropy_ptr + token, entropy)
    tl.store(finite_ptr + token, is_finite)


def confidence(
    logits_RCW: Tensor,
    masked_RC: Tensor,
    position_RC: Tensor,
    adjustment: Adjustment,
    *,
    slice_size: int = SLICE,
    columns: int = COLUMNS,
    num_positions: int = POSITIONS,
    num_warps: int = NUM_WARPS,
) -> tuple[Tensor, Tensor, Tensor]:
    """confidence_RC, entropy_RC (float32) and is_finite_RC (bool); see `sampler.confidence`.

    A program takes `num_positions` positions and `slice_size` columns, a multiple of `columns`; powers of two all.
    """
    num_rows, canvas, row_length = logits_RCW.shape
    vocab_size = adjustment.vocab_size
    num_slices = triton.cdiv(vocab_size, slice_size)
    device = logits_RCW.device
    assert all(tensor.is_contiguous() for tensor in (logits_RCW, masked_RC, position_RC))
    top = torch.empty(num_rows, canvas, num_slices, dtype=torch.float32, device=device)
    total, moment = torch.empty_like(top), torch.empty_like(top)
    confidence_RC = torch.empty(num_rows, canvas, dtype=torch.float32, device=device)
    entropy_RC = torch.empty_like(confidence_RC)
    is_finite_RC = torch.empty_like(confidence_RC, dtype=torch.bool)
    _slice_kernel[(num_slices, triton.cdiv(canvas, num_positions), num_rows)](
        logits_RCW,
        masked_RC,
        position_RC,
        adjustment.lane_R,
        adjustment.offset_NV,
        adjustment.present_NV,
        adjustment.penalty_N,
        adjustment.is_end_NV,
        adjustment.first_end_N,
        adjustment.banned_V,
        top,
        total,
        moment,
        adjustment.lane_stride,
        vocab_size,
        row_length,
        num_slices,
        CANVAS=canvas,
        PADDED_CANVAS=triton.next_power_of_2(canvas),
        POSITIONS=num_positions,
        SLICE=slice_size,
        COLUMNS=columns,
        num_warps=num_warps,
    )
    _join_kernel[(num_rows * canvas,)](
        masked_RC,
        top,
        total,
        moment,
        confidence_RC,
        entropy_RC,
        is_finite_RC,
        num_slices,
        PADDED=triton.next_power_of_2(num_slices),
        num_warps=1,
    )
    return confidence_RC, entropy_RC, is_finite_RC
