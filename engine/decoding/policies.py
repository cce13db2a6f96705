"""Which masked positions a denoising step commits: rules that differ from row to row of one pass.

Every rule ranks the masked positions of a row by confidence, ties to the lowest position, and commits the first n,
at least one and at most the row's cap. With c_1 >= c_2 >= ... the confidences and h_1, h_2, ... the entropies (nats,
of the same distributions) in this order, n is

- `confidence`, and `lossless` for each of its rows: the cap;
- `threshold` t: the largest n with c_n > t. Fast-dLLM (Wu et al., 2025, arXiv 2505.22618) takes c_n >= t, SGLang's
  low-confidence algorithm c_n > t. Strict, 1.0 is one at a time, also where a confidence rounds to 1.
- `factor` f: the largest n with (n + 1) * (1 - c_n) < f, Fast-dLLM's factor-based decoding. It shows that with f = 1
  the likeliest token of each position are together the likeliest tokens of all;
- `entropy_bound` g: the largest n with (h_1 + ... + h_n) - max(h_1, ..., h_n) <= g, the EB-Sampler (Ben-Hamu et al.,
  2025, arXiv 2505.24857), with the confidence as its error proxy: the left side bounds the information that the n
  tokens have about each other. 0 is one at a time, except for positions that are certain.

Each of these conditions holds for 1 to n if it holds for n, so a rule cuts the ranking at one place.

Shapes: R rows, C canvas positions (here often in order of rank), K picks in a step, D model width, N lanes, P policies,
F fields of a pick.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..request import Policy
from .sampler import Chosen

Rule = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(confidence_RC, entropy_RC, parameter_R1), in order of rank -> where the rule still holds, is_within_RC (bool)."""


def _by_count(confidence_RC: Tensor, entropy_RC: Tensor, parameter_R1: Tensor) -> Tensor:
    return torch.ones_like(confidence_RC, dtype=torch.bool)


def _by_threshold(confidence_RC: Tensor, entropy_RC: Tensor, parameter_R1: Tensor) -> Tensor:
    return confidence_RC > parameter_R1


def _by_factor(confidence_RC: Tensor, entropy_RC: Tensor, parameter_R1: Tensor) -> Tensor:
    return (_count_C(confidence_RC) + 1) * (1 - confidence_RC) < parameter_R1


def _by_entropy(confidence_RC: Tensor, entropy_RC: Tensor, parameter_R1: Tensor) -> Tensor:
    # In double, so that a sum does not depend on the order in which a device adds.
    entropy_RC = entropy_RC.double()
    return entropy_RC.cumsum(dim=-1) - entropy_RC.cummax(dim=-1).values <= parameter_R1


_RULES: dict[Policy, Rule] = {
    "confidence": _by_count,
    "threshold": _by_threshold,
    "factor": _by_factor,
    "entropy_bound": _by_entropy,
    "lossless": _by_count,
}


def policy_id(policy: Policy) -> int:
    """The number that stands for a policy in `policy_R`."""
    return list(_RULES).index(policy)


def choose_positions(
    confidence_RC: Tensor,
    entropy_RC: Tensor,
    masked_RC: Tensor,
    cap_R: Tensor,
    policy_R: Tensor,
    parameter_R: Tensor,
    num_picks: int,
) -> tuple[Tensor, Tensor]:
    """The positions each row commits, most confident first: offsets pick_RK (int64) and is_pick_RK (bool).

    `policy_R` (int64) is a `policy_id`, `parameter_R` (float32) that policy's parameter, `cap_R` the most commits; a
    row of cap 0, or without a masked position, commits nothing. `num_picks` = K must be at least the largest number
    of commits. Entries that are no pick hold some valid offset. All rules are evaluated for all rows, so that the
    work does not depend on which ones a batch holds.
    """
    # A confidence is a probability, so -1 sorts every other position behind the masked ones.
    ranked = torch.where(masked_RC, confidence_RC, -1.0).sort(dim=-1, descending=True, stable=True)
    order_RC = ranked.indices
    entropy_RC, parameter_R1 = entropy_RC.gather(1, order_RC), parameter_R[:, None]
    within_RPC = torch.stack([rule(ranked.values, entropy_RC, parameter_R1) for rule in _RULES.values()], dim=1)
    own_R11 = policy_R[:, None, None].expand(-1, 1, order_RC.shape[1])
    is_within_RC = within_RPC.gather(1, own_R11).squeeze(1) & masked_RC.gather(1, order_RC)
    count_R = torch.where(is_within_RC, _count_C(order_RC), 0).amax(dim=-1).clamp(min=1).minimum(cap_R)
    is_pick_RC = (_count_C(order_RC) <= count_R[:, None]) & masked_RC.gather(1, order_RC)
    return order_RC[:, :num_picks], is_pick_RC[:, :num_picks]


