"""Where a ranking of the vocabulary is cut, found without sorting it.

Top-k, top-p and the size of a nucleus each ask for the first token, from the largest logit down, at which a running
count or mass passes a limit. A search narrows an interval of logits around that token, level by level: a histogram of
the interval's tokens, filled by all slices of the vocabulary at once, tells which bin holds it. The first level's bins
have equal width in logits, so that no bin is crowded; each of the next divides what is left of a 32-bit key that sorts
like the logits by 2048. So the last interval holds one token or one value; tokens of one value rank by id.

Masses are fixed-point integers. They share an int64 with the count, and so one atomic addition: a sum does not depend
on the order in which programs arrive, nor a choice on the run or the batch.

Three searches a pick: NUCLEUS, the size of the nucleus at temperature 1, which sets the entropy-adaptive temperature;
TOP_K; then, at the final temperature, TOP_P. Each level's kernel begins with the histogram that the one before it left.
Three histograms take turns: one is read, one is filled, one is cleared for the next level.

Shapes: M picks, S slices of the vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .adjust import load_logits, order_key
from .record import (
    ENTROPY,
    FIRST_TEMPERATURE,
    IS_EARLY,
    KIND,
    LANE,
    MIN_P,
    NUCLEUS,
    PENALTY,
    SLICE_BOTTOM,
    SLICE_ENTROPY,
    SLICE_TOP,
    SLICE_TOTAL,
    STATE,
    TOKEN,
    TOP,
    TOP_K,
    TOP_K_KEPT,
    TOP_K_LIMIT,
    TOP_P,
    TOP_P_LIMIT,
    WIDTH,
)

BINS = 2048
LEVELS = 4
"""The first level, then 3 * 11 bits for a 32-bit key."""

REACH = tl.constexpr(26.0)
"""Bins of mass reach down to exp(-26) of the likeliest token's; the last one takes all below, 5e-12 each."""
_LOWEST_KEY = tl.constexpr(-2139095041)
"""`order_key` of minus infinity."""
_LOWEST_TEMPERATURE = tl.constexpr(0.3)
_TEMPERATURE_RANGE = tl.constexpr(0.4)


@triton.jit
def clear(hist_ptr, piece, num_slices, BINS: tl.constexpr):
    """Clear this slice's share of a histogram."""
    for start in range(piece * 64, BINS, num_slices * 64):
        tl.store(hist_ptr + start + tl.arange(0, 64), tl.zeros((64,), tl.int64))


@triton.jit
def weigh(value, top, temperature, unit):
    """Probability over the likeliest token's, and the same in fixed point."""
    weight = tl.exp((value - top) * tl.div_rn(1.0, temperature))
    # The unit is a power of two, so the product is exact and every kernel finds the same mass.
    return weight, (weight * unit + 0.5).to(tl.int64)


@triton.jit
def load_pick_logits(
    logits_ptr,
    offset_ptr,
    present_ptr,
    is_end_ptr,
    banned_ptr,
    row_length,
    lane_stride,
    vocab_size,
    ints,
    floats,
    column,
):
    """`load_logits` of a pick."""
    return load_logits(
        logits_ptr,
        offset_ptr,
        present_ptr,
        is_end_ptr,
        banned_ptr,
        tl.load(ints + TOKEN),
        row_length,
        tl.load(ints + LANE),
        lane_stride,
        vocab_size,
        tl.load(floats + PENALTY),
        tl.load(ints + IS_EARLY) != 0,
        column,
    )


@triton.jit
def is_restricted(ints, floats, vocab_size):
    """Whether top-k or min-p cut before top-p does."""
    return (tl.load(ints + TOP_K_LIMIT) < vocab_size) | (tl.load(floats + MIN_P) > 0.0)


@triton.jit
def is_active(search, ints, floats, vocab_size):
    """Whether a pick needs a search."""
    has_mass = tl.load(floats + TOP_P_LIMIT) < 1.0
    is_asked = (search == TOP_P) | (tl.load(ints + KIND) == ENTROPY)
    return tl.where(search == TOP_K, tl.load(ints + TOP_K_LIMIT) < vocab_size, has_mass & is_asked)


@triton.jit
def _power_of_two(value):
    """The least power of two that is not below a positive normal float32."""
    bits = value.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def bin_width(top, bottom, reach, BINS: tl.constexpr):
    """Of the first level: from the top down to the bottom, or `reach` if that is less."""
    span = tl.minimum(tl.minimum(top - bottom, reach), 1e38)
    # Not so narrow that two edges round to one float. A power of two, so that edges round alike everywhere.
    least = tl.maximum(tl.abs(top) * 9.5367431640625e-07, 1e-30)
    return _power_of_two(tl.maximum(span / BINS, least))


