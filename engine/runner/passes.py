"""One pass on the device, from rows to commits, without ever asking the device for a value.

The same code runs eagerly and under graph capture.

Shapes: R rows, D rows that denoise (the first of R; all of R in a graph), C canvas positions, K picks a row, W padded
vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from ..decoding import policies, steering
from ..decoding.overrides import OverridePlan, override
from ..decoding.policies import Picks
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

    def first(self, num_rows: int) -> Canvas:
        """The first rows, as views."""
        return Canvas(self.hidden_RCD[:num_rows], self.position_RC[:num_rows], self.masked_RC[:num_rows])

    def copy_(self, other: Canvas) -> None:
        """Take over another canvas's values."""
        self.hidden_RCD.copy_(other.hidden_RCD)
        self.position_RC.copy_(other.position_RC)
        self.masked_RC.copy_(other.masked_RC)


@dataclass(frozen=True, slots=True)
class Decision:
    """The commits of a pass. Entries that are no commit hold some valid position and token."""

    packed_DKF: Tensor
    """What the host reads: fields F of `PickFields`, in float64, which holds every id exactly."""
    pick_DK: Tensor
    """Offsets in the canvas."""
    logits_DCW: Tensor
    """What lm_head gave; with `pick_DK` for `sampler.top_logprobs`."""


