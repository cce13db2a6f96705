"""Which masked positions a denoising step commits.

Shapes: R rows, C canvas positions, K picks in a step, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def most_confident(confidence_RC: Tensor, masked_RC: Tensor, quota_R: Tensor, num_picks: int) -> tuple[Tensor, Tensor]:
    """The `quota_R[r]` most confident masked positions of each row, most confident first, ties to the lowest.

    Returns offsets in the canvas pick_RK (int64) and is_pick_RK (bool); entries that are no pick hold
    some valid offset. `num_picks` = K must be at least the largest quota.
    """
    # A confidence is a probability, so -1 sorts every other position behind the masked ones.
    ranked = torch.where(masked_RC, confidence_RC, -1.0).sort(dim=-1, descending=True, stable=True)
    pick_RK = ranked.indices[:, :num_picks]
    rank_K = torch.arange(pick_RK.shape[1], device=pick_RK.device)
    is_pick_RK = (rank_K[None, :] < quota_R[:, None]) & masked_RC.gather(1, pick_RK)
    return pick_RK, is_pick_RK


def share_hidden(hidden_RCD: Tensor, masked_RC: Tensor, is_alike_R: Tensor) -> Tensor:
    """Give all masked positions of the rows marked in `is_alike_R` the hidden state of the first, hidden_RCD.

    Masked positions differ only by what they attend to at which distance. Where everything they attend to is
    masked too, or the model knows no distances, they are equal and only rounding tells them apart: it would
    choose positions by the shape of the batch instead of by the rule for ties.
    """
    first_R = masked_RC.int().argmax(dim=-1)
    first_R1D = hidden_RCD.gather(1, first_R[:, None, None].expand(-1, 1, hidden_RCD.shape[-1]))
    return torch.where((masked_RC & is_alike_R[:, None])[:, :, None], first_R1D, hidden_RCD)
