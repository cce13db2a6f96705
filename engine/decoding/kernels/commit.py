"""Commits into the lanes in two launches; the slow twin is `Lanes.commit`.

Shapes: R rows, C canvas positions, K picks a row, N lanes, S positions of a whole context, D model width, V vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 1024


@triton.jit
def _write_kernel(
    lane_ptr,
    position_ptr,
    hidden_ptr,
    pick_ptr,
    token_ptr,
    is_commit_ptr,
    token_ids_ptr,
    present_ptr,
    is_end_ptr,
    kept_ptr,
    num_committed_ptr,
    end_ptr,
    num_picks,
    context,
    lane_stride,
    width,
    CANVAS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    pick, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(is_commit_ptr + pick) == 0:
        return
    row = pick // num_picks
    offset = tl.load(pick_ptr + pick)
    lane = tl.load(lane_ptr + row)
    position = tl.load(position_ptr + row * CANVAS + offset)
    # Kept for this canvas and the one before.
    slot = position % (2 * CANVAS)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    hidden = tl.load(hidden_ptr + (row * CANVAS + offset) * width + column, mask=column < width)
    tl.store(kept_ptr + (lane * 2 * CANVAS + slot) * width + column, hidden, mask=column < width)
    if part == 0:
        token = tl.load(token_ptr + pick)
        tl.store(token_ids_ptr + lane * context + position, token)
        tl.store(present_ptr + lane * lane_stride + token, 1)
        tl.atomic_add(num_committed_ptr + lane, tl.full((), 1, tl.int64), sem="relaxed")
        if tl.load(is_end_ptr + lane * lane_stride + token):
            tl.atomic_min(end_ptr + lane, position, sem="relaxed")


@triton.jit
def _end_kernel(
    lane_ptr,
    position_ptr,
    token_ids_ptr,
    present_ptr,
    end_ptr,
    limit_ptr,
    context,
    lane_stride,
    eos_token_id,
    CANVAS: tl.constexpr,
    PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.load(lane_ptr + row)
    end, limit = tl.load(end_ptr + lane), tl.load(limit_ptr + lane)
    if end < limit:
        offset = tl.arange(0, PADDED)
        position = tl.load(position_ptr + row * CANVAS + offset, mask=offset < CANVAS, other=0)
        is_past = (offset < CANVAS) & (position > end) & (position < limit)
        place = token_ids_ptr + lane * context + position
        token = tl.load(place, mask=is_past, other=0)
        is_lost = is_past & (token != eos_token_id)
        if tl.sum(is_lost.to(tl.int32), axis=0) > 0:
            eos = tl.full((PADDED,), 0, tl.int64) + eos_token_id
            tl.store(place, eos, mask=is_past)
            gone = tl.zeros((PADDED,), tl.int8)
            tl.store(present_ptr + lane * lane_stride + token, gone, mask=is_lost)
            # Those that stand elsewhere too are still there: all are marked anew, once a text.
            tl.debug_barrier()
            for start in range(0, context, COLUMNS):
                at = start + tl.arange(0, COLUMNS)
                left = tl.load(token_ids_ptr + lane * context + at, mask=at < limit, other=0)
                there = tl.full((COLUMNS,), 1, tl.int8)
                tl.store(present_ptr + lane * lane_stride + left, there, mask=at < limit)


def commit(
    lane_R: Tensor,
    position_RC: Tensor,
    hidden_RCD: Tensor,
    pick_RK: Tensor,
    token_RK: Tensor,
    is_commit_RK: Tensor,
    *,
    token_ids_NS: Tensor,
    present_NV: Tensor,
    is_end_NV: Tensor,
    hidden_NCD: Tensor,
    num_committed_N: Tensor,
    end_N: Tensor,
    limit_N: Tensor,
    eos_token_id: int,
) -> None:
    """See `Lanes.commit`. What is no commit writes nothing. `present_NV` and `is_end_NV` have one stride."""
    num_rows, canvas, width = hidden_RCD.shape
    assert hidden_NCD.shape[1] == 2 * canvas, hidden_NCD.shape
    num_picks = pick_RK.shape[1]
    context = token_ids_NS.shape[1]
    given = (lane_R, position_RC, hidden_RCD, pick_RK, token_RK, is_commit_RK, token_ids_NS, hidden_NCD)
    assert all(tensor.is_contiguous() for tensor in given) and present_NV.stride() == is_end_NV.stride()
    _write_kernel[(num_rows * num_picks, triton.cdiv(width, _COLUMNS))](
        lane_R,
        position_RC,
        hidden_RCD,
        pick_RK,
        token_RK,
        is_commit_RK,
        token_ids_NS,
        present_NV,
        is_end_NV,
        hidden_NCD,
        num_committed_N,
        end_N,
        num_picks,
        context,
        present_NV.stride(0),
        width,
        CANVAS=canvas,
        COLUMNS=_COLUMNS,
        num_warps=4,
    )
    _end_kernel[(num_rows,)](
        lane_R,
        position_RC,
        token_ids_NS,
        present_NV,
        end_N,
        limit_N,
        context,
        present_NV.stride(0),
        eos_token_id,
        CANVAS=canvas,
        PADDED=triton.next_power_of_2(canvas),
        COLUMNS=_COLUMNS,
        num_warps=1,
    )
