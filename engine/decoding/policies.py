"""Which masked positions a denoising step commits.

Shapes: R rows, C canvas positions, K picks in a step.
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
