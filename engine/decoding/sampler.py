"""Logits to confidences and tokens: suppression, bias, penalty, bans, then temperature, min-p, top-k, top-p, choice.

Shapes: R rows, C canvas positions, K picks a row, M picked positions, N lanes, V vocabulary, W padded vocabulary, T top
logprobs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..model.ranking import top_k_lowest_id
from .random import uniform

NEGATIVE_INFINITY = float("-inf")
# The reference's entropy-adaptive temperature: from 0.3 for a certain position to 0.7 for an open one.
_LOWEST_TEMPERATURE = 0.3
_TEMPERATURE_RANGE = 0.4
# Below this a temperature would underflow to 0; the difference is none, as float32 logits differ by far more.
_SMALLEST_TEMPERATURE = 1e-30


@dataclass(frozen=True, slots=True)
class Adjustment:
    """What changes the logits of rows before a choice: vectors that stay in the lanes, and each row's lane.

    The [N, V] tensors have one stride, `lane_stride`: a row may be padded for aligned reading.
    """

    lane_R: Tensor
    """int64."""
    offset_NV: Tensor
    """float32: logit bias minus suppression."""
    present_NV: Tensor
    """bool: tokens that the repetition penalty applies to."""
    penalty_N: Tensor
    """float32: divides positive and multiplies negative logits of present tokens; 1 is off."""
    is_end_NV: Tensor
    """bool: tokens that are banned below `first_end_N`."""
    first_end_N: Tensor
    """int64: the first position where an end token may stand."""
    banned_V: Tensor
    """bool: never chosen. Its memory reaches as far as the stride of the others."""

    def __post_init__(self) -> None:
        strides = {tensor.stride() for tensor in (self.offset_NV, self.present_NV, self.is_end_NV)}
        assert strides == {(self.lane_stride, 1)}, f"lane vectors have strides {strides}"
        num_banned = self.banned_V.untyped_storage().nbytes()
        assert num_banned >= self.lane_stride, f"{num_banned} banned flags for rows of {self.lane_stride}"

    @property
    def vocab_size(self) -> int:
        """Tokens; logits may have more columns."""
        return self.offset_NV.shape[1]

    @property
    def lane_stride(self) -> int:
        """Elements from one lane's vector to the next."""
        return self.offset_NV.stride(0)

    def apply(self, raw_RCV: Tensor, position_RC: Tensor) -> Tensor:
        """`adjusted_logits` of canvas positions or of picks, float32."""
        lane_R = self.lane_R
        is_early_RC = position_RC < self.first_end_N[lane_R, None]
        return adjusted_logits(
            raw_RCV,
            self.offset_NV[lane_R],
            self.present_NV[lane_R],
            self.penalty_N[lane_R],
            self.banned_V,
            self.is_end_NV[lane_R][:, None, :] & is_early_RC[:, :, None],
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """Sampling parameters of each picked position; every field has shape [M]. Lanes hold theirs in this form too."""

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

    def at(self, index_M: Tensor) -> Choice:
        """The parameters at some indices, such as picks' lanes."""
        return Choice(
            temperature_M=self.temperature_M[index_M],
            top_p_M=self.top_p_M[index_M],
            top_k_M=self.top_k_M[index_M],
            min_p_M=self.min_p_M[index_M],
            is_entropy_M=self.is_entropy_M[index_M],
            is_greedy_M=self.is_greedy_M[index_M],
        )


@dataclass(frozen=True, slots=True)
class Chosen:
    """Tokens of picks. Entries that are no commit hold some valid token and any number."""

    token_RK: Tensor
    """int64."""
    target_logit_RK: Tensor
    """float32: the token's logit before anything was done to it."""
    logprob_RK: Tensor
    """float32: its logarithm of probability, likewise."""


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
    logits_RCW: Tensor, masked_RC: Tensor, position_RC: Tensor, adjustment: Adjustment
) -> tuple[Tensor, Tensor, Tensor]:
    """Probability of the likeliest token at temperature 1, confidence_RC (float32), the entropy of all of them,
    entropy_RC (float32, nats), and is_finite_RC (bool).

    All after penalties and bans. Zeros and True at positions that are not masked; zeros and False where a raw logit is
    not finite or no token may be chosen. `logits_RCW` may be padded beyond the vocabulary.
    """
    raw_RCV = logits_RCW[..., : adjustment.vocab_size]
    probs_RCV = adjustment.apply(raw_RCV.float(), position_RC).softmax(dim=-1)
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


def choose(
    logits_RCW: Tensor,
    position_RC: Tensor,
    pick_RK: Tensor,
    is_commit_RK: Tensor,
    adjustment: Adjustment,
    choice: Choice,
    seed_N: Tensor,
    choice_index_N: Tensor,
) -> Chosen:
    """A token for each pick, an offset in the canvas, that `is_commit_RK` marks.

    `choice` has one entry a lane, as have `seed_N` and `choice_index_N`, the keys of a lane's random numbers.
    """
    raw_RKV = gather_positions(logits_RCW, pick_RK)[..., : adjustment.vocab_size].float()
    position_RK = position_RC.gather(1, pick_RK)
    # What is no commit may be NaN, which must not reach an index.
    logits_RKV = adjustment.apply(raw_RKV, position_RK).nan_to_num(nan=0.0, neginf=NEGATIVE_INFINITY)
    lane_M = adjustment.lane_R[:, None].expand_as(pick_RK).flatten()
    uniform_M = uniform(seed_N[lane_M], position_RK.flatten(), choice_index_N[lane_M])
    token_RK = choose_tokens(logits_RKV.flatten(0, 1), choice.at(lane_M), uniform_M).view_as(pick_RK)
    target_RK = raw_RKV.gather(2, token_RK[:, :, None]).squeeze(-1)
    return Chosen(token_RK, target_RK, target_RK - raw_RKV.logsumexp(dim=-1))


def top_logprobs(
    logits_RCW: Tensor, pick_RK: Tensor, vocab_size: int, num: int, target_logit_RK: Tensor, logprob_RK: Tensor
) -> tuple[Tensor, Tensor]:
    """Ids id_RKT (int64) and raw log-probabilities (float32) of the `num` likeliest tokens of each pick, best first.

    Ties go to the lowest id. Columns of `logits_RCW` beyond the vocabulary do not count. The last two say what `choose`
    found for the picks' tokens: the others lie as far from those as their logits do. Picks without a token get any
    number.
    """
    raw_MV = gather_positions(logits_RCW, pick_RK)[..., :vocab_size].float().flatten(0, 1)
    id_MT = top_k_lowest_id(raw_MV, num)
    id_RKT = id_MT.view(*pick_RK.shape, -1)
    above_RKT = raw_MV.gather(1, id_MT).view_as(id_RKT) - target_logit_RK[:, :, None].float()
    return id_RKT, logprob_RK[:, :, None].float() + above_RKT


def gather_positions(values_RCX: Tensor, offset_RK: Tensor) -> Tensor:
    """Vectors of chosen canvas positions: [R, C, X] and [R, K] -> [R, K, X]."""
    return values_RCX.gather(1, offset_RK[:, :, None].expand(-1, -1, values_RCX.shape[-1]))
