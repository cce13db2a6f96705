"""One pass on the device, from rows to commits, without ever asking the device for a value.

The same code runs eagerly and under graph capture.

Shapes: R rows, D rows that denoise (the first of R; all of R in a graph), C canvas positions, K picks a row, W padded
vocabulary, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import ModelConfig
from ..decoding import policies, steering
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

    pick_DK: Tensor
    """Offsets in the canvas."""
    position_DK: Tensor
    token_DK: Tensor
    is_commit_DK: Tensor
    confidence_DK: Tensor
    target_logit_DK: Tensor
    logprob_DK: Tensor
    is_finite_D: Tensor
    logits_DCW: Tensor
    """What lm_head gave, for `sampler.top_logprobs`."""


class PassProgram:
    """The device code of a pass over one model's lanes and pages."""

    def __init__(self, model: SteerlingModel, lanes: Lanes, backend: Backend) -> None:
        self.model = model
        self.config: ModelConfig = model.config
        self.lanes = lanes
        self.backend = backend
        self._offset_C = torch.arange(self.config.diff_block_size, device=lanes.device)

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
        """Choose positions and tokens for the first `num_denoise` rows, and write them into their lanes.

        Needs nothing of `forward` but the canvas, and K = `num_picks` may exceed what any row commits: what is no
        commit costs next to nothing.
        """
        lanes, lane_D = self.lanes, rows.lane_R[:num_denoise]
        hidden_DCD = canvas.hidden_RCD[:num_denoise]
        position_DC, masked_DC = canvas.position_RC[:num_denoise], canvas.masked_RC[:num_denoise]
        composed = self.model.compose(hidden_DCD.flatten(0, 1)).view_as(hidden_DCD)
        logits_DCW: Tensor = self.model.transformer.lm_head(composed)
        adjustment = lanes.adjustment(lane_D)
        confidence_DC, _, is_finite_DC = self.backend.confidence(logits_DCW, masked_DC, position_DC, adjustment)
        is_finite_D = is_finite_DC.all(dim=-1)
        quota_D = rows.quota_R[:num_denoise] * is_finite_D
        pick_DK, is_commit_DK = policies.most_confident(confidence_DC, masked_DC, quota_D, num_picks)
        # Kernels read it as a whole.
        pick_DK = pick_DK.contiguous()
        chosen = self.backend.choose(
            logits_DCW,
            position_DC,
            pick_DK,
            is_commit_DK,
            adjustment,
            lanes.choice,
            lanes.seed_N,
            lanes.choice_index_N,
        )
        self.backend.commit(lanes, lane_D, position_DC, hidden_DCD, pick_DK, chosen.token_RK, is_commit_DK)
        return Decision(
            pick_DK=pick_DK,
            position_DK=position_DC.gather(1, pick_DK),
            token_DK=chosen.token_RK,
            is_commit_DK=is_commit_DK,
            confidence_DK=confidence_DC.gather(1, pick_DK),
            target_logit_DK=chosen.target_logit_RK,
            logprob_DK=chosen.logprob_RK,
            is_finite_D=is_finite_D,
            logits_DCW=logits_DCW,
        )
