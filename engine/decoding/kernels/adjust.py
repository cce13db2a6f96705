"""Pieces that the kernels share: logits as tokens are chosen from, and numbers that sort like them.

Shapes: V vocabulary, W logits' row length (V padded), N lanes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_logits(
    logits_ptr,
    offset_ptr,
    present_ptr,
    is_end_ptr,
    banned_ptr,
    token,
    row_length,
    lane,
    lane_stride,
    vocab_size,
    penalty,
    is_early,
    column,
):
    """Raw logits of canvas position `token` and adjusted ones, both minus infinity past the vocabulary.

    Rounds like `sampler.adjusted_logits`, so that both see the same ties.
    """
    # Rows are as long as their strides say. Masks at those, which 16 divides, leave loads wide.
    is_padded = column < lane_stride
    exists = column < vocab_size
    raw = tl.load(logits_ptr + token * row_length + column, mask=column < row_length, other=0.0).to(tl.float32)
    raw = tl.where(exists, raw, float("-inf"))
    at = lane * lane_stride + column
    value = raw + tl.load(offset_ptr + at, mask=is_padded, other=0.0)
    factor = tl.where(tl.load(present_ptr + at, mask=is_padded, other=0) != 0, penalty, 1.0)
    value = tl.where(value > 0, tl.div_rn(value, factor), value * factor)
    is_banned = tl.load(banned_ptr + column, mask=is_padded, other=1) != 0
    is_end = tl.load(is_end_ptr + at, mask=is_padded, other=0) != 0
    return raw, tl.where(exists & ~(is_banned | (is_end & is_early)), value, float("-inf"))


@triton.jit
def order_key(value):
    """int64 keys in the order of float32 values, equal only for equal values; NaN has no place in it."""
    # A negative float's magnitude bits count backwards. Adding zero turns -0.0 into 0.0.
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.int64)
