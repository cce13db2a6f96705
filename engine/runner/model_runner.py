"""Runs passes: rows in, commits out. The one place where a step waits for the device.

Shapes: D denoise rows, C canvas positions, K picks a row (concepts, where M commits are explained), T top logprobs,
M = D * K picks or commits, V vocabulary, N lanes.
"""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from ..config import EngineConfig, ModelConfig
from ..decoding import attribution, sampler
from ..errors import InvalidConfig
from ..model import fused_support
from ..model.attention import PAGES_PER_SPLIT
from ..model.steerling import SteerlingModel
from ..model.weights import load_model
from ..output import Commit, ConceptContribution, TokenAttribution
from ..scheduling import PlannedRow
from .backend import Backend, PlainBackend
from .batch import Batch, RowTensors, make_batch, pack_rows
from .graphs import GraphedPasses
from .kv_cache import KVCache, page_bytes, plan_num_pages
from .lanes import Lanes
from .passes import Decision, PassProgram

HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Triton comes with torch's CUDA builds and with no other."""
if HAS_TRITON:
    from .fused_backend import FusedBackend

logger = logging.getLogger(__name__)

_EXPLAINED_AT_ONCE = 256
"""Commits, each of which gathers an embedding for every concept it reports: a bound on memory."""


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """What one denoise row did. A row that is not finite commits nothing."""

    row: PlannedRow
    commits: tuple[Commit, ...]
    """In commit order, not explained, with the pass's number of top_logprobs."""
    is_finite: bool


@dataclass(frozen=True, slots=True)
class KeptCommit:
    """Where the hidden state of a commit waits to be explained."""

    lane: int
    offset: int
    """Within the canvas."""
    token_id: int
    target_logit: float


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
        backend = self._make_backend()
        self._program = PassProgram(model, self.lanes, backend)
        self._graphs = self._capture(engine) if engine.use_graphs and backend.is_capturable else None
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
        batch = make_batch(rows, num_logprobs)
        decision = self._run_plain(batch) if self._graphs is None else self._graphs.run(batch)
        return [] if decision is None else self._read_back(batch, decision)

    def _make_backend(self) -> Backend:
        is_fused = HAS_TRITON and self.device.type == "cuda" and fused_support.is_supported(self.config)
        kind = FusedBackend if is_fused else PlainBackend
        return kind(self.model.transformer, self.cache)

    def _run_plain(self, batch: Batch) -> Decision | None:
        num_rows = len(batch.rows)
        packed = pack_rows(
            batch,
            num_rows,
            batch.num_pages,
            idle_lane=self.lanes.idle_lane,
            scratch_page=self.cache.scratch_page,
        )
        tensors = RowTensors.unpack(packed.to(self.device), num_rows)
        canvas = self._program.forward(tensors)
        if batch.num_denoise == 0:
            return None
        return self._program.decide(tensors, canvas, batch.num_denoise, batch.num_picks)

    @torch.no_grad()
    def _capture(self, engine: EngineConfig) -> GraphedPasses:
        longest = -(-self.config.block_size // self.config.diff_block_size)
        lengths = tuple(sorted({min(PAGES_PER_SPLIT, longest), longest}))
        return GraphedPasses(
            self._program,
            max_rows=engine.max_rows,
            table_lengths=lengths,
            scratch_page=self.cache.scratch_page,
        )

    def _read_back(self, batch: Batch, decision: Decision) -> list[RowOutcome]:
        chosen = torch.stack((decision.position_DK, decision.token_DK, decision.is_commit_DK.long()))
        values = torch.stack((decision.confidence_DK, decision.target_logit_DK, decision.logprob_DK))
        top_id, top_logprob = _top_logprobs(decision, self.config.vocab_size, batch.num_logprobs)
        position, token, is_commit = chosen.tolist()
        confidence, target, logprob = values.tolist()
        is_finite = decision.is_finite_D.tolist()
        outcomes = []
        for d, row in enumerate(batch.rows[: batch.num_denoise]):
            commits = tuple(
                Commit(
                    position=position[d][k],
                    token_id=token[d][k],
                    denoising_step=row.sequence.num_denoising_steps,
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


def _top_logprobs(
    decision: Decision, vocab_size: int, num: int
) -> tuple[list[list[list[int]]], list[list[list[float]]]]:
    """Ids and log-probabilities of the `num` likeliest tokens of each pick, best first."""
    if num == 0:
        num_rows, num_picks = decision.pick_DK.shape
        none: list[list[list[int]]] = [[[]] * num_picks] * num_rows
        return none, [[[]] * num_picks] * num_rows
    id_DKT, logprob_DKT = sampler.top_logprobs(decision.logits_DCW, decision.pick_DK, vocab_size, num)
    return id_DKT.tolist(), logprob_DKT.tolist()


def _contributions(part: attribution.HeadExplanation, top_k: list[int | None]) -> list[tuple[ConceptContribution, ...]]:
    ids, weights, contributions = part.ids_MK.tolist(), part.weights_MK.tolist(), part.contributions_MK.tolist()
    return [
        tuple(
            ConceptContribution(*item)
            for item in zip(ids[m][:most], weights[m][:most], contributions[m][:most], strict=True)
        )
        for m, most in enumerate(top_k)
    ]
