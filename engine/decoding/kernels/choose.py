"""One token for each pick without sorting the vocabulary; the slow twin is `sampler.choose`.

Every kernel runs one program for each slice of the vocabulary and pick, reads the logits where lm_head left them, and
adjusts them on the way. A pick that is no commit ends each program at its first load, and a greedy one does after the
first kernel. In order:

1. read: each slice's largest logit and sums; what the pick's lane asks for;
2. search (LEVELS launches): NUCLEUS and TOP_K side by side, see `search`;
3. search (LEVELS launches): TOP_P at the final temperature;
4. weigh: the mass that each slice keeps;
5. draw: the slice, and in it the token, where the running mass passes the random number's share.

The token is the slow twin's unless the random number lies within about 1e-5 of a boundary between two tokens, or a
limit within about 1e-6 of a running mass: the twin adds float32 probabilities, the kernels integers of 2**-44.

Shapes: R rows, C canvas positions, K picks a row, M = R * K picks, V vocabulary, W padded vocabulary, S slices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..random import FIRST_FACTOR, INCREMENT, SECOND_FACTOR
from ..sampler import Adjustment, Choice, Chosen
from .adjust import load_logits, order_key
from .levels import narrow_kernel, open_kernel
from .record import (
    CUT_HIGH,
    CUT_KEPT,
    CUT_LOW,
    ENTROPY,
    FIRST_TEMPERATURE,
    FLOATS,
    GREEDY,
    INTS,
    IS_EARLY,
    KIND,
    LANE,
    LAST_TEMPERATURE,
    MIN_P,
    NOTHING,
    NUM_HISTOGRAMS,
    NUM_SEARCHES,
    PENALTY,
    RANDOM_BITS,
    SAMPLED,
    SLICE_BOTTOM,
    SLICE_FLOATS,
    SLICE_RAW_TOP,
    SLICE_RAW_TOTAL,
    SLICE_TOP,
    SLICE_TOTAL,
    SLICE_WEIGHTS,
    STATE,
    TOKEN,
    TOP,
    TOP_K_COUNT,
    TOP_K_HIGH,
    TOP_K_KEPT,
    TOP_K_LIMIT,
    TOP_K_LOW,
    TOP_P,
    TOP_P_LIMIT,
    UNIT,
)
from .search import BINS, LEVELS, clear, cut, load_pick_logits, settle, store_weights, weigh

SLICE = 2048
"""Columns of a program."""
NUM_WARPS = 8

_INCREMENT = tl.constexpr(INCREMENT)
_FIRST_FACTOR = tl.constexpr(FIRST_FACTOR)
_SECOND_FACTOR = tl.constexpr(SECOND_FACTOR)


@triton.jit
def _mix(state):
    # An arithmetic shift, and then a mask, is the logical shift that int64 lacks.
    state = (state ^ ((state >> 30) & 0x3FFFFFFFF)) * _FIRST_FACTOR
    state = (state ^ ((state >> 27) & 0x1FFFFFFFFF)) * _SECOND_FACTOR
    return state ^ ((state >> 31) & 0x1FFFFFFFF)


@triton.jit
def _random_bits(seed, position, choice_index):
    """The 53 bits of `random.uniform`."""
    state = _mix(seed + _INCREMENT)
    state = _mix((state ^ position) + _INCREMENT)
    state = _mix((state ^ choice_index) + _INCREMENT)
    return (state >> 11) & 0x1FFFFFFFFFFFFF


@triton.jit
def _read_kernel(
    logits_ptr,
    offset_ptr,
    present_ptr,
    is_end_ptr,
    banned_ptr,
    row_length,
    lane_stride,
    vocab_size,
    pick_ptr,
    is_commit_ptr,
    position_ptr,
    lane_ptr,
    penalty_ptr,
    first_end_ptr,
    temperature_ptr,
    top_p_ptr,
    top_k_ptr,
    min_p_ptr,
    is_entropy_ptr,
    is_greedy_ptr,
    seed_ptr,
    choice_index_ptr,
    int_ptr,
    float_ptr,
    slice_ptr,
    best_ptr,
    hist_ptr,
    num_slices,
    num_picks,
    CANVAS: tl.constexpr,
    SLICE: tl.constexpr,
    BINS: tl.constexpr,
):
    """Step 1. What later steps read of a pick is copied to one place, as each look-up waits for the one before."""
    piece = tl.program_id(0)
    pick = tl.program_id(1).to(tl.int64)
    ints, floats = int_ptr + pick * INTS, float_ptr + pick * FLOATS
    if tl.load(is_commit_ptr + pick) == 0:
        if piece == 0:
            tl.store(ints + KIND, NOTHING)
        return
    row = pick // num_picks
    token = row * CANVAS + tl.load(pick_ptr + pick)
    lane = tl.load(lane_ptr + row)
    position = tl.load(position_ptr + token)
    penalty = tl.load(penalty_ptr + lane)
    is_early = position < tl.load(first_end_ptr + lane)
    is_entropy = tl.load(is_entropy_ptr + lane) != 0
    is_greedy = tl.load(is_greedy_ptr + lane) != 0
    # Below 1e-30 a temperature would underflow; logits differ by far more.
    temperature = tl.where(is_entropy, 1.0, tl.maximum(tl.load(temperature_ptr + lane), 1e-30))
    if piece == 0:
        tl.store(ints + KIND, tl.where(is_greedy, GREEDY, tl.where(is_entropy, ENTROPY, SAMPLED)))
        tl.store(ints + TOKEN, token)
        tl.store(ints + LANE, lane)
        tl.store(ints + IS_EARLY, is_early.to(tl.int64))
        tl.store(ints + TOP_K_LIMIT, tl.load(top_k_ptr + lane))
        bits = _random_bits(tl.load(seed_ptr + lane), position, tl.load(choice_index_ptr + lane))
        tl.store(ints + RANDOM_BITS, bits)
        tl.store(floats + PENALTY, penalty)
        tl.store(floats + FIRST_TEMPERATURE, temperature)
        tl.store(floats + TOP_P_LIMIT, tl.load(top_p_ptr + lane))
        tl.store(floats + MIN_P, tl.load(min_p_ptr + lane))
    hists = hist_ptr + pick * NUM_HISTOGRAMS * BINS
    clear(hists, piece, num_slices, BINS)
    clear(hists + 3 * BINS, piece, num_slices, BINS)
    column = piece * SLICE + tl.arange(0, SLICE)
    raw, value = load_logits(
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
    )
    top = tl.max(value, axis=0)
    some_top = tl.where(top == float("-inf"), 0.0, top)
    weight, _ = weigh(value, some_top, temperature, 1.0)
    raw_top = tl.max(raw, axis=0)
    slices = slice_ptr + pick * SLICE_FLOATS * num_slices + piece
    tl.store(slices + SLICE_TOP * num_slices, top)
    tl.store(slices + SLICE_BOTTOM * num_slices, tl.min(tl.where(value == float("-inf"), top, value), axis=0))
    tl.store(slices + SLICE_TOTAL * num_slices, tl.sum(weight, axis=0))
    tl.store(slices + SLICE_RAW_TOP * num_slices, raw_top)
    tl.store(slices + SLICE_RAW_TOTAL * num_slices, tl.sum(tl.exp(raw - raw_top), axis=0))
    tl.store(best_ptr + pick * num_slices + piece, tl.min(tl.where(value == top, column, vocab_size), axis=0))


@triton.jit
def _weigh_kernel(
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
    weight_ptr,
    hist_ptr,
    state_ptr,
    num_slices,
    LEVELS: tl.constexpr,
    SLICE: tl.constexpr,
    BINS: tl.constexpr,
    PADDED: tl.constexpr,
    MASS_BITS: tl.constexpr,
):
    """Step 4. The shorter of the two rankings, that of top-k and that of top-p, is what stays."""
    piece = tl.program_id(0)
    pick = tl.program_id(1).to(tl.int64)
    ints, floats = int_ptr + pick * INTS, float_ptr + pick * FLOATS
    if tl.load(ints + KIND) < SAMPLED:
        return
    weights = weight_ptr + pick * SLICE_WEIGHTS * num_slices
    low, high = tl.load(ints + TOP_K_LOW), tl.load(ints + TOP_K_HIGH)
    kept = tl.load(ints + TOP_K_KEPT)
    if tl.load(floats + TOP_P_LIMIT) < 1.0:
        p_low, p_high, above, mass_above, within, mass_within, limit = settle(
            state_ptr + (pick * NUM_SEARCHES + TOP_P) * LEVELS * STATE,
            hist_ptr + (pick * NUM_HISTOGRAMS + (2 * LEVELS - 1) % 3) * BINS,
            weights,
            ints,
            floats,
            TOP_P,
            vocab_size,
            num_slices,
            LEVELS - 1,
            BINS,
            PADDED,
            MASS_BITS,
        )
        p_kept, p_count = cut(TOP_P, above, mass_above, within, mass_within, limit)
        if p_count < tl.load(ints + TOP_K_COUNT):
            low, high, kept = p_low, p_high, p_kept
    if piece == 0:
        tl.store(ints + CUT_LOW, low)
        tl.store(ints + CUT_HIGH, high)
        tl.store(ints + CUT_KEPT, kept)
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
    top, unit = tl.load(floats + TOP), tl.load(floats + UNIT)
    temperature, min_p = tl.load(floats + LAST_TEMPERATURE), tl.load(floats + MIN_P)
    store_weights(weights + piece, num_slices, value, low, high, min_p, top, temperature, unit)


@triton.jit
def _draw_slice(weights, ints, num_slices, PADDED: tl.constexpr):
    """The slice to draw from, how many ties it keeps, and the mass to pass in it."""
    piece = tl.arange(0, PADDED)
    exists = piece < num_slices
    above = tl.load(weights + piece, mask=exists, other=0)
    num_ties = tl.load(weights + num_slices + piece, mask=exists, other=0)
    tied = tl.load(weights + 2 * num_slices + piece, mask=exists, other=0)
    # Ties are kept in order of their ids, and so of slices.
    left = tl.load(ints + CUT_KEPT) - (tl.cumsum(num_ties, axis=0) - num_ties)
    kept = tl.minimum(tl.maximum(left, 0), num_ties)
    mass = above + kept * (tied // tl.maximum(num_ties, 1))
    running = tl.cumsum(mass, axis=0)
    whole = tl.sum(mass, axis=0)
    share = tl.load(ints + RANDOM_BITS).to(tl.float64) * 1.1102230246251565e-16
    # The product may be rounded up to the whole.
    goal = tl.minimum((share * whole.to(tl.float64)).to(tl.int64), whole - 1)
    found = tl.sum((running <= goal).to(tl.int64), axis=0)
    is_found = piece == found
    goal -= tl.sum(tl.where(is_found, running - mass, 0), axis=0)
    return found, tl.sum(tl.where(is_found, kept, 0), axis=0), goal


@triton.jit
def _draw_kernel(
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
    best_ptr,
    weight_ptr,
    token_ptr,
    target_ptr,
    logprob_ptr,
    num_slices,
    SLICE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Step 5, one program a pick."""
    pick = tl.program_id(0).to(tl.int64)
    ints, floats = int_ptr + pick * INTS, float_ptr + pick * FLOATS
    kind = tl.load(ints + KIND)
    if kind == NOTHING:
        tl.store(token_ptr + pick, 0)
        tl.store(target_ptr + pick, 0.0)
        tl.store(logprob_ptr + pick, 0.0)
        return
    slices = slice_ptr + pick * SLICE_FLOATS * num_slices
    piece = tl.arange(0, PADDED)
    exists = piece < num_slices
    token = tl.full((), 0, tl.int64)
    if kind == GREEDY:
        tops = tl.load(slices + SLICE_TOP * num_slices + piece, mask=exists, other=float("-inf"))
        best = tl.load(best_ptr + pick * num_slices + piece, mask=exists, other=vocab_size)
        token += tl.min(tl.where(tops == tl.max(tops, axis=0), best, vocab_size), axis=0)
    else:
        found, kept, goal = _draw_slice(weight_ptr + pick * SLICE_WEIGHTS * num_slices, ints, num_slices, PADDED)
        index = tl.arange(0, SLICE)
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
            found * SLICE + index,
        )
        top, unit = tl.load(floats + TOP), tl.load(floats + UNIT)
        weight, mass = weigh(value, top, tl.load(floats + LAST_TEMPERATURE), unit)
        key = order_key(value)
        is_likely = (value > float("-inf")) & (weight >= tl.load(floats + MIN_P))
        high = tl.load(ints + CUT_HIGH)
        is_tie = is_likely & (key >= tl.load(ints + CUT_LOW)) & (key <= high)
        is_kept = (is_likely & (key > high)) | (is_tie & (tl.cumsum(is_tie.to(tl.int32), axis=0) <= kept))
        running = tl.cumsum(tl.where(is_kept, mass, 0), axis=0)
        token += found * SLICE + tl.sum((running <= goal).to(tl.int64), axis=0)
    raw_tops = tl.load(slices + SLICE_RAW_TOP * num_slices + piece, mask=exists, other=float("-inf"))
    raw_totals = tl.load(slices + SLICE_RAW_TOTAL * num_slices + piece, mask=exists, other=0.0)
    raw_top = tl.max(raw_tops, axis=0)
    raw_total = tl.sum(raw_totals * tl.exp(raw_tops - raw_top), axis=0)
    target = tl.load(logits_ptr + tl.load(ints + TOKEN) * row_length + token).to(tl.float32)
    tl.store(token_ptr + pick, token)
    tl.store(target_ptr + pick, target)
    tl.store(logprob_ptr + pick, target - raw_top - tl.log(raw_total))


