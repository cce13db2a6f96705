"""Which configurations the fused layers cover. Apart from `fused`, which needs Triton to be imported."""

from __future__ import annotations

import importlib.util

from ..config import ModelConfig

HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Triton comes with torch's CUDA builds and with no other."""
_POWERS_OF_TWO = (16, 32, 64, 128, 256)


def is_supported(config: ModelConfig) -> bool:
    """True for the released shape: post-norm RMSNorm, qk-norm, full-precision rotary, SwiGLU, no biases."""
    return (
        config.use_rms_norm
        and config.norm_order == "post"
        and config.use_qk_norm
        and config.use_rope
        and config.rope_full_precision
        and config.mlp_type == "swiglu"
        and not config.use_bias
        and config.head_dim in _POWERS_OF_TWO
        and config.diff_block_size in _POWERS_OF_TWO
    )
