"""x @ w.T whose bits do not depend on how many rows x has; the slow twin is `matmul_slow`.

Libraries choose their kernel, and with it the order of a sum, by the number of rows. Here the arithmetic of one
element follows from the weight's shape alone: K is cut into a fixed number of slices, each slice is summed from its
start to its end by instructions that take equal steps along K, and the slices' float32 sums are added in their order.
How many elements a program computes, and whether slices run one after another or side by side, changes who does the
work and not what is computed; `tests/gpu/test_deterministic.py` compares the bits.

Shapes: M rows of x (positions), N rows of w (output features), K width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_SLICE_MULTIPLE = 256
"""Slices start at a multiple of this: every tile's depth divides it."""
_ALIGNMENT = 16
"""Bytes: what the rows of a tensor descriptor start at."""
_GROUP = 16
"""Row tiles that share a weight tile before the next one is read."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes and how: none of it may change a result."""

    rows: int
    columns: int
    depth: int
    num_stages: int
    num_warps: int
    is_persistent: bool = False
    """One program a multiprocessor, which walks over tiles."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How to multiply with weights of one shape."""

    short: Tile
    """For few rows, where reading the weight takes the time."""
    tall: Tile | None = None
    """For many rows, where arithmetic takes it; None: short for all. Loading a model compares its bits with those of
    `short`."""
    tall_from: int = 257
    """Rows of x from which `tall` is used."""
    slices: int = 1
    """Parts of K with a sum of their own: the one setting that is part of the result."""
    side_by_side_to: int = 256
    """Rows of x up to which slices run as programs of their own, for a grid that fills the device."""

    def tile(self, num_rows: int) -> Tile:
        """The tile for so many rows of x."""
        return self.short if self.tall is None or num_rows < self.tall_from else self.tall

    def num_counters(self, num_columns: int) -> int:
        """Tiles that slices side by side may have to join."""
        if self.slices == 1:
            return 1
        return -(-self.side_by_side_to // self.short.rows) * -(-num_columns // self.short.columns)


_ANYWHERE = {
    1: Plan(short=Tile(64, 64, 64, 3, 4)),
    2: Plan(short=Tile(64, 64, 64, 3, 4)),
    4: Plan(short=Tile(64, 32, 32, 2, 4)),
}
"""By bytes of an element; fits every GPU."""
_HOPPER: dict[tuple[int, int, int], Plan] = {
    # (N, K, bytes of an element)
    (5120, 4096, 2): Plan(
        short=Tile(64, 64, 64, 4, 4), tall=Tile(128, 128, 64, 3, 8), tall_from=128, slices=2, side_by_side_to=1024
    ),
    (4096, 4096, 2): Plan(
        short=Tile(64, 64, 64, 4, 4), tall=Tile(128, 128, 64, 3, 8), tall_from=128, slices=2, side_by_side_to=1024
    ),
    (32768, 4096, 2): Plan(short=Tile(64, 128, 64, 4, 4), tall=Tile(128, 256, 64, 4, 8), tall_from=128),
    (4096, 16384, 2): Plan(
        short=Tile(64, 128, 64, 4, 4), tall=Tile(128, 256, 64, 4, 8), tall_from=128, slices=4, side_by_side_to=1024
    ),
    (100288, 4096, 2): Plan(short=Tile(64, 256, 64, 4, 4), tall=Tile(128, 256, 64, 4, 8), tall_from=128),
}
"""Measured at 64 to 1024 rows of x on an H200 (compute capability 9.0) with torch 2.11 and triton 3.6. All GEMMs of a
pass of the 8B shape took 1.05 / 1.26 / 1.19 / 1.19 of the library's time at 64 / 256 / 512 / 1024 rows of x."""
_HOPPER_CAPABILITY = (9, 0)


def plan_for(num_columns: int, width: int, dtype: torch.dtype, device: torch.device) -> Plan:
    """The plan for weights of one shape; it knows nothing of x."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) == _HOPPER_CAPABILITY:
        measured = _HOPPER.get((num_columns, width, dtype.itemsize))
        if measured is not None:
            return measured
    return _ANYWHERE[dtype.itemsize]


def is_multipliable(width: int, dtype: torch.dtype) -> bool:
    """Whether rows of this width can be read: descriptors want them to start at a multiple of 16 bytes."""
    return width * dtype.itemsize % _ALIGNMENT == 0


@triton.jit
def _slice_sum(
    x_desc,
    w_desc,
    first_row,
    first_column,
    first_k,
    num_steps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(num_steps):
        x = x_desc.load([first_row, first_k + step * DEPTH])
        w = w_desc.load([first_column, first_k + step * DEPTH])
        total = tl.dot(x, w.T, total, input_precision=PRECISION)
    return total


@triton.jit
def _store(
    y_desc,
    total,
    x_scale_ptr,
    w_scale_ptr,
    first_row,
    first_column,
    num_rows,
    num_columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    if HAS_SCALES:
        row = first_row + tl.arange(0, ROWS)
        column = first_column + tl.arange(0, COLUMNS)
        x_scale = tl.load(x_scale_ptr + row, mask=row < num_rows, other=0.0)
        w_scale = tl.load(w_scale_ptr + column, mask=column < num_columns, other=0.0)
        total = total * x_scale[:, None] * w_scale[None, :]
    y_desc.store([first_row, first_column], total.to(y_desc.dtype))


@triton.jit
def _corner(tile, row_tiles, column_tiles, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """First row and column of a tile. Neighbours share a weight tile, which the L2 then serves."""
    in_group = GROUP * column_tiles
    first = tile // in_group * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    row_tile = first + tile % in_group % height
    column_tile = tile % in_group // height
    return row_tile * ROWS, column_tile * COLUMNS


@triton.jit
def _whole_sum(
    x_desc,
    w_desc,
    first_row,
    first_column,
    width,
    slice_width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SLICES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    num_steps = tl.cdiv(tl.minimum(slice_width, width), DEPTH)
    total = _slice_sum(x_desc, w_desc, first_row, first_column, 0, num_steps, ROWS, COLUMNS, DEPTH, PRECISION)
    for part in tl.static_range(1, SLICES):
        first_k = part * slice_width
        num_steps = tl.cdiv(tl.minimum(slice_width, width - first_k), DEPTH)
        total += _slice_sum(
            x_desc, w_desc, first_row, first_column, first_k, num_steps, ROWS, COLUMNS, DEPTH, PRECISION
        )
    return total


@triton.jit
def _matmul_kernel(
    x_desc,
    w_desc,
    y_desc,
    x_scale_ptr,
    w_scale_ptr,
    num_rows,
    num_columns,
    width,
    slice_width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SLICES: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    IS_PERSISTENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row_tiles = tl.cdiv(num_rows, ROWS)
    column_tiles = tl.cdiv(num_columns, COLUMNS)
    if IS_PERSISTENT:
        for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=True):
            row, column = _corner(tile, row_tiles, column_tiles, ROWS, COLUMNS, GROUP)
            total = _whole_sum(x_desc, w_desc, row, column, width, slice_width, ROWS, COLUMNS, DEPTH, SLICES, PRECISION)
            _store(
                y_desc,
                total,
                x_scale_ptr,
                w_scale_ptr,
                row,
                column,
                num_rows,
                num_columns,
                ROWS,
                COLUMNS,
                HAS_SCALES,
            )
    else:
        row, column = _corner(tl.program_id(0), row_tiles, column_tiles, ROWS, COLUMNS, GROUP)
        total = _whole_sum(x_desc, w_desc, row, column, width, slice_width, ROWS, COLUMNS, DEPTH, SLICES, PRECISION)
        _store(y_desc, total, x_scale_ptr, w_scale_ptr, row, column, num_rows, num_columns, ROWS, COLUMNS, HAS_SCALES)


@triton.jit
def _sliced_matmul_kernel(
    x_desc,
    w_desc,
    y_desc,
    x_scale_ptr,
    w_scale_ptr,
    partial_ptr,
    arrived_ptr,
    num_rows,
    num_columns,
    width,
    slice_width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SLICES: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program a slice of a tile; the last to arrive adds the slices up, in their order."""
    row_tiles = tl.cdiv(num_rows, ROWS)
    column_tiles = tl.cdiv(num_columns, COLUMNS)
    tile = tl.program_id(0)
    part = tl.program_id(1)
    row, column = _corner(tile, row_tiles, column_tiles, ROWS, COLUMNS, GROUP)
    first_k = part * slice_width
    num_steps = tl.cdiv(tl.minimum(slice_width, width - first_k), DEPTH)
    total = _slice_sum(x_desc, w_desc, row, column, first_k, num_steps, ROWS, COLUMNS, DEPTH, PRECISION)
    offset = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    slots = partial_ptr + tile * SLICES * ROWS * COLUMNS + offset
    tl.store(slots + part * ROWS * COLUMNS, total)
    # Every thread's part must be written before one of them says so.
    tl.debug_barrier()
    num_before = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel")
    if num_before == SLICES - 1:
        tl.debug_barrier()
        total = tl.load(slots, cache_modifier=".cg")
        for other in tl.static_range(1, SLICES):
            total += tl.load(slots + other * ROWS * COLUMNS, cache_modifier=".cg")
        _store(y_desc, total, x_scale_ptr, w_scale_ptr, row, column, num_rows, num_columns, ROWS, COLUMNS, HAS_SCALES)
        # For the next launch.
        tl.store(arrived_ptr + tile, 0)


def matmul(
    x_MK: Tensor,
    w_NK: Tensor,
    plan: Plan,
    *,
    out_dtype: torch.dtype | None = None,
    counters: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """y_MN = x @ w.T in `out_dtype` (None: x's), summed in float32; a row's bits do not depend on M.

    Both contiguous and of one dtype: float32, bfloat16, or float8_e4m3fn with `scales`, float32 of x [M, 1] and of
    w [N, 1]. `counters` (int32 zeros, left as zeros) has `plan.num_counters(N)` entries and belongs to one stream;
    without it slices run one after another.
    """
    (num_rows, width), num_columns = x_MK.shape, w_NK.shape[0]
    tile = plan.tile(num_rows)
    out_dtype = out_dtype or x_MK.dtype
    columns_in_memory = triton.cdiv(num_columns * out_dtype.itemsize, _ALIGNMENT) * _ALIGNMENT // out_dtype.itemsize
    y = torch.empty(num_rows, columns_in_memory, dtype=out_dtype, device=x_MK.device)
    x_scale, w_scale = scales or (x_MK, w_NK)
    num_tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_columns, tile.columns)
    slice_width = triton.cdiv(triton.cdiv(width, plan.slices), _SLICE_MULTIPLE) * _SLICE_MULTIPLE
    arguments = (
        TensorDescriptor.from_tensor(x_MK, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(w_NK, [tile.columns, tile.depth]),
        TensorDescriptor.from_tensor(y, [tile.rows, tile.columns]),
        x_scale,
        w_scale,
    )
    sizes = (num_rows, num_columns, width, slice_width)
    settings = {
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        "SLICES": plan.slices,
        "GROUP": _GROUP,
        "HAS_SCALES": scales is not None,
        "PRECISION": "ieee" if x_MK.dtype == torch.float32 else "tf32",
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    if counters is not None and plan.slices > 1 and num_rows <= plan.side_by_side_to:
        partial = torch.empty(num_tiles, plan.slices, tile.rows, tile.columns, device=x_MK.device)
        grid = (num_tiles, plan.slices)
        _sliced_matmul_kernel[grid](*arguments, partial, counters, *sizes, **settings)
    else:
        programs = num_tiles
        if tile.is_persistent:
            programs = min(num_tiles, torch.cuda.get_device_properties(x_MK.device).multi_processor_count)
        _matmul_kernel[(programs,)](*arguments, *sizes, IS_PERSISTENT=tile.is_persistent, **settings)
    return y[:, :num_columns]


def matmul_slow(
    x_MK: Tensor,
    w_NK: Tensor,
    plan: Plan,
    *,
    out_dtype: torch.dtype | None = None,
    counters: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The slow twin of `matmul`: each slice in float32, the slices added in their order."""
    width = x_MK.shape[1]
    slice_width = triton.cdiv(triton.cdiv(width, plan.slices), _SLICE_MULTIPLE) * _SLICE_MULTIPLE
    total_MN = torch.zeros(x_MK.shape[0], w_NK.shape[0], device=x_MK.device)
    for first in range(0, width, slice_width):
        part = slice(first, first + slice_width)
        total_MN = total_MN + x_MK[:, part].float() @ w_NK[:, part].float().T
    if scales is not None:
        total_MN = total_MN * scales[0] * scales[1].T
    return total_MN.to(out_dtype or x_MK.dtype)