class PickFields(NamedTuple):
    """What the host learns of a pick, in the order in which `pack` puts it."""

    position: float
    token: float
    is_commit: float
    confidence: float
    target_logit: float
    logprob: float
    is_finite: float
    """Of its row."""
    draft_position: float
    """The commit that its lane expected."""
    draft_token: float


NUM_FIELDS = len(PickFields._fields)


@dataclass(frozen=True, slots=True)
class Picks:
    """The positions that rows commit. Entries that are no pick hold some valid position."""

    pick_RK: Tensor
    """int64 offsets in the canvas, most confident first."""
    is_pick_RK: Tensor
    position_RK: Tensor
    confidence_RK: Tensor
    is_finite_R: Tensor
    """False for a row with a position whose logits are not finite: it commits nothing."""


def pick(
    confidence_RC: Tensor,
    entropy_RC: Tensor,
    is_finite_RC: Tensor,
    masked_RC: Tensor,
    position_RC: Tensor,
    quota_R: Tensor,
    lane_R: Tensor,
    policy_N: Tensor,
    parameter_N: Tensor,
    num_picks: int,
) -> Picks:
    """`choose_positions` by the policies of the rows' lanes, nothing in rows that are not finite."""
    is_finite_R = is_finite_RC.all(dim=-1)
    pick_RK, is_pick_RK = choose_positions(
        confidence_RC,
        entropy_RC,
        masked_RC,
        quota_R * is_finite_R,
        policy_N[lane_R],
        parameter_N[lane_R],
        num_picks,
    )
    return Picks(pick_RK, is_pick_RK, position_RC.gather(1, pick_RK), confidence_RC.gather(1, pick_RK), is_finite_R)


def pack(
    picks: Picks,
    chosen: Chosen,
    is_commit_RK: Tensor,
    lane_R: Tensor,
    draft_position_N: Tensor,
    draft_token_N: Tensor,
) -> Tensor:
    """What the host reads of a pass, packed_RKF in float64, which holds every id exactly: see `PickFields`."""
    values = (
        picks.position_RK,
        chosen.token_RK,
        is_commit_RK,
        picks.confidence_RK,
        chosen.target_logit_RK,
        chosen.logprob_RK,
        picks.is_finite_R[:, None].expand_as(is_commit_RK),
        draft_position_N[lane_R][:, None].expand_as(is_commit_RK),
        draft_token_N[lane_R][:, None].expand_as(is_commit_RK),
    )
    return torch.stack([value.double() for value in values], dim=-1)


def _count_C(values_RC: Tensor) -> Tensor:
    """1 for the first rank, 2 for the second, and so on."""
    return torch.arange(1, values_RC.shape[1] + 1, device=values_RC.device)


def share_hidden(hidden_RCD: Tensor, masked_RC: Tensor, is_alike_R: Tensor) -> Tensor:
    """Give all masked positions of the rows marked in `is_alike_R` the hidden state of the first, hidden_RCD.

    Masked positions differ only by what they attend to at which distance. Where everything they attend to is
    masked too, or the model knows no distances, they are equal and only rounding tells them apart: it would
    choose positions by the shape of the batch instead of by the rule for ties.
    """
    first_R = masked_RC.int().argmax(dim=-1)
    first_R1D = hidden_RCD.gather(1, first_R[:, None, None].expand(-1, 1, hidden_RCD.shape[-1]))
    return torch.where((masked_RC & is_alike_R[:, None])[:, :, None], first_R1D, hidden_RCD)