@triton.jit
def _edge(top, width, index):
    """Bin b holds the logits in (edge(b + 1), edge(b)]; the last bin has no lower edge."""
    return top - index.to(tl.float32) * width


@triton.jit
def linear_bin(value, top, width, BINS: tl.constexpr):
    """The first level's bin of each logit; see `_edge`."""
    index = tl.minimum((top - value) / width, BINS - 1.0).to(tl.int32)
    # The quotient may have been rounded over an edge.
    is_below = value <= _edge(top, width, index + 1)
    is_above = value > _edge(top, width, index)
    index = index + is_below.to(tl.int32) - is_above.to(tl.int32)
    return tl.minimum(tl.maximum(index, 0), BINS - 1)


@triton.jit
def key_shift(low, high, BINS: tl.constexpr):
    """Bits to drop from a distance to `high` so that it becomes a bin."""
    bits = tl.arange(0, 32).to(tl.int64)
    return tl.sum((((high - low) >> bits) >= BINS).to(tl.int64), axis=0)


@triton.jit
def _load_state(ptr):
    """Lowest and highest key, count above, mass above, count within, mass within, limit."""
    low, high = tl.load(ptr), tl.load(ptr + 1)
    above, mass_above = tl.load(ptr + 2), tl.load(ptr + 3)
    within, mass_within = tl.load(ptr + 4), tl.load(ptr + 5)
    return low, high, above, mass_above, within, mass_within, tl.load(ptr + 6)


@triton.jit
def store_state(ptr, low, high, above, mass_above, within, mass_within, limit):
    """Keep an interval for the next level."""
    tl.store(ptr, low)
    tl.store(ptr + 1, high)
    tl.store(ptr + 2, above)
    tl.store(ptr + 3, mass_above)
    tl.store(ptr + 4, within)
    tl.store(ptr + 5, mass_within)
    tl.store(ptr + 6, limit)


@triton.jit
def _limit(search, whole, weights, ints, floats, vocab_size, num_slices, PADDED: tl.constexpr):
    """The count or mass to pass; `whole` is all mass."""
    limit = tl.load(ints + TOP_K_LIMIT)
    if search != TOP_K:
        if (search == TOP_P) & is_restricted(ints, floats, vocab_size):
            piece = tl.arange(0, PADDED)
            exists = piece < num_slices
            mass = tl.sum(tl.load(weights + piece, mask=exists, other=0), axis=0)
            num_ties = tl.sum(tl.load(weights + num_slices + piece, mask=exists, other=0), axis=0)
            tied = tl.sum(tl.load(weights + 2 * num_slices + piece, mask=exists, other=0), axis=0)
            kept = tl.minimum(tl.load(ints + TOP_K_KEPT), num_ties)
            whole = mass + kept * (tied // tl.maximum(num_ties, 1))
        limit = (tl.load(floats + TOP_P_LIMIT).to(tl.float64) * whole.to(tl.float64)).to(tl.int64)
    return limit


@triton.jit
def settle(
    states,
    hist,
    weights,
    ints,
    floats,
    search,
    vocab_size,
    num_slices,
    LEVEL: tl.constexpr,
    BINS: tl.constexpr,
    PADDED: tl.constexpr,
    MASS_BITS: tl.constexpr,
):
    """The interval that the histogram of LEVEL leaves of a search, as `_load_state` has it."""
    index = tl.arange(0, BINS)
    if LEVEL == 0:
        low, high = tl.full((), _LOWEST_KEY + 1, tl.int64), tl.full((), 0x7FFFFFFF, tl.int64)
        above, mass_above = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
        within, mass_within = tl.full((), 2, tl.int64), tl.full((), 0, tl.int64)
        whole = tl.sum(tl.load(hist + index), axis=0) & ((1 << MASS_BITS) - 1)
        limit = _limit(search, whole, weights, ints, floats, vocab_size, num_slices, PADDED)
    else:
        low, high, above, mass_above, within, mass_within, limit = _load_state(states + (LEVEL - 1) * STATE)
    if (within > 1) & (low < high):
        packed = tl.load(hist + index)
        running = tl.cumsum(packed, axis=0)
        count = above + (running >> MASS_BITS)
        mass = mass_above + (running & ((1 << MASS_BITS) - 1))
        fits = tl.where(search == TOP_K, count, mass) <= limit
        found = tl.sum(fits.to(tl.int64), axis=0)
        passed = tl.sum(tl.where(fits, packed, 0), axis=0)
        inside = tl.sum(tl.where(index == found, packed, 0), axis=0)
        above += passed >> MASS_BITS
        mass_above += passed & ((1 << MASS_BITS) - 1)
        within = inside >> MASS_BITS
        mass_within = inside & ((1 << MASS_BITS) - 1)
        if found == BINS:
            # Nothing passes the limit: all stays.
            low, high = low - 1, low - 1
        elif LEVEL == 0:
            top, width = tl.load(floats + TOP), tl.load(floats + WIDTH + search)
            high = order_key(_edge(top, width, found))
            if found < BINS - 1:
                low = order_key(_edge(top, width, found + 1)) + 1
        else:
            shift = key_shift(low, high, BINS)
            high = high - (found << shift)
            low = tl.maximum(low, high - ((1 << shift) - 1).to(tl.int64))
    return low, high, above, mass_above, within, mass_within, limit


@triton.jit
def cut(search, above, mass_above, within, mass_within, limit):
    """How many tokens of the last interval stay, and how many in all."""
    by_mass = ((limit - mass_above) * within) // tl.maximum(mass_within, 1) + 1
    kept = tl.minimum(tl.where(search == TOP_K, limit - above, by_mass), within)
    return kept, above + kept


@triton.jit
def top_k_cut(
    states,
    hist,
    ints,
    floats,
    vocab_size,
    num_slices,
    LEVEL: tl.constexpr,
    BINS: tl.constexpr,
    PADDED: tl.constexpr,
    MASS_BITS: tl.constexpr,
):
    """Lowest and highest key at the cut of top-k, how many of them stay, and how many in all."""
    low, high = tl.full((), _LOWEST_KEY, tl.int64), tl.full((), _LOWEST_KEY, tl.int64)
    kept, count = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64) + vocab_size
    if tl.load(ints + TOP_K_LIMIT) < vocab_size:
        low, high, above, mass_above, within, mass_within, limit = settle(
            states, hist, states, ints, floats, TOP_K, vocab_size, num_slices, LEVEL, BINS, PADDED, MASS_BITS
        )
        kept, count = cut(TOP_K, above, mass_above, within, mass_within, limit)
    return low, high, kept, count


