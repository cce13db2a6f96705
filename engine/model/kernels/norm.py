"""RMSNorm fused with what stands around it: a GEMM's partial sums, the residual and the steering injection.

Shapes: R rows, C canvas positions, D model width, S partial sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .overlap import allow_next, launch_options, wait_for_previous


@triton.jit
def _residual_norm_kernel(
    x_ptr,
    branch_ptr,
    weight_ptr,
    added_ptr,
    masked_ptr,
    out_ptr,
    num_tokens,
    eps,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    allow_next(OVERLAPS)
    wait_for_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    exists = column < WIDTH
    branch = tl.zeros((PADDED,), tl.float32)
    for part in tl.static_range(PARTS):
        offset = (part * num_tokens + token) * WIDTH + column
        branch += tl.load(branch_ptr + offset, mask=exists, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=exists, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(branch * branch, axis=0) / WIDTH + eps)
    value = branch * scale * weight
    if HAS_RESIDUAL:
        value += tl.load(x_ptr + token * WIDTH + column, mask=exists, other=0.0).to(tl.float32)
    if HAS_ADDED:
        is_masked = tl.load(masked_ptr + token)
        if is_masked:
            value += tl.load(added_ptr + (token // PAGE) * WIDTH + column, mask=exists, other=0.0)
    tl.store(out_ptr + token * WIDTH + column, value.to(out_ptr.dtype.element_ty), mask=exists)


def residual_norm(
    x_RCD: Tensor | None,
    branch_SRCD: Tensor,
    weight_D: Tensor,
    eps: float,
    *,
    added_RD: Tensor | None = None,
    masked_RC: Tensor | None = None,
    overlaps: bool = False,
) -> Tensor:
    """x + RMSNorm(branch) * weight, plus `added_RD` (float32) at masked positions; without x the norm alone.

    The branch is the sum over S; the result has x's dtype.
    """
    parts, num_rows, page, width = branch_SRCD.shape
    dtype = branch_SRCD.dtype if x_RCD is None else x_RCD.dtype
    out_RCD = torch.empty(num_rows, page, width, dtype=dtype, device=branch_SRCD.device)
    num_tokens = num_rows * page
    _residual_norm_kernel[(num_tokens,)](
        branch_SRCD if x_RCD is None else x_RCD,
        branch_SRCD,
        weight_D,
        branch_SRCD if added_RD is None else added_RD,
        branch_SRCD if masked_RC is None else masked_RC,
        out_RCD,
        num_tokens=num_tokens,
        eps=eps,
        PARTS=parts,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        PAGE=page,
        HAS_RESIDUAL=x_RCD is not None,
        HAS_ADDED=added_RD is not None,
        num_warps=8 if width >= 2048 else 4,
        **launch_options(overlaps),
    )
    return out_RCD
