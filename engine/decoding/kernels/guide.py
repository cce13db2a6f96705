"""Guided logits in place: reads and writes masked positions of guided rows alone. The slow twin is `guidance.guide`.

Shapes: R rows, C canvas positions, W padded vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 4096
NUM_WARPS = 8


@triton.jit
def _guide_kernel(
    logits_ptr, masked_ptr, shadow_ptr, guidance_ptr, row_length, CANVAS: tl.constexpr, COLUMNS: tl.constexpr
):
    piece, offset = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    shadow = tl.load(shadow_ptr + row)
    if shadow == row:
        return
    if tl.load(masked_ptr + row * CANVAS + offset) == 0:
        return
    guidance = tl.load(guidance_ptr + row)
    column = piece * COLUMNS + tl.arange(0, COLUMNS)
    exists = column < row_length
    to = logits_ptr + (row * CANVAS + offset) * row_length + column
    cond = tl.load(to, mask=exists, other=0.0).to(tl.float32)
    uncond_from = logits_ptr + (shadow * CANVAS + offset) * row_length + column
    uncond = tl.load(uncond_from, mask=exists, other=0.0).to(tl.float32)
    guided = uncond + guidance * (cond - uncond)
    tl.store(to, guided.to(logits_ptr.dtype.element_ty), mask=exists)


def guide(logits_RCW: Tensor, masked_RC: Tensor, shadow_R: Tensor, guidance_R: Tensor) -> None:
    """See `guidance.guide`. No row may be the shadow of another one and guided itself."""
    num_rows, canvas, row_length = logits_RCW.shape
    assert all(tensor.is_contiguous() for tensor in (logits_RCW, masked_RC, shadow_R, guidance_R))
    _guide_kernel[(triton.cdiv(row_length, COLUMNS), canvas, num_rows)](
        logits_RCW,
        masked_RC,
        shadow_R,
        guidance_R,
        row_length,
        CANVAS=canvas,
        COLUMNS=COLUMNS,
        num_warps=NUM_WARPS,
    )
