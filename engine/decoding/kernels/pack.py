"""What the host reads of a pass, gathered into one tensor in one launch; the slow twin is `policies.pack`.

Shapes: R rows, K picks a row, N lanes, F fields of a pick.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..policies import NUM_FIELDS, Picks
from ..sampler import Chosen


@triton.jit
def _pack_kernel(
    position_ptr,
    token_ptr,
    is_commit_ptr,
    confidence_ptr,
    target_ptr,
    logprob_ptr,
    finite_ptr,
    lane_ptr,
    draft_position_ptr,
    draft_token_ptr,
    packed_ptr,
    num_picks,
    FIELDS: tl.constexpr,
):
    pick = tl.program_id(0).to(tl.int64)
    row = pick // num_picks
    lane = tl.load(lane_ptr + row)
    to = packed_ptr + pick * FIELDS
    tl.store(to, tl.load(position_ptr + pick).to(tl.float64))
    tl.store(to + 1, tl.load(token_ptr + pick).to(tl.float64))
    tl.store(to + 2, (tl.load(is_commit_ptr + pick) != 0).to(tl.float64))
    tl.store(to + 3, tl.load(confidence_ptr + pick).to(tl.float64))
    tl.store(to + 4, tl.load(target_ptr + pick).to(tl.float64))
    tl.store(to + 5, tl.load(logprob_ptr + pick).to(tl.float64))
    tl.store(to + 6, (tl.load(finite_ptr + row) != 0).to(tl.float64))
    tl.store(to + 7, tl.load(draft_position_ptr + lane).to(tl.float64))
    tl.store(to + 8, tl.load(draft_token_ptr + lane).to(tl.float64))


def pack(
    picks: Picks,
    chosen: Chosen,
    is_commit_RK: Tensor,
    lane_R: Tensor,
    draft_position_N: Tensor,
    draft_token_N: Tensor,
) -> Tensor:
    """See `policies.pack`."""
    num_rows, num_picks = is_commit_RK.shape
    packed_RKF = torch.empty(num_rows, num_picks, NUM_FIELDS, dtype=torch.float64, device=lane_R.device)
    numbers = (picks.position_RK, chosen.token_RK, is_commit_RK, picks.confidence_RK)
    given = (*numbers, chosen.target_logit_RK, chosen.logprob_RK, picks.is_finite_R, lane_R)
    assert all(tensor.is_contiguous() for tensor in given)
    _pack_kernel[(num_rows * num_picks,)](
        *given, draft_position_N, draft_token_N, packed_RKF, num_picks, FIELDS=NUM_FIELDS, num_warps=1
    )
    return packed_RKF