def choose(
    logits_RCW: Tensor,
    position_RC: Tensor,
    pick_RK: Tensor,
    is_commit_RK: Tensor,
    adjustment: Adjustment,
    choice: Choice,
    seed_N: Tensor,
    choice_index_N: Tensor,
    *,
    slice_size: int = SLICE,
    num_warps: int = NUM_WARPS,
) -> Chosen:
    """See `sampler.choose`. Entries that are no commit hold zeros.

    Sums of floats are made by slice, so another `slice_size` (a power of two) is another rounding. Scratch memory is
    100 KB a pick, and 52 bytes for each of its slices.
    """
    num_rows, canvas, row_length = logits_RCW.shape
    num_picks = pick_RK.shape[1]
    total = num_rows * num_picks
    vocab_size = adjustment.vocab_size
    num_slices = triton.cdiv(vocab_size, slice_size)
    device = logits_RCW.device
    assert all(tensor.is_contiguous() for tensor in (logits_RCW, position_RC, pick_RK, is_commit_RK))

    def scratch(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(total, *shape, dtype=dtype, device=device)

    ints, floats = scratch(INTS.value, dtype=torch.int64), scratch(FLOATS.value, dtype=torch.float32)
    slices = scratch(SLICE_FLOATS.value, num_slices, dtype=torch.float32)
    best = scratch(num_slices, dtype=torch.int32)
    weights = scratch(SLICE_WEIGHTS.value, num_slices, dtype=torch.int64)
    hists = scratch(NUM_HISTOGRAMS.value, BINS, dtype=torch.int64)
    states = scratch(NUM_SEARCHES.value, LEVELS, STATE.value, dtype=torch.int64)
    token_RK = torch.empty(num_rows, num_picks, dtype=torch.int64, device=device)
    target_RK = torch.empty(num_rows, num_picks, dtype=torch.float32, device=device)
    logprob_RK = torch.empty_like(target_RK)
    # A count of the whole vocabulary and a mass of at most 2 fit into 63 bits.
    sizes = {"BINS": BINS, "SLICE": slice_size}
    search_sizes = {**sizes, "PADDED": triton.next_power_of_2(num_slices), "MASS_BITS": 62 - vocab_size.bit_length()}
    logits = (
        logits_RCW,
        adjustment.offset_NV,
        adjustment.present_NV,
        adjustment.is_end_NV,
        adjustment.banned_V,
        row_length,
        adjustment.lane_stride,
        vocab_size,
    )
    _read_kernel[(num_slices, total)](
        *logits,
        pick_RK,
        is_commit_RK,
        position_RC,
        adjustment.lane_R,
        adjustment.penalty_N,
        adjustment.first_end_N,
        choice.temperature_M,
        choice.top_p_M,
        choice.top_k_M,
        choice.min_p_M,
        choice.is_entropy_M,
        choice.is_greedy_M,
        seed_N,
        choice_index_N,
        ints,
        floats,
        slices,
        best,
        hists,
        num_slices,
        num_picks,
        CANVAS=canvas,
        **sizes,
        num_warps=num_warps,
    )
    for stage, num_searches in enumerate((2, 1)):
        for level in range(LEVELS):
            kernel = narrow_kernel if level else open_kernel
            kernel[(num_slices, total, num_searches)](
                *logits,
                ints,
                floats,
                slices,
                weights,
                hists,
                states,
                num_slices,
                STAGE=stage,
                LEVEL=level,
                LEVELS=LEVELS,
                **search_sizes,
                num_warps=num_warps,
            )
    _weigh_kernel[(num_slices, total)](
        *logits, ints, floats, weights, hists, states, num_slices, LEVELS=LEVELS, **search_sizes, num_warps=num_warps
    )
    _draw_kernel[(total,)](
        *logits,
        ints,
        floats,
        slices,
        best,
        weights,
        token_RK,
        target_RK,
        logprob_RK,
        num_slices,
        SLICE=slice_size,
        PADDED=search_sizes["PADDED"],
        num_warps=num_warps,
    )
    return Chosen(token_RK, target_RK, logprob_RK)
