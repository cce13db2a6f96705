"""What steering adds after each layer, in one kernel; the slow twin is `steering.added_by_layer_slow`.

Shapes: R rows, G groups, L layers, D model width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LAYERS = 8
COLUMNS = 256
NUM_WARPS = 4


@triton.jit
def _added_kernel(
    vector_ptr,
    layer_ptr,
    cutoff_ptr,
    num_committed_ptr,
    added_ptr,
    num_rows,
    width,
    num_layers,
    GROUPS: tl.constexpr,
    LAYERS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    layer = tl.program_id(2) * LAYERS + tl.arange(0, LAYERS)
    exists = column < width
    num_committed = tl.load(num_committed_ptr + row)
    total = tl.zeros((LAYERS, COLUMNS), tl.float32)
    for index in tl.static_range(GROUPS):
        group = row * GROUPS + index
        is_active = num_committed < tl.load(cutoff_ptr + group)
        vector = tl.load(vector_ptr + group * width + column, mask=exists & is_active, other=0.0)
        acts = tl.load(layer_ptr + group) <= layer + 1
        total += tl.where(acts[:, None], vector[None, :], 0.0)
    place = (layer[:, None] * num_rows + row) * width + column[None, :]
    tl.store(added_ptr + place, total, mask=(layer < num_layers)[:, None] & exists[None, :])


def added_by_layer(
    vector_RGD: Tensor, layer_RG: Tensor, cutoff_RG: Tensor, num_committed_R: Tensor, num_layers: int
) -> Tensor:
    """See `steering.added_by_layer`; all tensors contiguous. Groups are added in their order."""
    num_rows, num_groups, width = vector_RGD.shape
    assert all(tensor.is_contiguous() for tensor in (vector_RGD, layer_RG, cutoff_RG, num_committed_R))
    added_LRD = torch.empty(num_layers, num_rows, width, dtype=torch.float32, device=vector_RGD.device)
    _added_kernel[(num_rows, triton.cdiv(width, COLUMNS), triton.cdiv(num_layers, LAYERS))](
        vector_RGD,
        layer_RG,
        cutoff_RG,
        num_committed_R,
        added_LRD,
        num_rows,
        width,
        num_layers,
        GROUPS=num_groups,
        LAYERS=LAYERS,
        COLUMNS=COLUMNS,
        num_warps=NUM_WARPS,
    )
    return added_LRD
