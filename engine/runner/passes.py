"""One pass on the device, from rows to commits, without ever asking the device for a value.

The same code runs eagerly and under graph capture.

Shapes: R rows, D rows that denoise (the first of R; all of R in a graph), C canvas positions, K picks a row,
M = D * K picks, V vocabulary, W padded vocabulary, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import ModelConfig
from ..decoding import policies, sampler, steering
from ..decoding.random import uniform
from ..model.steerling import SteerlingModel
from .backend import Backend
from .batch import RowTensors
from .lanes import Lanes


@dataclass(frozen=True, slots=True)
class Canvas:
    """What the layers leave for the choice of tokens."""

    hidden_RCD: Tensor
    position_RC: Tensor
    masked_RC: Tensor


@dataclass(frozen=True, slots=True)
class Decision:
    """The commits of a pass. Entries that are no commit hold some valid position and token."""

    position_DK: Tensor
    token_DK: Tensor
    is_commit_DK: Tensor
    confidence_DK: Tensor
    raw_DKV: Tensor
    """float32 logits of the picked positions, before anything was done to them."""
    target_logit_DK: Tensor
    logprob_DK: Tensor
    is_finite_D: Tensor

    def packed(self) -> Tensor:
        """What the host reads, [D, K, 7] in one float64 tensor, which holds every id exactly: position, token,
        is_commit, confidence, target logit, log-probability, is_finite."""
        is_finite_DK = self.is_finite_D[:, None].expand_as(self.is_commit_DK)
        parts = (
            self.position_DK,
            self.token_DK,
            self.is_commit_DK,
            self.confidence_DK,
            self.target_logit_DK,
            self.logprob_DK,
            is_finite_DK,
        )
        return torch.stack([part.double() for part in parts], dim=-1)


class PassProgram:
    """The device code of a pass over one model's lanes and pages."""

    def __init__(self, model: SteerlingModel, lanes: Lanes, backend: Backend) -> None:
        self.model = model
        self.config: ModelConfig = model.config
        self.lanes = lanes
        self.backend = backend
        device = lanes.device
        self._banned_V = torch.zeros(self.config.vocab_size, dtype=torch.bool, device=device)
        self._banned_V[list(self.config.banned_token_ids)] = True
        self._offset_C = torch.arange(self.config.diff_block_size, device=device)

    def forward(self, rows: RowTensors) -> Canvas:
        """Run the layers; writes the rows' pages."""
        lanes, config = self.lanes, self.config
        position_RC = rows.block_R[:, None] * config.diff_block_size + self._offset_C
        token_RC = lanes.token_ids_NS[rows.lane_R].gather(1, position_RC)
        # Only canvases hold masks, and only below the limit: past it a lane holds padding.
        masked_RC = token_RC == config.mask_token_id
        added_LRD = steering.added_by_layer(
            lanes.vector_NGD[rows.lane_R],
            lanes.layer_NG[rows.lane_R],
            lanes.cutoff_NG[rows.lane_R],
            lanes.num_committed_N[rows.lane_R],
            config.n_layers,
        )
        hidden_RCD = self.backend.layers(rows, token_RC, position_RC, masked_RC, added_LRD)
        is_alike_R = masked_RC.sum(dim=-1) == rows.key_length_R
        if not config.use_rope:
            is_alike_R = torch.ones_like(is_alike_R)
        return Canvas(policies.share_hidden(hidden_RCD, masked_RC, is_alike_R), position_RC, masked_RC)

    def decide(self, rows: RowTensors, canvas: Canvas, num_denoise: int, num_picks: int) -> Decision:
        """Choose positions and tokens for the first `num_denoise` rows, and write them into their lanes."""
        lanes, lane_D = self.lanes, rows.lane_R[:num_denoise]
        hidden_DCD = canvas.hidden_RCD[:num_denoise]
        position_DC, masked_DC = canvas.position_RC[:num_denoise], canvas.masked_RC[:num_denoise]
        composed = self.model.compose(hidden_DCD.flatten(0, 1)).view_as(hidden_DCD)
        padded_DCW: Tensor = self.model.transformer.lm_head(composed)
        offset_DV, is_end_DV = lanes.offset_NV[lane_D], lanes.is_end_NV[lane_D]
        present_DV = sampler.presence(lanes.token_ids_NS[lane_D], self.config.vocab_size)
        penalty_D, first_end_D = lanes.penalty_N[lane_D], lanes.first_end_N[lane_D]
        confidence_DC, entropy_DC, is_finite_DC = self.backend.confidence(
            padded_DCW,
            masked_DC,
            position_DC,
            first_end_D,
            offset_DV,
            present_DV,
            penalty_D,
            self._banned_V,
            is_end_DV,
        )
        is_finite_D = is_finite_DC.all(dim=-1)
        policy_D, parameter_D = lanes.policy_N[lane_D], lanes.policy_parameter_N[lane_D]
        cap_D = rows.quota_R[:num_denoise] * is_finite_D
        pick_DK, is_commit_DK = policies.choose_positions(
            confidence_DC, entropy_DC, masked_DC, cap_D, policy_D, parameter_D, num_picks
        )
        position_DK = position_DC.gather(1, pick_DK)
        raw_DKV = _at(padded_DCW, pick_DK)[..., : self.config.vocab_size].float()
        is_early_DK = position_DK < first_end_D[:, None]
        logits_DKV = sampler.adjusted_logits(
            raw_DKV, offset_DV, present_DV, penalty_D, self._banned_V, is_end_DV[:, None, :] & is_early_DK[:, :, None]
        )
        token_DK = self._choose(lane_D, logits_DKV, position_DK)
        target_DK = raw_DKV.gather(2, token_DK[:, :, None]).squeeze(-1)
        decision = Decision(
            position_DK=position_DK,
            token_DK=token_DK,
            is_commit_DK=is_commit_DK,
            confidence_DK=confidence_DC.gather(1, pick_DK),
            raw_DKV=raw_DKV,
            target_logit_DK=target_DK,
            logprob_DK=target_DK - raw_DKV.logsumexp(dim=-1),
            is_finite_D=is_finite_D,
        )
        self._commit(lane_D, decision, hidden_DCD, position_DC)
        return decision

    def _choose(self, lane_D: Tensor, logits_DKV: Tensor, position_DK: Tensor) -> Tensor:
        """Tokens for the picks, token_DK; entries that are no pick get some valid token."""
        lanes = self.lanes
        lane_M = lane_D[:, None].expand_as(position_DK).flatten()
        choice = sampler.Choice(
            temperature_M=lanes.temperature_N[lane_M],
            top_p_M=lanes.top_p_N[lane_M],
            top_k_M=lanes.top_k_N[lane_M],
            min_p_M=lanes.min_p_N[lane_M],
            is_entropy_M=lanes.is_entropy_N[lane_M],
            is_greedy_M=lanes.is_greedy_N[lane_M],
        )
        uniform_M = uniform(lanes.seed_N[lane_M], position_DK.flatten(), lanes.choice_index_N[lane_M])
        # Rows that are not finite commit nothing, but their NaN must not reach an index.
        logits_MV = logits_DKV.flatten(0, 1).nan_to_num(nan=0.0, neginf=sampler.NEGATIVE_INFINITY)
        return sampler.choose_tokens(logits_MV, choice, uniform_M).view_as(position_DK)

    def _commit(self, lane_D: Tensor, decision: Decision, hidden_DCD: Tensor, position_DC: Tensor) -> None:
        """Write the commits into the lanes, then the end-of-turn rule."""
        lanes, config = self.lanes, self.config
        is_commit_DK, position_DK, token_DK = decision.is_commit_DK, decision.position_DK, decision.token_DK
        # A lane may have two rows in a pass: what is no commit goes to the idle lane, where nobody reads it.
        lane_DK = torch.where(is_commit_DK, lane_D[:, None], lanes.idle_lane)
        lanes.token_ids_NS[lane_DK, position_DK] = token_DK
        hidden_DKD = _at(hidden_DCD, position_DK % config.diff_block_size)
        lanes.hidden_NCD[lane_DK, lanes.hidden_slot(position_DK)] = hidden_DKD
        lanes.num_committed_N.index_add_(0, lane_D, is_commit_DK.sum(dim=-1))
        limit_D = lanes.limit_N[lane_D]
        is_end_DK = is_commit_DK & lanes.is_end_NV[lane_DK, token_DK]
        found_D = torch.where(is_end_DK, position_DK, limit_D[:, None]).amin(dim=-1)
        lanes.end_N.scatter_reduce_(0, lane_D, found_D, reduce="amin")
        is_past_DC = (position_DC > lanes.end_N[lane_D, None]) & (position_DC < limit_D[:, None])
        past_lane_DC = torch.where(is_past_DC, lane_D[:, None], lanes.idle_lane)
        # A plain number would be copied from the host, which a graph cannot capture.
        lanes.token_ids_NS[past_lane_DC, position_DC] = torch.full_like(position_DC, config.eos_token_id)


def _at(values_DCX: Tensor, offset_DK: Tensor) -> Tensor:
    """Vectors of chosen canvas positions: [D, C, X] and [D, K] -> [D, K, X]."""
    return values_DCX.gather(1, offset_DK[:, :, None].expand(-1, -1, values_DCX.shape[-1]))
