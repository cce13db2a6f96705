"""What an engine would hold on a GPU that is not here: the runner's own arithmetic over tensors without data."""

from __future__ import annotations

import torch

from ..config import EngineConfig, ModelConfig
from ..model.quantization import quantized_bytes
from ..model.steerling import SteerlingModel
from ..model.weights import VOCAB_MULTIPLE
from .kv_cache import page_bytes, pages_that_fit, pass_bytes, replay_bytes, replay_context
from .lanes import Lanes
from .memory import MemoryPlan


def plan_memory(config: ModelConfig, engine: EngineConfig, *, total: int) -> MemoryPlan:
    """The memory of one engine on a GPU of `total` bytes that nothing else uses; no GPU is needed to know it.

    What the driver and captured graphs hold is not in it: graphs live in `pass_reserve`, a driver's context takes some
    hundred MiB of what is unused. Raises InvalidConfig where not even one sequence of full context fits.
    """
    dtype = torch.float32 if engine.dtype == "float32" else torch.bfloat16
    num_drafts = min(engine.draft_row_limit, engine.max_rows) // 2
    with torch.device("meta"):
        model = SteerlingModel(config, vocab_multiple=VOCAB_MULTIPLE)
        lanes = Lanes(config, engine.num_lanes, torch.device("meta"), dtype, num_drafts)
    if config.weight_sharing:
        model.transformer.lm_head.weight = model.transformer.embedding.weight
    weights = sum(buffer.nbytes for buffer in model.buffers())
    if engine.dtype == "fp8":
        weights += quantized_bytes(model)
    else:
        weights += sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    lane_bytes = sum(tensor.nbytes for tensor in lanes.tensors())
    num_spare = 1 + num_drafts
    num_pages = engine.num_pages or pages_that_fit(
        config, engine, dtype, free=total - weights - lane_bytes, total=total, num_spare=num_spare
    )
    return MemoryPlan(
        weights=weights,
        lanes=lane_bytes,
        num_lanes=engine.num_lanes,
        concepts_per_lane=lanes.concept_bytes,
        page=page_bytes(config, dtype),
        num_pages=num_pages,
        num_spare_pages=num_spare,
        pass_reserve=pass_bytes(config, engine.max_rows, dtype),
        replay_reserve=replay_bytes(config, replay_context(config, engine), dtype),
        graphs=0,
        total=total,
    )
