"""SwiGLU's elementwise half: value * silu(gate)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .overlap import allow_next, launch_options, wait_for_previous

_COLUMNS = 1024


@triton.jit
def _swiglu_kernel(
    inner_ptr,
    out_ptr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    allow_next(OVERLAPS)
    wait_for_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = column < WIDTH
    value = tl.load(inner_ptr + token * 2 * WIDTH + column, mask=exists, other=0.0).to(tl.float32)
    gate = tl.load(inner_ptr + token * 2 * WIDTH + WIDTH + column, mask=exists, other=0.0).to(tl.float32)
    out = value * gate / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + token * WIDTH + column, out.to(out_ptr.dtype.element_ty), mask=exists)


def swiglu(inner_RCX: Tensor, *, overlaps: bool = False) -> Tensor:
    """[R, C, 2 W] holding values then gates -> [R, C, W]."""
    num_rows, page, double = inner_RCX.shape
    width = double // 2
    out = torch.empty(num_rows, page, width, dtype=inner_RCX.dtype, device=inner_RCX.device)
    grid = (num_rows * page, triton.cdiv(width, _COLUMNS))
    _swiglu_kernel[grid](
        inner_RCX,
        out,
        WIDTH=width,
        COLUMNS=_COLUMNS,
        num_warps=4,
        **launch_options(overlaps),
    )
    return out
