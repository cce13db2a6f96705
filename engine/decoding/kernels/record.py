"""What the kernels of a choice hand on: where each number of a pick and of a slice of the vocabulary is kept."""

from __future__ import annotations

import triton.language as tl

# Kinds of pick.
NOTHING = tl.constexpr(0)
GREEDY = tl.constexpr(1)
SAMPLED = tl.constexpr(2)
ENTROPY = tl.constexpr(3)

# int64 numbers of a pick.
KIND = tl.constexpr(0)
TOKEN = tl.constexpr(1)
LANE = tl.constexpr(2)
IS_EARLY = tl.constexpr(3)
TOP_K_LIMIT = tl.constexpr(4)
RANDOM_BITS = tl.constexpr(5)
TOP_K_LOW = tl.constexpr(6)
"""A cut: logits with a key above HIGH stay and, of those from LOW to HIGH, the KEPT ones with the lowest ids; COUNT in
all. This is the one of top-k alone."""
TOP_K_HIGH = tl.constexpr(7)
TOP_K_KEPT = tl.constexpr(8)
TOP_K_COUNT = tl.constexpr(9)
CUT_LOW = tl.constexpr(10)
"""The cut of top-k and top-p together."""
CUT_HIGH = tl.constexpr(11)
CUT_KEPT = tl.constexpr(12)
INTS = tl.constexpr(16)

# float32 numbers of a pick.
PENALTY = tl.constexpr(0)
FIRST_TEMPERATURE = tl.constexpr(1)
TOP_P_LIMIT = tl.constexpr(2)
MIN_P = tl.constexpr(3)
TOP = tl.constexpr(4)
UNIT = tl.constexpr(5)
BOTTOM = tl.constexpr(6)
LAST_TEMPERATURE = tl.constexpr(7)
WIDTH = tl.constexpr(8)
"""Of the first level's bins, one number a search."""
FLOATS = tl.constexpr(16)

# float32 numbers of a slice.
SLICE_TOP = tl.constexpr(0)
SLICE_BOTTOM = tl.constexpr(1)
SLICE_TOTAL = tl.constexpr(2)
SLICE_RAW_TOP = tl.constexpr(3)
SLICE_RAW_TOTAL = tl.constexpr(4)
SLICE_ENTROPY = tl.constexpr(5)
SLICE_FLOATS = tl.constexpr(6)

# int64 numbers of a slice: mass above a cut, count and mass at it.
SLICE_WEIGHTS = tl.constexpr(3)

NUCLEUS = tl.constexpr(0)
TOP_K = tl.constexpr(1)
TOP_P = tl.constexpr(2)
NUM_SEARCHES = tl.constexpr(3)
NUM_HISTOGRAMS = tl.constexpr(6)
"""Three for NUCLEUS and then TOP_P, three for TOP_K, which runs beside NUCLEUS."""
STATE = tl.constexpr(8)
"""int64 numbers of an interval, see `search.settle`."""
