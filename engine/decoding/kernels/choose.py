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
from torch import Tensor

from ..sampler import Adjustment, Choice, Chosen
from .draw import draw_kernel, read_kernel, weigh_kernel
from .levels import narrow_kernel, open_kernel
from .record import FLOATS, INTS, NUM_HISTOGRAMS, NUM_SEARCHES, SLICE_FLOATS, SLICE_WEIGHTS, STATE
from .search import BINS, LEVELS

SLICE = 2048
"""Columns of a program."""
NUM_WARPS = 8


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
    read_kernel[(num_slices, total)](
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
    weigh_kernel[(num_slices, total)](
        *logits, ints, floats, weights, hists, states, num_slices, LEVELS=LEVELS, **search_sizes, num_warps=num_warps
    )
    draw_kernel[(total,)](
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
