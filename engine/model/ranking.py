"""Top-k whose ties go to the lowest id, which `torch.topk` does not promise."""

from __future__ import annotations

import torch
from torch import Tensor

_LOW_BITS = 0xFFFFFFFF


def ranking_keys(scores_MN: Tensor, first_id: int = 0) -> Tensor:
    """Distinct int64 keys of float32 scores: the larger key has the larger score or, among equals, the lower id.

    Column n stands for id `first_id + n`. NaN has no place in the order: exclude it before.
    """
    # A float's bits order like a signed integer once the magnitude bits of negative ones are inverted;
    # adding zero turns -0.0 into 0.0.
    bits = (scores_MN + 0.0).view(torch.int32)
    ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).long()
    ids = torch.arange(first_id, first_id + scores_MN.shape[-1], device=scores_MN.device)
    return (ordered << 32) + (_LOW_BITS - ids)


def ids_of_keys(keys: Tensor) -> Tensor:
    """The ids that `ranking_keys` put into its keys."""
    return _LOW_BITS - (keys & _LOW_BITS)


def top_k_lowest_id(scores_MN: Tensor, k: int) -> Tensor:
    """Ids ids_MK (int64) of the k largest float32 scores, best first, ties to the lowest id."""
    return ids_of_keys(ranking_keys(scores_MN).topk(min(k, scores_MN.shape[-1]), dim=-1).values)