class PassProgram:
    """The device code of a pass over one model's lanes and pages."""

    def __init__(self, model: SteerlingModel, lanes: Lanes, backend: Backend) -> None:
        self.model = model
        self.config: ModelConfig = model.config
        self.lanes = lanes
        self.backend = backend
        self._offset_C = torch.arange(self.config.diff_block_size, device=lanes.device)
        self._lossless = policies.policy_id("lossless")

    def forward(self, rows: RowTensors, *, predicts: bool = False) -> Canvas:
        """Run the layers; writes the rows' pages. `predicts`: there may be drafts among the rows."""
        lanes, config = self.lanes, self.config
        if predicts:
            lanes.begin_drafts(rows.lane_R, rows.lane_R[rows.base_R])
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

    def decide(
        self,
        rows: RowTensors,
        canvas: Canvas,
        num_denoise: int,
        num_picks: int,
        *,
        predicts: bool = False,
        alters: bool = False,
        logits_out: Tensor | None = None,
        overrides: Mapping[int, OverridePlan] | None = None,
    ) -> Decision:
        """Choose positions and tokens for the first `num_denoise` rows, and write them into their lanes.

        Needs nothing of `forward` but the canvas, and K = `num_picks` may exceed what any row commits: what is no
        commit costs next to nothing. With `predicts`, which takes K of 2 at least, drafts commit where their base's
        commit is the expected one, and lanes with drafts learn what to expect next. With `alters`, rows with shadows
        are guided, and their commits go to both lanes. `logits_out`, [D, C, W] in the model's dtype, is where logits go
        if given. `overrides` are the concept weights that rows set, by row: work that differs from pass to pass, so a
        graph cannot have it.
        """
        lanes, lane_D = self.lanes, rows.lane_R[:num_denoise]
        hidden_DCD = canvas.hidden_RCD[:num_denoise]
        position_DC, masked_DC = canvas.position_RC[:num_denoise], canvas.masked_RC[:num_denoise]
        logits_DCW = self._logits(hidden_DCD, masked_DC, overrides or {}, logits_out)
        shadow_D = rows.shadow_R[:num_denoise]
        if alters:
            # Of a shadow nothing is chosen: its logits serve here, and need not be read again.
            masked_DC = masked_DC & (rows.quota_R[:num_denoise] > 0)[:, None]
            self.backend.guide(logits_DCW, masked_DC, shadow_D, lanes.guidance_N[lane_D])
        adjustment = lanes.adjustment(lane_D)
        confidence_DC, entropy_DC, is_finite_DC = self.backend.confidence(
            logits_DCW, masked_DC, position_DC, adjustment
        )
        quota_D = rows.quota_R[:num_denoise]
        cap_D = quota_D
        if predicts:
            # One pick more, for the commit that a lane with drafts expects next.
            cap_D = torch.where(lanes.policy_N[lane_D] == self._lossless, 2 * quota_D, quota_D)
        picks = self.backend.pick(
            confidence_DC,
            entropy_DC,
            is_finite_DC,
            masked_DC,
            position_DC,
            cap_D,
            lane_D,
            lanes.policy_N,
            lanes.policy_parameter_N,
            num_picks,
        )
        chosen = self.backend.choose(
            logits_DCW,
            position_DC,
            picks.pick_RK,
            picks.is_pick_RK,
            adjustment,
            lanes.choice,
            lanes.seed_N,
            lanes.choice_index_N,
        )
        is_commit_DK, own_lane_D = picks.is_pick_RK, lane_D
        if predicts:
            base_D = rows.base_R[:num_denoise]
            is_commit_DK, own_lane_D = self._confirm(base_D, lane_D, quota_D, picks, chosen.token_RK)
        self.backend.commit(lanes, own_lane_D, position_DC, hidden_DCD, picks.pick_RK, chosen.token_RK, is_commit_DK)
        if alters:
            self._commit_to_shadows(lane_D, shadow_D, position_DC, hidden_DCD, picks, chosen.token_RK, is_commit_DK)
        # A draft's lane still has what the draft was made for.
        packed_DKF = self.backend.pack(picks, chosen, is_commit_DK, lane_D, lanes.draft_position_N, lanes.draft_token_N)
        return Decision(packed_DKF=packed_DKF, pick_DK=picks.pick_RK, logits_DCW=logits_DCW)

    def _logits(
        self, hidden_DCD: Tensor, masked_DC: Tensor, overrides: Mapping[int, OverridePlan], out: Tensor | None
    ) -> Tensor:
        head = self.model.transformer.lm_head
        composed_MD = self.model.compose(hidden_DCD.flatten(0, 1))
        if overrides:
            # Hidden states that are kept for attribution may be the same tensor, and stay as they are.
            composed_DCD = composed_MD.view_as(hidden_DCD).clone()
            # Row by row: what one comes to must not depend on how many there are.
            for row, plan in overrides.items():
                set_CD = override(self.model, hidden_DCD[row], composed_DCD[row], plan)
                composed_DCD[row] = torch.where(masked_DC[row, :, None], set_CD, composed_DCD[row])
            composed_MD = composed_DCD.flatten(0, 1)
        if out is None:
            logits_DCW: Tensor = head(composed_MD).view(*hidden_DCD.shape[:2], -1)
            return logits_DCW
        if type(head) is nn.Linear:
            torch.mm(composed_MD, head.weight.T, out=out.view(-1, out.shape[-1]))
        else:
            # A quantised or batch-invariant head says itself where its result is.
            out.copy_(head(composed_MD).view_as(out))
        return out

    def _commit_to_shadows(
        self,
        lane_D: Tensor,
        shadow_D: Tensor,
        position_DC: Tensor,
        hidden_DCD: Tensor,
        picks: Picks,
        token_DK: Tensor,
        is_commit_DK: Tensor,
    ) -> None:
        """Write the commits of guided rows into their shadows' lanes too, with the shadows' own hidden states."""
        is_guided_D = shadow_D != torch.arange(len(shadow_D), device=shadow_D.device)
        is_commit_DK = is_commit_DK & is_guided_D[:, None]
        hidden_DCD = hidden_DCD[shadow_D]
        self.backend.commit(
            self.lanes, lane_D[shadow_D], position_DC, hidden_DCD, picks.pick_RK, token_DK, is_commit_DK
        )

    def _confirm(
        self, base_D: Tensor, lane_D: Tensor, quota_D: Tensor, picks: Picks, token_DK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Which picks are commits once drafts are judged, and whose lane each row's commits go to.

        A draft's commit counts if its base committed what the draft was made for, unless that ended the text: then the
        draft has seen masks where the text has none. The last row that counts says what its lane expects next.
        """
        lanes, row_D, position_DK = self.lanes, torch.arange(len(base_D), device=base_D.device), picks.position_RK
        within_DK = picks.is_pick_RK & (torch.arange(token_DK.shape[1], device=base_D.device) < quota_D[:, None])
        own_lane_D, is_draft_D = lane_D[base_D], base_D != row_D
        position_D, token_D = position_DK[base_D, 0], token_DK[base_D, 0]
        is_expected_D = (position_D == lanes.draft_position_N[own_lane_D]) & (
            token_D == lanes.draft_token_N[own_lane_D]
        )
        is_confirmed_D = within_DK[base_D, 0] & is_expected_D & ~lanes.is_end_NV[own_lane_D, token_D]
        is_commit_DK = within_DK & (is_confirmed_D | ~is_draft_D)[:, None]
        # A draft stands behind its base, so the larger of two indices is the draft.
        draft_D = row_D.scatter_reduce(0, base_D, row_D, reduce="amax")
        last_D = torch.where(is_commit_DK[draft_D, 0], draft_D, row_D)
        # One entry of each lane with drafts is written; others go to the idle lane.
        is_base_D = (lanes.policy_N[own_lane_D] == self._lossless) & ~is_draft_D & within_DK[:, 0]
        target_D = torch.where(is_base_D, own_lane_D, lanes.idle_lane)
        # Where there is no second pick these name some position that is not masked, which is never confirmed.
        lanes.draft_position_N[target_D] = position_DK[last_D, 1]
        lanes.draft_token_N[target_D] = token_DK[last_D, 1]
        return is_commit_DK, own_lane_D
