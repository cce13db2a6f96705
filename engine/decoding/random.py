"""Counter-based random numbers: a value depends on its key alone, never on who else is in the batch."""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


INCREMENT = _signed(0x9E3779B97F4A7C15)
FIRST_FACTOR = _signed(0xBF58476D1CE4E5B9)
SECOND_FACTOR = _signed(0x94D049BB133111EB)


def uniform(seed: Tensor, position: Tensor, choice_index: Tensor) -> Tensor:
    """One number in [0, 1) for each key (seed, absolute position, choice index).

    int64 tensors of one broadcastable shape -> float64 of that shape, a multiple of 2**-53. Source: the
    SplitMix64 output function (Steele, Lea and Flood, 2014), applied once for each part of the key.
    """
    state = _mix(seed + INCREMENT)
    state = _mix((state ^ position) + INCREMENT)
    state = _mix((state ^ choice_index) + INCREMENT)
    return _shift_right(state, 11).double() * 2.0**-53


def _mix(value: Tensor) -> Tensor:
    # int64 products wrap around, which is the arithmetic modulo 2**64 that the function is defined in.
    value = (value ^ _shift_right(value, 30)) * FIRST_FACTOR
    value = (value ^ _shift_right(value, 27)) * SECOND_FACTOR
    return value ^ _shift_right(value, 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's own repeats the sign bit."""
    return torch.bitwise_and(value >> bits, (1 << (64 - bits)) - 1)
