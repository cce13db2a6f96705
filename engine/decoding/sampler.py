"""Logits to confidences and tokens: suppression, bias, penalty, bans, then temperature, min-p, top-k, top-p, choice.

Shapes: R rows, C canvas positions, M picked positions, V vocabulary, W padded vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..model.ranking import top_k_lowest_id

NEGATIVE_INFINITY = float("-inf")
# The reference's entropy-adaptive temperature: from 0.3 for a certain position to 0.7 for an open one.
_LOWEST_TEMPERATURE = 0.3
_TEMPERATURE_RANGE = 0.4
# Below this a temperature would underflow to 0; the difference is none, as float32 logits differ by far more.
_SMALLEST_TEMPERATURE = 1e-30


@dataclass(frozen=True, slots=True)
class Choice:
    """Sampling parameters of each picked position; every field has shape [M]."""

    temperature_M: Tensor
    """float32; ignored where is_greedy or is_entropy."""
    top_p_M: Tensor
    """float32; 1 is off."""
    top_k_M: Tensor
    """int64; the vocabulary's size is off."""
    min_p_M: Tensor
    """float32; 0 is off."""
    is_entropy_M: Tensor
    is_greedy_M: Tensor


def presence(token_ids_RS: Tensor, vocab_size: int) -> Tensor:
    """Which tokens occur in each sequence, present_RV (bool).

    Masks and padding count too; they are banned anyway.
    """
    present_RV = torch.zeros(token_ids_RS.shape[0], vocab_size, dtype=torch.bool, device=token_ids_RS.device)
    return present_RV.scatter_(1, token_ids_RS, True)


def adjusted_logits(
    raw_RCV: Tensor, offset_RV: Tensor, present_RV: Tensor, penalty_R: Tensor, banned_V: Tensor, ends_RCV: Tensor
) -> Tensor:
    """Logits that tokens are chosen from, float32 [R, C, V].

    `offset_RV` is logit bias minus suppression; `penalty_R` divides positive and multiplies negative logits of
    present tokens (Keskar et al., CTRL, 2019, in the form of the reference); `banned_V` and `ends_RCV` (bool)
    are never chosen.
    """
    logits = raw_RCV + offset_RV[:, None, :]
    penalty = torch.where(present_RV, penalty_R[:, None], 1.0)[:, None, :]
    logits = torch.where(logits > 0, logits / penalty, logits * penalty)
    return logits.masked_fill_(banned_V | ends_RCV, NEGATIVE_INFINITY)


def entropy(probs_RCV: Tensor) -> Tensor:
    """Entropy in nats of each distribution, entropy_RC; what has no probability adds nothing.

    In one reading of logits v with top = max v, weight = exp(v - top) and total = sum weight it is
    log(total) - sum(weight * (v - top)) / total, where a v of minus infinity adds nothing to either sum.
    """
    entropy_RC: Tensor = torch.special.entr(probs_RCV).sum(dim=-1)
    return entropy_RC


