"""How the fused layers are cut into programs, one table to edit after measuring. Knows neither tensors nor Triton.

What is not in a table runs the plain way: a linear layer as a library GEMM. Settings may depend on the number of
positions in a pass, never on what the rows hold, so a row's result is the same in every batch of a bucket.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

_LARGEST_PAGE = 64 * 128
"""Elements of the keys of one page and head that the attention settings below were chosen for."""

GemmKey = tuple[int, int, int]
"""(positions in the pass, output width, input width)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmSettings:
    """One GEMM of x [M, K] and weights [N, K]. Blocks divide M, N and K."""

    block_m: int
    """Positions of a program, at least 64 for the tensor cores of a Hopper GPU to be used well."""
    block_n: int
    """Outputs of a program. In the gated product as many gates ride along."""
    block_k: int = 64
    """Inputs of one step of the pipeline: 64 bfloat16 are one line of 128 bytes."""
    splits: int = 1
    """Parts of K, each with a partial sum of its own, so that few outputs still fill the device."""
    num_warps: int = 4
    num_stages: int = 4
    """Steps of the pipeline in shared memory at a time. Weights in flight are what reads memory at full speed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSettings:
    """The attention kernel. The length of a split is not here: results depend on it (`attention.PAGES_PER_SPLIT`)."""

    num_warps: int = 4
    num_stages: int = 2
    """Pages in shared memory at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """Everything that may be chosen by measuring. The defaults run on any GPU that Triton knows."""

    products: Mapping[GemmKey, GemmSettings] = field(default_factory=dict)
    """GEMMs whose reader adds up the partial sums."""
    gated: Mapping[GemmKey, GemmSettings] = field(default_factory=dict)
    """The first half of a SwiGLU MLP; the output width counts values and gates."""
    attention: AttentionSettings = AttentionSettings()
    overlaps: bool = False
    """Start each kernel while the one before it drains, in passes whose rows are not split: programmatic dependent
    launch, compute capability 9.0 on."""

    def with_splits(self, num_splits: int) -> Tuning:
        """This tuning in a pass whose rows have at most so many splits."""
        # Measured: 2 % faster at one row of 256 keys, 5 % slower at one of 4,096.
        return self if num_splits == 1 else replace(self, overlaps=False)

    def attention_for(self, page: int, width: int) -> AttentionSettings:
        """Attention's settings for pages of so many positions and heads so wide, which must fit shared memory."""
        return self.attention if page * width <= _LARGEST_PAGE else AttentionSettings()


PLAIN = Tuning()

HOPPER = Tuning(
    products={
        (64, 5120, 4096): GemmSettings(block_m=64, block_n=128, block_k=128, splits=3),
        (64, 4096, 4096): GemmSettings(block_m=64, block_n=128, block_k=128, splits=4),
        (64, 4096, 16384): GemmSettings(block_m=64, block_n=128, block_k=128, splits=4),
    },
    gated={
        (64, 32768, 4096): GemmSettings(block_m=64, block_n=64),
        (128, 32768, 4096): GemmSettings(block_m=128, block_n=64, num_stages=3),
    },
    attention=AttentionSettings(num_stages=3),
    overlaps=True,
)
"""Measured on an H200 (compute capability 9.0) with torch 2.11 and triton 3.6: the GEMMs of the 8B shape (width 4,096,
four KV heads of 128) at one row, and at two the one that gains. From four rows on a pass is faster with the library."""


def tuning_for(capability: tuple[int, int]) -> Tuning:
    """The tuning of a GPU of this compute capability."""
    return HOPPER if capability == (9, 0) else PLAIN
