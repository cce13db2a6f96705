"""GEMMs of few positions and many weights, where reading the weights once at full speed is everything.

A library GEMM that splits K adds the parts up in a launch of its own; here the parts are left as float32 partial
sums for the kernel that follows, which reads its input anyway. The gated product applies SwiGLU before it writes.
The slow twin of both is the linear layer itself.

Shapes: R rows, C canvas positions, M = R * C, K inputs, N outputs, W gated outputs, S splits of K.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..tuning import GemmSettings
from .overlap import allow_next, launch_options, wait_for_previous


@triton.jit
def _product_kernel(
    x_desc,
    weight_desc,
    out_ptr,
    num_positions,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    allow_next(OVERLAPS)
    wait_for_previous(OVERLAPS)
    first_m, first_n, split = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N, tl.program_id(2)
    steps: tl.constexpr = K // BLOCK_K
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(split * steps // SPLITS, (split + 1) * steps // SPLITS):
        x = x_desc.load([first_m, step * BLOCK_K])
        weight = weight_desc.load([first_n, step * BLOCK_K])
        total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
    m = (split * num_positions + first_m + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = first_n + tl.arange(0, BLOCK_N)
    tl.store(out_ptr + m[:, None] * N + n[None, :], total)


@triton.jit
def _gated_kernel(
    x_desc,
    weight_desc,
    out_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    allow_next(OVERLAPS)
    wait_for_previous(OVERLAPS)
    first_m, first_n = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    value = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(0, K // BLOCK_K):
        x = x_desc.load([first_m, step * BLOCK_K])
        value_weight = weight_desc.load([first_n, step * BLOCK_K])
        gate_weight = weight_desc.load([N + first_n, step * BLOCK_K])
        value = tl.dot(x, tl.trans(value_weight), value, input_precision="ieee")
        gate = tl.dot(x, tl.trans(gate_weight), gate, input_precision="ieee")
    out = value * gate / (1.0 + tl.exp(-gate))
    m = (first_m + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = first_n + tl.arange(0, BLOCK_N)
    tl.store(out_ptr + m[:, None] * N + n[None, :], out.to(out_ptr.dtype.element_ty))


def partial_products(x_RCK: Tensor, weight_NK: Tensor, settings: GemmSettings, *, overlaps: bool = False) -> Tensor:
    """x @ weight.T in parts, float32 partial_SRCN: their sum over S is the product. Both contiguous, of one dtype."""
    num_outputs, num_inputs = weight_NK.shape
    num_positions = x_RCK.numel() // num_inputs
    _check_blocks(num_positions, num_outputs, num_inputs, settings)
    shape = (settings.splits, *x_RCK.shape[:-1], num_outputs)
    partial_SRCN = torch.empty(shape, dtype=torch.float32, device=x_RCK.device)
    grid = (num_positions // settings.block_m, num_outputs // settings.block_n, settings.splits)
    _product_kernel[grid](
        *_tiles(x_RCK.view(num_positions, num_inputs), weight_NK, settings),
        partial_SRCN,
        num_positions,
        SPLITS=settings.splits,
        **_shape(num_outputs, num_inputs, settings),
        **launch_options(overlaps),
    )
    return partial_SRCN


def gated_product(x_RCK: Tensor, weight_NK: Tensor, settings: GemmSettings, *, overlaps: bool = False) -> Tensor:
    """SwiGLU of x @ weight.T, out_RCW in x's dtype; the weights hold W rows of values, then W rows of gates."""
    num_inputs = weight_NK.shape[1]
    width = weight_NK.shape[0] // 2
    num_positions = x_RCK.numel() // num_inputs
    _check_blocks(num_positions, width, num_inputs, settings)
    assert settings.splits == 1, f"SwiGLU needs complete sums, but K is split in {settings.splits}"
    out_RCW = torch.empty(*x_RCK.shape[:-1], width, dtype=x_RCK.dtype, device=x_RCK.device)
    grid = (num_positions // settings.block_m, width // settings.block_n)
    _gated_kernel[grid](
        *_tiles(x_RCK.view(num_positions, num_inputs), weight_NK, settings),
        out_RCW,
        **_shape(width, num_inputs, settings),
        **launch_options(overlaps),
    )
    return out_RCW


def _check_blocks(num_positions: int, num_outputs: int, num_inputs: int, settings: GemmSettings) -> None:
    sizes = (num_positions, num_outputs, num_inputs)
    blocks = (settings.block_m, settings.block_n, settings.block_k)
    fits = all(size % block == 0 for size, block in zip(sizes, blocks, strict=True))
    assert fits, f"blocks {blocks} do not divide the GEMM's {sizes}"


def _tiles(x_MK: Tensor, weight_NK: Tensor, settings: GemmSettings) -> tuple[TensorDescriptor, TensorDescriptor]:
    """x and the weights as the tensor memory accelerator loads them."""
    x_tiles = TensorDescriptor.from_tensor(x_MK, [settings.block_m, settings.block_k])
    return x_tiles, TensorDescriptor.from_tensor(weight_NK, [settings.block_n, settings.block_k])


def _shape(num_outputs: int, num_inputs: int, settings: GemmSettings) -> dict[str, int]:
    return {
        "N": num_outputs,
        "K": num_inputs,
        "BLOCK_M": settings.block_m,
        "BLOCK_N": settings.block_n,
        "BLOCK_K": settings.block_k,
        "num_warps": settings.num_warps,
        "num_stages": settings.num_stages,
    }
