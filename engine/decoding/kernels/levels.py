"""The kernels of a search: one opens it, the others narrow it, a level each. See `search`.

Shapes: M picks, S slices of the vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .adjust import order_key
from .record import (
    BOTTOM,
    ENTROPY,
    FIRST_TEMPERATURE,
    FLOATS,
    INTS,
    KIND,
    LAST_TEMPERATURE,
    MIN_P,
    NUCLEUS,
    NUM_HISTOGRAMS,
    NUM_SEARCHES,
    SAMPLED,
    SLICE_ENTROPY,
    SLICE_FLOATS,
    SLICE_WEIGHTS,
    STATE,
    TOP,
    TOP_K,
    TOP_K_COUNT,
    TOP_K_HIGH,
    TOP_K_KEPT,
    TOP_K_LOW,
    TOP_P,
    UNIT,
    WIDTH,
)
from .search import (
    REACH,
    adaptive_temperature,
    bin_width,
    clear,
    is_active,
    is_restricted,
    join_slices,
    key_shift,
    linear_bin,
    load_pick_logits,
    settle,
    store_state,
    store_weights,
    top_k_cut,
    weigh,
)


@triton.jit
def _begin_stage(
    slices,
    states,
    hists,
    ints,
    floats,
    search,
    piece,
    vocab_size,
    num_slices,
    STAGE: tl.constexpr,
    LEVELS: tl.constexpr,
    BINS: tl.constexpr,
    PADDED: tl.constexpr,
    MASS_BITS: tl.constexpr,
):
    """Largest and smallest logit, temperature, total weight (in STAGE 0), unit of mass, and the cut of top-k."""
    temperature = tl.load(floats + FIRST_TEMPERATURE)
    low, high = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    if STAGE == 0:
        top, bottom, total, unit = join_slices(slices, floats, num_slices, PADDED, MASS_BITS)
        if (piece == 0) & (search == NUCLEUS):
            tl.store(floats + TOP, top)
            tl.store(floats + BOTTOM, bottom)
            tl.store(floats + UNIT, unit)
    else:
        top, bottom, unit = tl.load(floats + TOP), tl.load(floats + BOTTOM), tl.load(floats + UNIT)
        total = unit
        last = hists + (LEVELS - 1) % 3 * BINS
        if tl.load(ints + KIND) == ENTROPY:
            temperature = adaptive_temperature(
                states, last, slices, ints, floats, vocab_size, num_slices, LEVELS - 1, BINS, PADDED, MASS_BITS
            )
        low, high, kept, count = top_k_cut(
            states + TOP_K * LEVELS * STATE,
            last + 3 * BINS,
            ints,
            floats,
            vocab_size,
            num_slices,
            LEVELS - 1,
            BINS,
            PADDED,
            MASS_BITS,
        )
        if piece == 0:
            tl.store(floats + LAST_TEMPERATURE, temperature)
            tl.store(ints + TOP_K_LOW, low)
            tl.store(ints + TOP_K_HIGH, high)
            tl.store(ints + TOP_K_KEPT, kept)
            tl.store(ints + TOP_K_COUNT, count)
    return top, bottom, temperature, total, unit, low, high


@triton.jit
def open_kernel(
    logits_ptr,
    offset_ptr,
    present_ptr,
    is_end_ptr,
    banned_ptr,
    row_length,
    lane_stride,
    vocab_size,
    int_ptr,
    float_ptr,
    slice_ptr,
    weight_ptr,
    hist_ptr,
    state_ptr,
    num_slices,
    STAGE: tl.constexpr,
    LEVEL: tl.constexpr,
    LEVELS: tl.constexpr,
    SLICE: tl.constexpr,
    BINS: tl.constexpr,
    PADDED: tl.constexpr,
    MASS_BITS: tl.constexpr,
):
    """LEVEL 0. STAGE 0 has a program for NUCLEUS and one for TOP_K; STAGE 1 has TOP_P."""
    piece = tl.program_id(0)
    pick = tl.program_id(1).to(tl.int64)
    search = tl.program_id(2) + STAGE * TOP_P
    ints, floats = int_ptr + pick * INTS, float_ptr + pick * FLOATS
    kind = tl.load(ints + KIND)
    if kind < SAMPLED:
        return
    slices = slice_ptr + pick * SLICE_FLOATS * num_slices
    hists = hist_ptr + pick * NUM_HISTOGRAMS * BINS
    mine = hists + tl.where(search == TOP_K, 3 * BINS, 0)
    STEP: tl.constexpr = STAGE * LEVELS
    clear(mine + (STEP + 1) % 3 * BINS, piece, num_slices, BINS)
    is_searched = is_active(search, ints, floats, vocab_size)
    if (STAGE == 0) & (search == TOP_K) & (is_searched == 0):
        return
    top, bottom, temperature, total, unit, low, high = _begin_stage(
        slices,
        state_ptr + pick * NUM_SEARCHES * LEVELS * STATE,
        hists,
        ints,
        floats,
        search,
        piece,
        vocab_size,
        num_slices,
        STAGE,
        LEVELS,
        BINS,
        PADDED,
        MASS_BITS,
    )
    # The entropy is wanted even where top_p = 1 makes everything the nucleus.
    is_entropy = (search == NUCLEUS) & (kind == ENTROPY)
    if is_searched | is_entropy:
        _, value = load_pick_logits(
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
            piece * SLICE + tl.arange(0, SLICE),
        )
        weight, mass = weigh(value, top, temperature, unit)
        if is_entropy:
            share = weight / total
            entropy = -tl.sum(share * tl.log(share + 1e-10), axis=0)
            tl.store(slices + SLICE_ENTROPY * num_slices + piece, entropy)
        if is_searched:
            width = bin_width(top, bottom, tl.where(search == TOP_K, float("inf"), REACH * temperature), BINS)
            if piece == 0:
                tl.store(floats + WIDTH + search, width)
            index = linear_bin(value, top, width, BINS)
            packed = tl.where(value > float("-inf"), mass + (1 << MASS_BITS), 0)
            # The last bin may be crowded.
            is_last = index == BINS - 1
            hist = mine + STEP % 3 * BINS
            tl.atomic_add(hist + index, packed, mask=(packed > 0) & (is_last == 0), sem="relaxed")
            tl.atomic_add(hist + BINS - 1, tl.sum(tl.where(is_last, packed, 0), axis=0), sem="relaxed")
            if (STAGE == 1) & is_restricted(ints, floats, vocab_size):
                weights = weight_ptr + pick * SLICE_WEIGHTS * num_slices + piece
                min_p = tl.load(floats + MIN_P)
                store_weights(weights, num_slices, value, low, high, min_p, top, temperature, unit)


@triton.jit
def narrow_kernel(
    logits_ptr,
    offset_ptr,
    present_ptr,
    is_end_ptr,
    banned_ptr,
    row_length,
    lane_stride,
    vocab_size,
    int_ptr,
    float_ptr,
    slice_ptr,
    weight_ptr,
    hist_ptr,
    state_ptr,
    num_slices,
    STAGE: tl.constexpr,
    LEVEL: tl.constexpr,
    LEVELS: tl.constexpr,
    SLICE: tl.constexpr,
    BINS: tl.constexpr,
    PADDED: tl.constexpr,
    MASS_BITS: tl.constexpr,
):
    """LEVEL 1 and on: the interval that the histogram before leaves, then a histogram of that."""
    piece = tl.program_id(0)
    pick = tl.program_id(1).to(tl.int64)
    search = tl.program_id(2) + STAGE * TOP_P
    ints, floats = int_ptr + pick * INTS, float_ptr + pick * FLOATS
    if tl.load(ints + KIND) < SAMPLED:
        return
    hists = hist_ptr + pick * NUM_HISTOGRAMS * BINS + tl.where(search == TOP_K, 3 * BINS, 0)
    STEP: tl.constexpr = STAGE * LEVELS + LEVEL
    clear(hists + (STEP + 1) % 3 * BINS, piece, num_slices, BINS)
    if is_active(search, ints, floats, vocab_size) == 0:
        return
    states = state_ptr + (pick * NUM_SEARCHES + search) * LEVELS * STATE
    low, high, above, mass_above, within, mass_within, limit = settle(
        states,
        hists + (STEP + 2) % 3 * BINS,
        weight_ptr + pick * SLICE_WEIGHTS * num_slices,
        ints,
        floats,
        search,
        vocab_size,
        num_slices,
        LEVEL - 1,
        BINS,
        PADDED,
        MASS_BITS,
    )
    if piece == 0:
        store_state(states + (LEVEL - 1) * STATE, low, high, above, mass_above, within, mass_within, limit)
    if (within > 1) & (low < high):
        _, value = load_pick_logits(
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
            piece * SLICE + tl.arange(0, SLICE),
        )
        key = order_key(value)
        temperature = tl.load(floats + (LAST_TEMPERATURE if STAGE else FIRST_TEMPERATURE))
        _, mass = weigh(value, tl.load(floats + TOP), temperature, tl.load(floats + UNIT))
        index = (high - key) >> key_shift(low, high, BINS)
        is_within = (key >= low) & (key <= high)
        tl.atomic_add(hists + STEP % 3 * BINS + index, mass + (1 << MASS_BITS), mask=is_within, sem="relaxed")
