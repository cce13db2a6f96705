"""What lets a kernel's start overlap the end of the one before it, and memory work while a small kernel computes.

Both change when something happens, never what is computed. They compile to Hopper instructions, so a caller turns
them on only where the device has them, and never in Triton's interpreter.

Shapes: N outputs and K inputs of a linear layer.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_LARGEST_REQUEST = 16384


@triton.jit
def allow_next(OVERLAPS: tl.constexpr):
    """Let the next kernel's programs take their places once all programs of this one have theirs."""
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(OVERLAPS: tl.constexpr):
    """Wait until all earlier kernels are done and their writes visible. Before it nothing may be read or written.

    Every program has to call it, also one that then finds nothing to do: the next kernel takes the end of this one
    for the end of all before it.
    """
    if OVERLAPS:
        gdc_wait()


@triton.jit
def ask_for_lines(address, is_asked, NUM_BYTES: tl.constexpr):
    """Ask `NUM_BYTES` (a multiple of 16) from each address into L2, and wait for nothing."""
    tl.inline_asm_elementwise(
        "{ .reg .pred asked; setp.ne.u32 asked, $2, 0;"
        " @asked cp.async.bulk.prefetch.L2.global [$1], $3; mov.u32 $0, 0; }",
        "=r,l,r,r",
        [address, is_asked.to(tl.int32), NUM_BYTES],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def read_ahead(
    ahead_ptr,
    program,
    NUM_ROWS: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    NUM_BYTES: tl.constexpr,
    ROWS_PER_PROGRAM: tl.constexpr,
):
    """This program's share of the rows that `ahead_arguments` described. Call it after `wait_for_previous`.

    Earlier, while a GEMM still streams its own weights, the lines would be gone again before they are read.
    """
    if NUM_BYTES > 0:
        row = program * ROWS_PER_PROGRAM + tl.arange(0, ROWS_PER_PROGRAM)
        address = ahead_ptr.to(tl.int64) + row.to(tl.int64) * ROW_STRIDE
        ask_for_lines(address, row < NUM_ROWS, NUM_BYTES)


def ahead_arguments(ahead_NK: Tensor | None, num_programs: int, unused: Tensor) -> dict[str, Any]:
    """Arguments of a kernel that calls `read_ahead`: columns of the next weights, shared among `num_programs`.

    `unused` stands in for the weights where there are none.
    """
    num_bytes = 0 if ahead_NK is None else min(ahead_NK.shape[1] * ahead_NK.element_size(), _LARGEST_REQUEST)
    if ahead_NK is None or num_bytes < 16:
        return {"ahead_ptr": unused, "AHEAD_ROWS": 0, "AHEAD_STRIDE": 0, "AHEAD_BYTES": 0, "AHEAD_PER_PROGRAM": 1}
    return {
        "ahead_ptr": ahead_NK,
        "AHEAD_ROWS": ahead_NK.shape[0],
        "AHEAD_STRIDE": ahead_NK.stride(0) * ahead_NK.element_size(),
        "AHEAD_BYTES": num_bytes // 16 * 16,
        "AHEAD_PER_PROGRAM": triton.next_power_of_2(triton.cdiv(ahead_NK.shape[0], num_programs)),
    }


def launch_options(overlaps: bool) -> dict[str, Any]:
    """Arguments of every kernel that calls `allow_next` and `wait_for_previous`."""
    return {"OVERLAPS": True, "launch_pdl": True} if overlaps else {"OVERLAPS": False}


def first_columns(weight: object, start_mib: float, num_mib: float) -> Tensor | None:
    """Columns of a weight matrix that take `num_mib` MiB, after those that take `start_mib`; None if there are none.

    All programs of a GEMM start at their first column, so these are read before any others.
    """
    if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.stride(1) != 1 or num_mib <= 0:
        return None
    if weight.data_ptr() % 128 or weight.stride(0) * weight.element_size() % 128:
        return None
    columns_per_mib = 2**20 / (weight.shape[0] * weight.element_size())
    line = 128 // weight.element_size()
    start = round(start_mib * columns_per_mib / line) * line
    end = min(round((start_mib + num_mib) * columns_per_mib / line) * line, weight.shape[1])
    return weight[:, start:end] if end > start else None