@triton.jit
def store_weights(weights, num_slices, value, low, high, min_p, top, temperature, unit):
    """What a slice keeps of a cut: the mass above it, and count and mass at it."""
    key = order_key(value)
    weight, mass = weigh(value, top, temperature, unit)
    is_likely = (value > float("-inf")) & (weight >= min_p)
    is_tie = is_likely & (key >= low) & (key <= high)
    tl.store(weights, tl.sum(tl.where(is_likely & (key > high), mass, 0), axis=0))
    tl.store(weights + num_slices, tl.sum(is_tie.to(tl.int64), axis=0))
    tl.store(weights + 2 * num_slices, tl.sum(tl.where(is_tie, mass, 0), axis=0))


@triton.jit
def join_slices(slices, floats, num_slices, PADDED: tl.constexpr, MASS_BITS: tl.constexpr):
    """Largest logit, smallest finite one, total weight at the first temperature, and the unit of masses."""
    piece = tl.arange(0, PADDED)
    exists = piece < num_slices
    tops = tl.load(slices + SLICE_TOP * num_slices + piece, mask=exists, other=float("-inf"))
    bottoms = tl.load(slices + SLICE_BOTTOM * num_slices + piece, mask=exists, other=float("inf"))
    totals = tl.load(slices + SLICE_TOTAL * num_slices + piece, mask=exists, other=0.0)
    top = tl.max(tops, axis=0)
    weight, _ = weigh(tops, top, tl.load(floats + FIRST_TEMPERATURE), 1.0)
    total = tl.sum(totals * weight, axis=0)
    # The total at temperature 1 bounds that at the adaptive ones, which are below 1.
    unit = _power_of_two((1 << (MASS_BITS - 2)) / total)
    return top, tl.min(bottoms, axis=0), total, unit


@triton.jit
def adaptive_temperature(
    states,
    hist,
    slices,
    ints,
    floats,
    vocab_size,
    num_slices,
    LEVEL: tl.constexpr,
    BINS: tl.constexpr,
    PADDED: tl.constexpr,
    MASS_BITS: tl.constexpr,
):
    """See `sampler.entropy_temperature`."""
    nucleus = tl.full((), 0, tl.int64) + vocab_size + 1
    if tl.load(floats + TOP_P_LIMIT) < 1.0:
        _, _, above, mass_above, within, mass_within, limit = settle(
            states, hist, states, ints, floats, NUCLEUS, vocab_size, num_slices, LEVEL, BINS, PADDED, MASS_BITS
        )
        nucleus = above + ((limit - mass_above) * within) // tl.maximum(mass_within, 1) + 1
    piece = tl.arange(0, PADDED)
    parts = tl.load(slices + SLICE_ENTROPY * num_slices + piece, mask=piece < num_slices, other=0.0)
    openness = tl.sum(parts, axis=0) / tl.log(tl.maximum(nucleus, 2).to(tl.float32))
    return _LOWEST_TEMPERATURE + _TEMPERATURE_RANGE * tl.minimum(openness, 1.0)
