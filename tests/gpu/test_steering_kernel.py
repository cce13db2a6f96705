"""The kernel of steering's sums against its slow twin. `TRITON_INTERPRET=1` runs it where there is no GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton comes with torch's CUDA builds")

from triton import knobs

from engine.decoding.kernels.steering import added_by_layer
from engine.decoding.steering import NO_CUTOFF, added_by_layer_slow

IS_INTERPRETED = bool(knobs.runtime.interpret)
pytestmark = [] if IS_INTERPRETED else [pytest.mark.gpu]
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")


@pytest.mark.parametrize(("num_rows", "num_layers", "width"), [(1, 3, 32), (3, 9, 300), (5, 32, 512)])
def test_what_is_added_equals_the_slow_twin_s_bit_for_bit(num_rows: int, num_layers: int, width: int) -> None:
    """Both add one group after another, so there is nothing to round differently."""
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(num_rows, 8, width, generator=generator)
    layer = torch.randint(0, num_layers + 2, (num_rows, 8), generator=generator)
    cutoff = torch.randint(0, 9, (num_rows, 8), generator=generator)
    cutoff[:, 3] = NO_CUTOFF
    committed = torch.randint(0, 6, (num_rows,), generator=generator)
    inputs = [tensor.to(DEVICE) for tensor in (vector, layer, cutoff, committed)]
    slow = added_by_layer_slow(*inputs, num_layers)
    assert slow.any()
    assert torch.equal(added_by_layer(*inputs, num_layers), slow)


def test_a_group_that_does_not_act_is_not_even_read() -> None:
    vector = torch.full((2, 8, 40), torch.nan, device=DEVICE)
    layer = torch.ones(2, 8, dtype=torch.int64, device=DEVICE)
    cutoff = torch.zeros_like(layer)
    added = added_by_layer(vector, layer, cutoff, torch.zeros(2, dtype=torch.int64, device=DEVICE), 3)
    assert torch.equal(added, torch.zeros_like(added))
