"""Runs passes: rows in, commits out. The one place where a step waits for the device.

Shapes: R rows, D denoise rows (first of the R) or model width after a C, C canvas positions, K picks a row,
M = D * K picks, V vocabulary, S positions of a context.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..config import EngineConfig, ModelConfig
from ..decoding import attribution, policies, sampler, steering
from ..decoding.random import uniform
from ..errors import InvalidConfig
from ..model.attention import paged_attention
from ..model.ranking import top_k_lowest_id
from ..model.steerling import SteerlingModel
from ..model.weights import load_model
from ..request import ConceptContribution, TokenAttribution
from ..scheduling import PlannedRow
from .batch import Batch, make_batch
from .kv_cache import KVCache, page_bytes, plan_num_pages
from .lanes import Lanes

logger = logging.getLogger(__name__)

_EXPLAINED_AT_ONCE = 256
"""Commits, each of which gathers an embedding for every concept it reports: a bound on memory."""


@dataclass(frozen=True, slots=True)
class PassCommit:
    """One commit as the device reports it."""

    position: int
    token_id: int
    confidence: float
    target_logit: float
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """What one denoise row did. A row that is not finite commits nothing."""

    row: PlannedRow
    commits: tuple[PassCommit, ...]
    is_finite: bool


@dataclass(frozen=True, slots=True)
class KeptCommit:
    """Where the hidden state of a commit waits to be explained."""

    lane: int
    offset: int
    """Within the canvas."""
    token_id: int
    target_logit: float


@dataclass(frozen=True, slots=True)
class _Decision:
    """Device tensors of one pass's choices."""

    position_DK: Tensor
    token_DK: Tensor
    is_commit_DK: Tensor
    confidence_DK: Tensor
    target_logit_DK: Tensor
    logprob_DK: Tensor
    top_id_DKT: Tensor
    top_logprob_DKT: Tensor
    is_finite_D: Tensor


