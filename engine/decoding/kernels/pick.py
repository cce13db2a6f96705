"""Which positions each row commits, in one launch; the slow twin is `policies.pick`.

Shapes: R rows, C canvas positions, K picks a row, N lanes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..policies import Picks, policy_id

_THRESHOLD = tl.constexpr(policy_id("threshold"))
_FACTOR = tl.constexpr(policy_id("factor"))
_ENTROPY_BOUND = tl.constexpr(policy_id("entropy_bound"))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _pick_kernel(
    confidence_ptr,
    entropy_ptr,
    finite_ptr,
    masked_ptr,
    position_ptr,
    quota_ptr,
    lane_ptr,
    policy_ptr,
    parameter_ptr,
    pick_ptr,
    is_pick_ptr,
    picked_position_ptr,
    picked_confidence_ptr,
    row_finite_ptr,
    num_picks,
    CANVAS: tl.constexpr,
    PADDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offset = tl.arange(0, PADDED)
    exists = offset < CANVAS
    at = row * CANVAS + offset
    is_finite = tl.min(tl.load(finite_ptr + at, mask=exists, other=1).to(tl.int32), axis=0)
    tl.store(row_finite_ptr + row, is_finite != 0)
    confidence = tl.load(confidence_ptr + at, mask=exists, other=0.0)
    masked = tl.load(masked_ptr + at, mask=exists, other=0).to(tl.int32)
    # A confidence is a probability, so other positions come behind all masked ones.
    rank_key = tl.where(masked != 0, confidence, tl.where(exists, -1.0, -2.0))
    is_before = (rank_key[None, :] > rank_key[:, None]) | (
        (rank_key[None, :] == rank_key[:, None]) & (offset[None, :] < offset[:, None])
    )
    rank = tl.sum(is_before.to(tl.int32), axis=1)
    # Everything below is in order of rank: the position with rank r is picked out of each row r of a matrix.
    is_there = rank[None, :] == offset[:, None]
    order = tl.sum(tl.where(is_there, offset[None, :], 0), axis=1)
    is_masked = tl.sum(tl.where(is_there, masked[None, :], 0), axis=1) != 0
    ranked = tl.sum(tl.where(is_there, rank_key[None, :], 0.0), axis=1)
    entropy = tl.load(entropy_ptr + at, mask=exists, other=0.0)
    entropy = tl.sum(tl.where(is_there, entropy[None, :], 0.0), axis=1).to(tl.float64)
    lane = tl.load(lane_ptr + row)
    policy, parameter = tl.load(policy_ptr + lane), tl.load(parameter_ptr + lane)
    count = offset + 1
    is_within = is_masked
    if policy == _THRESHOLD:
        is_within = is_masked & (ranked > parameter)
    elif policy == _FACTOR:
        is_within = is_masked & ((count + 1) * (1.0 - ranked) < parameter)
    elif policy == _ENTROPY_BOUND:
        largest = tl.associative_scan(entropy, 0, _larger)
        is_within = is_masked & (tl.cumsum(entropy, axis=0) - largest <= parameter.to(tl.float64))
    allowed = tl.maximum(tl.max(tl.where(is_within, count, 0), axis=0), 1)
    allowed = tl.minimum(allowed, tl.load(quota_ptr + row) * is_finite)
    to = row * num_picks + offset
    is_asked = offset < num_picks
    tl.store(pick_ptr + to, order.to(tl.int64), mask=is_asked)
    tl.store(is_pick_ptr + to, is_masked & (count <= allowed), mask=is_asked)
    position = tl.load(position_ptr + row * CANVAS + order, mask=exists, other=0)
    tl.store(picked_position_ptr + to, position, mask=is_asked)
    picked = tl.load(confidence_ptr + row * CANVAS + order, mask=exists, other=0.0)
    tl.store(picked_confidence_ptr + to, picked, mask=is_asked)


def pick(
    confidence_RC: Tensor,
    entropy_RC: Tensor,
    is_finite_RC: Tensor,
    masked_RC: Tensor,
    position_RC: Tensor,
    quota_R: Tensor,
    lane_R: Tensor,
    policy_N: Tensor,
    parameter_N: Tensor,
    num_picks: int,
) -> Picks:
    """See `policies.pick`."""
    num_rows, canvas = confidence_RC.shape
    num_picks = min(num_picks, canvas)
    given = (confidence_RC, entropy_RC, is_finite_RC, masked_RC, position_RC, quota_R, lane_R)
    assert all(tensor.is_contiguous() for tensor in given)
    pick_RK = torch.empty(num_rows, num_picks, dtype=torch.int64, device=confidence_RC.device)
    is_pick_RK, position_RK = torch.empty_like(pick_RK, dtype=torch.bool), torch.empty_like(pick_RK)
    confidence_RK = torch.empty_like(pick_RK, dtype=torch.float32)
    is_finite_R = torch.empty_like(quota_R, dtype=torch.bool)
    _pick_kernel[(num_rows,)](
        *given,
        policy_N,
        parameter_N,
        pick_RK,
        is_pick_RK,
        position_RK,
        confidence_RK,
        is_finite_R,
        num_picks,
        CANVAS=canvas,
        PADDED=triton.next_power_of_2(canvas),
        num_warps=4,
    )
    return Picks(pick_RK, is_pick_RK, position_RK, confidence_RK, is_finite_R)