def confidence(
    logits_RCW: Tensor,
    masked_RC: Tensor,
    position_RC: Tensor,
    first_end_R: Tensor,
    offset_RV: Tensor,
    present_RV: Tensor,
    penalty_R: Tensor,
    banned_V: Tensor,
    is_end_RV: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Probability of the likeliest token at temperature 1, confidence_RC (float32), the entropy of all of them,
    entropy_RC (float32, nats), and is_finite_RC (bool).

    After penalties and bans; end tokens are banned at positions below `first_end_R`. Zeros and True at positions
    that are not masked; zeros and False where a raw logit is not finite or no token may be chosen. `logits_RCW` may
    be padded beyond the vocabulary of `offset_RV`.
    """
    raw_RCV = logits_RCW[..., : offset_RV.shape[1]]
    is_early_RC = position_RC < first_end_R[:, None]
    logits_RCV = adjusted_logits(
        raw_RCV.float(), offset_RV, present_RV, penalty_R, banned_V, is_end_RV[:, None, :] & is_early_RC[:, :, None]
    )
    probs_RCV = logits_RCV.softmax(dim=-1)
    confidence_RC, entropy_RC = probs_RCV.amax(dim=-1), entropy(probs_RCV)
    is_finite_RC = (raw_RCV.isfinite().all(dim=-1) & confidence_RC.isfinite()) | ~masked_RC
    is_told_RC = masked_RC & is_finite_RC
    return torch.where(is_told_RC, confidence_RC, 0.0), torch.where(is_told_RC, entropy_RC, 0.0), is_finite_RC


def entropy_temperature(sorted_MV: Tensor, top_p_M: Tensor) -> Tensor:
    """The reference's entropy-adaptive temperature, temperature_M in [0.3, 0.7], from logits in descending order.

    0.3 + 0.4 * min(1, H / ln(k)), with H the entropy and k the size of the nucleus, at least 2.
    """
    probs_MV = sorted_MV.softmax(dim=-1)
    nucleus_M = ((probs_MV.cumsum(dim=-1) <= top_p_M[:, None]).sum(dim=-1) + 1).clamp(min=2)
    entropy_M = -(probs_MV * torch.log(probs_MV + 1e-10)).sum(dim=-1)
    return _LOWEST_TEMPERATURE + _TEMPERATURE_RANGE * (entropy_M / nucleus_M.log()).clamp(max=1.0)


def kept_probabilities(logits_MV: Tensor, choice: Choice) -> Tensor:
    """Probabilities after temperature, min-p, top-k and top-p: float32 [M, V], zero where cut, in id order.

    Top-k and top-p break ties by the lowest id. Top-p keeps a token if the mass before it is at most top_p, as the
    reference does, so the likeliest token always stays.
    """
    # Temperature keeps the order, so one sort serves the nucleus, top-k and top-p.
    sorted_MV, ids_MV = logits_MV.sort(dim=-1, descending=True, stable=True)
    adaptive_M = entropy_temperature(sorted_MV, choice.top_p_M)
    temperature_M = torch.where(choice.is_entropy_M, adaptive_M, choice.temperature_M)
    temperature_M = torch.where(choice.is_greedy_M, 1.0, temperature_M).clamp(min=_SMALLEST_TEMPERATURE)
    # Relative to the largest, so that no quotient is +inf, which softmax makes NaN of.
    probs_MV = ((sorted_MV - sorted_MV[:, :1]) / temperature_M[:, None]).softmax(dim=-1)
    rank_V = torch.arange(probs_MV.shape[-1], device=probs_MV.device)
    is_kept = (probs_MV >= choice.min_p_M[:, None] * probs_MV[:, :1]) & (rank_V < choice.top_k_M[:, None])
    probs_MV = torch.where(is_kept, probs_MV, 0.0)
    probs_MV = probs_MV / probs_MV.sum(dim=-1, keepdim=True)
    mass_before_MV = probs_MV.cumsum(dim=-1) - probs_MV
    # The rounded sum may pass 1, which must not cut a tail that top_p = 1 keeps.
    is_kept = (mass_before_MV <= choice.top_p_M[:, None]) | (choice.top_p_M >= 1.0)[:, None]
    return torch.zeros_like(probs_MV).scatter_(-1, ids_MV, torch.where(is_kept, probs_MV, 0.0))


def choose_tokens(logits_MV: Tensor, choice: Choice, uniform_M: Tensor) -> Tensor:
    """A token for each picked position, token_M (int64).

    Greedy takes the largest logit, ties to the lowest id; otherwise the inverse distribution function, in id order,
    of `uniform_M` (float64 in [0, 1)).
    """
    greedy_M = logits_MV.argmax(dim=-1)
    probs_MV = kept_probabilities(logits_MV, choice).double()
    cumulative_MV = probs_MV.cumsum(dim=-1)
    target_M = uniform_M * cumulative_MV[:, -1]
    drawn_M = torch.searchsorted(cumulative_MV, target_M[:, None], right=True).squeeze(-1)
    # Rounding can lift the target to the whole mass; the last token with any probability takes it.
    last_M = (probs_MV.shape[-1] - 1) - (probs_MV > 0).flip(-1).int().argmax(dim=-1)
    return torch.where(choice.is_greedy_M, greedy_M, torch.minimum(drawn_M, last_M))


def top_logprobs(raw_DKV: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The `num` likeliest tokens of each pick by raw logits, best first: ids [D, K, num] and log-probabilities."""
    logprobs_MV = raw_DKV.flatten(0, 1).log_softmax(dim=-1)
    id_MT = top_k_lowest_id(logprobs_MV, num)
    shape = (*raw_DKV.shape[:2], id_MT.shape[-1])
    return id_MT.view(shape), logprobs_MV.gather(1, id_MT).view(shape)