class ModelRunner:
    """A model, its KV cache and its lanes on one device."""

    def __init__(self, model: SteerlingModel, engine: EngineConfig) -> None:
        weight = model.transformer.lm_head.weight
        self.model = model
        self.config: ModelConfig = model.config
        self.device = weight.device
        self.dtype = weight.dtype
        try:
            self.lanes = Lanes(self.config, engine.num_lanes, self.device, self.dtype)
            num_pages = plan_num_pages(self.config, engine, self.device, self.dtype)
            self.cache = KVCache(self.config, num_pages, self.device, self.dtype)
        except RuntimeError as error:  # torch's kind of error when memory does not suffice
            raise InvalidConfig(
                f"{engine.num_lanes} lanes and {engine.num_pages or 'the planned'} pages do not fit into the memory of "
                f"{self.device}; lower max_lanes or num_pages ({error})"
            ) from error
        self._banned_V = torch.zeros(self.config.vocab_size, dtype=torch.bool, device=self.device)
        self._banned_V[list(self.config.banned_token_ids)] = True
        self._offset_C = torch.arange(self.config.diff_block_size, device=self.device)
        logger.info(
            "%d pages of %d bytes, %d lanes, %s on %s",
            num_pages,
            page_bytes(self.config, self.dtype),
            engine.num_lanes,
            self.dtype,
            self.device,
        )

    @staticmethod
    def load(path: str | Path, engine: EngineConfig) -> SteerlingModel:
        """Load a checkpoint folder to the engine's device; raises InvalidConfig or CheckpointError."""
        device, dtype = choose_device(engine)
        return load_model(path, device=device, dtype=dtype)

    @torch.no_grad()
    def run(self, rows: tuple[PlannedRow, ...], num_logprobs: int) -> list[RowOutcome]:
        """Run one pass over the rows and wait for its commits.

        Writes the rows' pages, the lanes' canvases and kept hidden states. `num_logprobs` is the most that any
        row's request asks for.
        """
        batch = make_batch(rows, num_logprobs, self.device)
        position_RC = batch.block_R[:, None] * self.config.diff_block_size + self._offset_C
        token_RC = self.lanes.token_ids_NS[batch.lane_R].gather(1, position_RC)
        # Only canvases hold masks, and only below the limit: past it a lane holds padding.
        masked_RC = token_RC == self.config.mask_token_id
        hidden_RCD = self._forward(batch, token_RC, position_RC, masked_RC)
        if batch.num_denoise == 0:
            return []
        num = batch.num_denoise
        masked_DC = masked_RC[:num]
        is_alike_D = masked_DC.sum(dim=-1) == batch.key_length_R[:num]
        if not self.config.use_rope:
            is_alike_D = torch.ones_like(is_alike_D)
        hidden_DCD = policies.share_hidden(hidden_RCD[:num], masked_DC, is_alike_D)
        decision = self._decide(batch, hidden_DCD, position_RC[:num], masked_DC)
        self._commit(batch, decision, hidden_DCD, position_RC[:num])
        return self._read_back(batch, decision)

    def _forward(self, batch: Batch, token_RC: Tensor, position_RC: Tensor, masked_RC: Tensor) -> Tensor:
        lanes, cache = self.lanes, self.cache

        def attend(layer: int, q_RCHE: Tensor, k_RCGE: Tensor, v_RCGE: Tensor) -> Tensor:
            # All rows write before any attends: a seal row's block is read by the next block's row in this pass.
            cache.write(layer, batch.page_R, k_RCGE, v_RCGE)
            return paged_attention(
                q_RCHE, cache.k_LPCGE[layer], cache.v_LPCGE[layer], batch.page_table_RB, batch.key_length_R
            )

        inject = steering.injection(
            lanes.vector_NGD[batch.lane_R],
            lanes.layer_NG[batch.lane_R],
            lanes.cutoff_NG[batch.lane_R],
            lanes.num_committed_N[batch.lane_R],
            masked_RC,
        )
        hidden_RCD: Tensor = self.model.transformer(token_RC, position_RC, attend, inject)
        return hidden_RCD

    def _decide(self, batch: Batch, hidden_DCD: Tensor, position_DC: Tensor, masked_DC: Tensor) -> _Decision:
        lanes, lane_D = self.lanes, batch.lane_R[: batch.num_denoise]
        composed = self.model.compose(hidden_DCD.flatten(0, 1)).view_as(hidden_DCD)
        raw_DCV = self.model.transformer.logits(composed).float()
        logits_DCV = sampler.adjusted_logits(
            raw_DCV,
            lanes.offset_NV[lane_D],
            sampler.presence(lanes.token_ids_NS[lane_D], self.config.vocab_size),
            lanes.penalty_N[lane_D],
            self._banned_V,
            lanes.is_end_NV[lane_D][:, None, :] & (position_DC < lanes.first_end_N[lane_D, None])[:, :, None],
        )
        confidence_DC = sampler.confidence(logits_DCV)
        is_finite_DC = raw_DCV.isfinite().all(dim=-1) & confidence_DC.isfinite()
        is_finite_D = (is_finite_DC | ~masked_DC).all(dim=-1)
        confidence_DC = confidence_DC.nan_to_num(0.0)
        quota_D = batch.quota_R[: batch.num_denoise] * is_finite_D
        pick_DK, is_commit_DK = policies.most_confident(confidence_DC, masked_DC, quota_D, batch.num_picks)
        position_DK = position_DC.gather(1, pick_DK)
        token_DK = self._choose(lane_D, _at(logits_DCV, pick_DK), position_DK)
        raw_DKV = _at(raw_DCV, pick_DK)
        logprobs_DKV = raw_DKV.log_softmax(dim=-1)
        top_id_DKT = _top_ids(logprobs_DKV, batch.num_logprobs)
        return _Decision(
            position_DK=position_DK,
            token_DK=token_DK,
            is_commit_DK=is_commit_DK,
            confidence_DK=confidence_DC.gather(1, pick_DK),
            target_logit_DK=raw_DKV.gather(2, token_DK[:, :, None]).squeeze(-1),
            logprob_DK=logprobs_DKV.gather(2, token_DK[:, :, None]).squeeze(-1),
            top_id_DKT=top_id_DKT,
            top_logprob_DKT=logprobs_DKV.gather(2, top_id_DKT),
            is_finite_D=is_finite_D,
        )

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

    def _commit(self, batch: Batch, decision: _Decision, hidden_DCD: Tensor, position_DC: Tensor) -> None:
        """Write the commits into the lanes, then the end-of-turn rule."""
        lanes, config = self.lanes, self.config
        lane_D = batch.lane_R[: batch.num_denoise]
        lane_DK = lane_D[:, None].expand_as(decision.position_DK)
        is_commit, position_DK = decision.is_commit_DK, decision.position_DK
        before_DK = lanes.token_ids_NS[lane_DK, position_DK]
        lanes.token_ids_NS[lane_DK, position_DK] = torch.where(is_commit, decision.token_DK, before_DK)
        lanes.num_committed_N[lane_D] += is_commit.sum(dim=-1)
        offset_DK = position_DK % config.diff_block_size
        kept_DKE = torch.where(is_commit[:, :, None], _at(hidden_DCD, offset_DK), lanes.hidden_NCD[lane_DK, offset_DK])
        lanes.hidden_NCD[lane_DK, offset_DK] = kept_DKE
        is_end_DK = is_commit & lanes.is_end_NV[lane_DK, decision.token_DK]
        limit_D = lanes.limit_N[lane_D]
        found_D = torch.where(is_end_DK, position_DK, limit_D[:, None]).amin(dim=-1)
        end_D = torch.minimum(lanes.end_N[lane_D], found_D)
        lanes.end_N[lane_D] = end_D
        canvas_DC = lanes.token_ids_NS[lane_D].gather(1, position_DC)
        is_past_DC = (position_DC > end_D[:, None]) & (position_DC < limit_D[:, None])
        canvas_DC = torch.where(is_past_DC, config.eos_token_id, canvas_DC)
        lanes.token_ids_NS[lane_D[:, None], position_DC] = canvas_DC

    def _read_back(self, batch: Batch, decision: _Decision) -> list[RowOutcome]:
        position, token, is_commit = (
            t.tolist() for t in (decision.position_DK, decision.token_DK, decision.is_commit_DK)
        )
        confidence, target, logprob = (
            t.tolist() for t in (decision.confidence_DK, decision.target_logit_DK, decision.logprob_DK)
        )
        top_id, top_logprob = decision.top_id_DKT.tolist(), decision.top_logprob_DKT.tolist()
        is_finite = decision.is_finite_D.tolist()
        outcomes = []
        for d, row in enumerate(batch.rows[: batch.num_denoise]):
            commits = tuple(
                PassCommit(
                    position=position[d][k],
                    token_id=token[d][k],
                    confidence=confidence[d][k],
                    target_logit=target[d][k],
                    logprob=logprob[d][k],
                    top_logprobs=tuple(zip(top_id[d][k], top_logprob[d][k], strict=True)),
                )
                for k in range(len(position[d]))
                if is_commit[d][k]
            )
            outcomes.append(RowOutcome(row=row, commits=commits, is_finite=is_finite[d]))
        return outcomes

    def explain(self, kept: list[KeptCommit], top_k: list[int | None]) -> list[TokenAttribution]:
        """Explain commits from their kept hidden states; `top_k[i]` cuts what is returned for commit i."""
        starts = range(0, len(kept), _EXPLAINED_AT_ONCE)
        slices = [slice(start, start + _EXPLAINED_AT_ONCE) for start in starts]
        return [item for part in slices for item in self._explain(kept[part], top_k[part])]

    @torch.no_grad()
    def _explain(self, kept: list[KeptCommit], top_k: list[int | None]) -> list[TokenAttribution]:
        lane_M = torch.tensor([item.lane for item in kept], device=self.device)
        offset_M = torch.tensor([item.offset for item in kept], device=self.device)
        explanation = attribution.explain(
            self.model,
            self.lanes.hidden_NCD[lane_M, offset_M],
            torch.tensor([item.token_id for item in kept], device=self.device),
            torch.tensor([item.target_logit for item in kept], dtype=torch.float32, device=self.device),
        )
        known = _contributions(explanation.known, top_k)
        discovered = _contributions(explanation.discovered, top_k)
        epsilon = explanation.epsilon_M.tolist()
        known_total = explanation.known.contributions_MK.sum(dim=-1).tolist()
        discovered_total = explanation.discovered.contributions_MK.sum(dim=-1).tolist()
        return [
            TokenAttribution(
                known=known[m],
                discovered=discovered[m],
                known_total=known_total[m],
                discovered_total=discovered_total[m],
                epsilon=epsilon[m],
            )
            for m in range(len(kept))
        ]


