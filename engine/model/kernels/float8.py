"""Rows of activations to float8, each with a scale of its own, in one reading.

Shapes: M rows (positions), K width, F inner width of SwiGLU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = 448.0
"""Of float8_e4m3fn."""
SMALLEST_PEAK = 1e-12
"""A row's largest magnitude counts as at least this: a scale of zero would make NaN of a row of zeros."""


@triton.jit
def _store_row(value, column, exists, values_ptr, scale_ptr, row, width, peak_floor, largest):
    peak = tl.maximum(tl.max(tl.abs(value), axis=0), peak_floor)
    scale = peak / largest
    # Rounding may lift the quotient past the largest float8. A NaN stays: whoever reads the logits must see it.
    scaled = tl.maximum(value / scale, -largest, propagate_nan=tl.PropagateNan.ALL)
    scaled = tl.minimum(scaled, largest, propagate_nan=tl.PropagateNan.ALL)
    tl.store(values_ptr + row * width + column, scaled.to(values_ptr.dtype.element_ty), mask=exists)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _quantize_kernel(x_ptr, values_ptr, scale_ptr, width, peak_floor, largest, PADDED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    exists = column < width
    value = tl.load(x_ptr + row * width + column, mask=exists, other=0.0).to(tl.float32)
    _store_row(value, column, exists, values_ptr, scale_ptr, row, width, peak_floor, largest)


@triton.jit
def _swiglu_kernel(inner_ptr, values_ptr, scale_ptr, width, peak_floor, largest, PADDED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    exists = column < width
    inner = inner_ptr + row * 2 * width + column
    value = tl.load(inner, mask=exists, other=0.0).to(tl.float32)
    gate = tl.load(inner + width, mask=exists, other=0.0).to(tl.float32)
    product = value * gate / (1.0 + tl.exp(-gate))
    _store_row(product, column, exists, values_ptr, scale_ptr, row, width, peak_floor, largest)


def quantize_rows(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """values_MK (float8_e4m3fn) and scale_M1 (float32) with values * scale = x but for rounding; x contiguous.

    Each row's largest magnitude becomes the largest float8. A row that holds a NaN becomes NaN.
    """
    num_rows, width = x_MK.shape
    return _launch(_quantize_kernel, x_MK, num_rows, width)


def swiglu_rows(inner_MX: Tensor) -> tuple[Tensor, Tensor]:
    """SwiGLU of inner_MX (X = 2 * F: values, then gates; contiguous), as `quantize_rows` would give it."""
    num_rows, width = inner_MX.shape
    return _launch(_swiglu_kernel, inner_MX, num_rows, width // 2)


def _launch(kernel: triton.JITFunction, source: Tensor, num_rows: int, width: int) -> tuple[Tensor, Tensor]:
    values_MK = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=source.device)
    scale_M1 = torch.empty(num_rows, 1, dtype=torch.float32, device=source.device)
    kernel[(num_rows,)](
        source,
        values_MK,
        scale_M1,
        width,
        SMALLEST_PEAK,
        LARGEST,
        PADDED=triton.next_power_of_2(width),
        num_warps=16 if width > 8192 else 8 if width > 1024 else 4,
    )
    return values_MK, scale_M1
