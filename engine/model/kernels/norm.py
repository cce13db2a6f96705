"""RMSNorm fused with what stands around it: the residual sum and the steering injection.

Shapes: R rows, C canvas positions, D model width, L layers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _residual_norm_kernel(
    x_ptr,
    branch_ptr,
    weight_ptr,
    added_ptr,
    masked_ptr,
    out_ptr,
    eps,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_ADDED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    exists = column < WIDTH
    branch = tl.load(branch_ptr + token * WIDTH + column, mask=exists, other=0.0).to(tl.float32)
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
    branch_RCD: Tensor,
    weight_D: Tensor,
    eps: float,
    *,
    added_RD: Tensor | None = None,
    masked_RC: Tensor | None = None,
) -> Tensor:
    """x + RMSNorm(branch) * weight, plus `added_RD` (float32) at masked positions; without x the norm alone."""
    num_rows, page, width = branch_RCD.shape
    out_RCD = torch.empty_like(branch_RCD)
    _residual_norm_kernel[(num_rows * page,)](
        branch_RCD if x_RCD is None else x_RCD,
        branch_RCD,
        weight_D,
        branch_RCD if added_RD is None else added_RD,
        branch_RCD if masked_RC is None else masked_RC,
        out_RCD,
        eps,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        PAGE=page,
        HAS_RESIDUAL=x_RCD is not None,
        HAS_ADDED=added_RD is not None,
        num_warps=8 if width >= 2048 else 4,
    )
    return out_RCD