def choose_device(engine: EngineConfig) -> tuple[torch.device, torch.dtype]:
    """The device and dtype that `auto` stands for here; raises InvalidConfig for a device that is not there."""
    name = engine.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidConfig(f"device is {engine.device!r}; it must be auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise InvalidConfig(f"device is {engine.device!r}; it must be auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidConfig(f"device is {engine.device!r}, but torch sees {torch.cuda.device_count()} GPUs; try auto")
    if engine.dtype == "auto":
        return device, torch.bfloat16 if device.type == "cuda" else torch.float32
    return device, {"float32": torch.float32, "bfloat16": torch.bfloat16}[engine.dtype]


def _at(values_DCX: Tensor, offset_DK: Tensor) -> Tensor:
    """Vectors of chosen canvas positions: [D, C, X] and [D, K] -> [D, K, X]."""
    return values_DCX.gather(1, offset_DK[:, :, None].expand(-1, -1, values_DCX.shape[-1]))


def _top_ids(logprobs_DKV: Tensor, num: int) -> Tensor:
    if num == 0:
        return logprobs_DKV.new_zeros(*logprobs_DKV.shape[:2], 0, dtype=torch.int64)
    flat = top_k_lowest_id(logprobs_DKV.flatten(0, 1), num)
    return flat.view(*logprobs_DKV.shape[:2], flat.shape[-1])


def _contributions(part: attribution.HeadExplanation, top_k: list[int | None]) -> list[tuple[ConceptContribution, ...]]:
    ids, weights, contributions = part.ids_MK.tolist(), part.weights_MK.tolist(), part.contributions_MK.tolist()
    return [
        tuple(
            ConceptContribution(*item)
            for item in zip(ids[m][:most], weights[m][:most], contributions[m][:most], strict=True)
        )
        for m, most in enumerate(top_k)
    ]
