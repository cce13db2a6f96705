"""Launches passes: rows in, commits out once they are read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from ..config import EngineConfig, ModelConfig
from ..decoding import sampler
from ..decoding.overrides import OverridePlan
from ..decoding.policies import PickFields
from ..errors import InvalidConfig
from ..model import fused_support
from ..model.attention import PAGES_PER_SPLIT
from ..model.batch_invariant import check_deterministic, make_batch_invariant
from ..model.quantization import check_float8, quantize
from ..model.steerling import SteerlingModel
from ..model.weights import load_model
from ..scheduling import PlannedRow
from .backend import Backend, PlainBackend
from .batch import Batch, RowTensors, make_batch, pack_rows
from .device import choose_device, keep_compiled_kernels
from .explaining import Explainer, ExplanationInFlight, KeptCommit
from .graphs import GraphedPasses
from .kv_cache import KVCache, page_bytes, pass_bytes, plan_num_pages, replay_bytes, replay_context
from .lanes import Lanes
from .memory import MemoryPlan, device_memory, module_bytes, reserved_bytes, tensor_bytes
from .pass_in_flight import PassInFlight
from .passes import Decision, PassProgram
from .text_passes import TextPasses
from .transfer import Stopwatch

if fused_support.HAS_TRITON:
    from .fused_backend import FusedBackend

logger = logging.getLogger(__name__)

_LOGPROB_FIELDS = tuple(PickFields._fields.index(name) for name in ("target_logit", "logprob"))


class ModelRunner:
    """A model, its KV cache and its lanes on one device."""

    def __init__(self, model: SteerlingModel, engine: EngineConfig) -> None:
        """With fp8 the model's weights are quantised in place; without it the model stays as it is."""
        weight = model.transformer.lm_head.weight
        self.config: ModelConfig = model.config
        self.device = weight.device
        self.dtype = weight.dtype
        self.plain_model = model
        """The model as it was given: of the same weights, and with `deterministic` of torch's own products."""
        self.model = model = _with_products(model, engine)
        self.replay_context = replay_context(self.config, engine)
        """Longest prompt and max_tokens, together, of a trace that is replayed; 0: none is."""
        keep_compiled_kernels(engine.compile_cache_dir)
        self._draft_row_limit = min(engine.draft_row_limit, engine.max_rows)
        self._side_stream = _side_stream(self.device)
        try:
            num_drafts = self._draft_row_limit // 2
            self.lanes = Lanes(self.config, engine.num_lanes, self.device, self.dtype, num_drafts)
            num_pages = plan_num_pages(self.config, engine, self.device, self.dtype, num_spare=1 + num_drafts)
            self.cache = KVCache(self.config, num_pages, self.device, self.dtype, num_drafts)
            backend = self._make_backend()
            self._program = PassProgram(model, self.lanes, backend)
            self.text_passes = TextPasses(
                model,
                backend,
                max_rows=engine.max_rows,
                filler_page=self.cache.scratch_page,
                is_deterministic=engine.deterministic,
            )
            before = reserved_bytes(self.device)
            self._graphs = self._capture(engine) if engine.use_graphs and backend.is_capturable else None
            self._explainer = Explainer(
                model,
                self.lanes,
                uses_graphs=self._graphs is not None,
                is_deterministic=engine.deterministic,
            )
        except RuntimeError as error:
            if not _is_out_of_memory(error, self.device):
                raise
            raise InvalidConfig(
                f"{engine.num_lanes} lanes, {engine.num_pages or 'the planned'} pages and passes of {engine.max_rows} "
                f"rows do not fit into the memory of {self.device}; lower max_lanes, num_pages, gpu_memory_fraction, "
                f"max_rows or draft_row_limit, or set use_graphs to false ({error})"
            ) from error
        self.memory = MemoryPlan(
            weights=module_bytes(model),
            lanes=tensor_bytes(self.lanes.tensors()),
            num_lanes=engine.num_lanes,
            concepts_per_lane=self.lanes.concept_bytes,
            page=page_bytes(self.config, self.dtype),
            num_pages=num_pages,
            num_spare_pages=1 + num_drafts,
            pass_reserve=pass_bytes(self.config, engine.max_rows, self.dtype),
            replay_reserve=replay_bytes(self.config, self.replay_context, self.dtype),
            graphs=reserved_bytes(self.device) - before,
            total=device_memory(self.device),
        )
        logger.info("memory of %s, %s:\n%s", self.device, self.dtype, self.memory.table())

    @staticmethod
    def load(
        path: str | Path, engine: EngineConfig, *, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> SteerlingModel:
        """Load a checkpoint folder to the engine's device, telling bytes read and in all.

        Raises InvalidConfig or CheckpointError.
        """
        device, dtype = choose_device(engine)
        if engine.deterministic:
            # Reading weights takes long: not before it is known that they can be used.
            check_deterministic(ModelConfig.from_json(path), device, dtype)
        return load_model(path, device=device, dtype=dtype, progress=progress)

    @torch.no_grad()
    def launch(self, rows: tuple[PlannedRow, ...], num_logprobs: int) -> PassInFlight:
        """Give the device one pass over the rows, at least one, and do not wait for it.

        Writes the rows' pages, the lanes' canvases and kept hidden states. `num_logprobs` is the most that any
        row's request asks for.
        """
        stopwatch = Stopwatch(self.device)
        batch = make_batch(rows, self._draft_row_limit)
        overrides = self.lanes.overridden(batch.rows[: batch.num_denoise])
        run = self._run_plain if self._graphs is None else self._graphs.run
        decision = run(batch, overrides)
        top_logprobs = None
        if decision is not None and num_logprobs:
            target_logit_DK, logprob_DK = (decision.packed_DKF[..., field] for field in _LOGPROB_FIELDS)
            top_logprobs = sampler.top_logprobs(
                decision.logits_DCW,
                decision.pick_DK,
                self.config.vocab_size,
                num_logprobs,
                target_logit_DK,
                logprob_DK,
            )
        return PassInFlight(batch, decision, top_logprobs, stopwatch)

    def explain(self, kept: list[KeptCommit], top_k: list[int | None]) -> ExplanationInFlight:
        """Have commits explained; see `Explainer.explain`."""
        return self._explainer.explain(kept, top_k)

    @contextmanager
    def beside_passes(self) -> Iterator[None]:
        """Device work in here runs beside the passes in flight, and is done at the end. It must not touch lanes."""
        if self._side_stream is None:
            yield
            return
        with torch.cuda.stream(self._side_stream):
            yield
        self._side_stream.synchronize()

    def _make_backend(self) -> Backend:
        is_fused = fused_support.HAS_TRITON and self.device.type == "cuda" and fused_support.is_supported(self.config)
        kind = FusedBackend if is_fused else PlainBackend
        return kind(self.model.transformer, self.cache)

    def _run_plain(self, batch: Batch, overrides: Mapping[int, OverridePlan]) -> Decision | None:
        num_rows = len(batch.rows)
        packed = pack_rows(
            batch,
            num_rows,
            batch.num_pages,
            idle_lane=self.lanes.idle_lane,
            scratch_page=self.cache.scratch_page,
        )
        tensors = RowTensors.unpack(packed.to(self.device), num_rows)
        canvas = self._program.forward(tensors, predicts=batch.predicts)
        if batch.num_denoise == 0:
            return None
        return self._program.decide(
            tensors,
            canvas,
            batch.num_denoise,
            batch.num_picks,
            predicts=batch.predicts,
            alters=batch.alters,
            overrides=overrides,
        )

    @torch.no_grad()
    def _capture(self, engine: EngineConfig) -> GraphedPasses:
        longest = -(-self.config.block_size // self.config.diff_block_size)
        lengths = tuple(sorted({min(PAGES_PER_SPLIT, longest), longest}))
        return GraphedPasses(
            self._program,
            max_rows=engine.max_rows,
            draft_row_limit=self._draft_row_limit,
            table_lengths=lengths,
            scratch_page=self.cache.scratch_page,
        )


def _with_products(model: SteerlingModel, engine: EngineConfig) -> SteerlingModel:
    """The model with the linear maps that the options ask for."""
    weight = model.transformer.lm_head.weight
    if engine.dtype == "fp8":
        check_float8(weight.device)
        quantize(model)
        # torch keeps what the bfloat16 weights took, but pages are planned by what the device has free.
        torch.cuda.empty_cache()
    if engine.deterministic:
        check_deterministic(model.config, weight.device, weight.dtype)
        model = make_batch_invariant(model)
    return model


def _side_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _is_out_of_memory(error: RuntimeError, device: torch.device) -> bool:
    if device.type == "cuda":
        return isinstance(error, torch.OutOfMemoryError)
    # On a CPU torch has no class of its own for it.
    return any(words in str(error) for words in ("can't allocate memory", "overflow"))
