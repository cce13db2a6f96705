"""The model and the engines that sections measure, and the baselines of the same process."""

from __future__ import annotations

import argparse
import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine import Engine, EngineConfig, InvalidConfig, ModelConfig
from engine.model.steerling import SteerlingModel
from engine.model.transformer import Rotary
from engine.model.weights import VOCAB_MULTIPLE, load_model

from .load import Load
from .loops import Block, run_block, seal_prompts
from .report import NotAvailable, Section, median
from .timing import CompileCounter, ReplayTimer, device_seconds

DEMO = Path(__file__).resolve().parents[2] / "demo_model" / "steerling-demo"
STATED_FLOP_PER_S = 750e12
"""Dense bf16 rate that the bars are set against."""
EIGHT_B: dict[str, Any] = {
    "vocab_size": 100281,
    "eos_token_id": 100257,
    "pad_token_id": 100277,
    "mask_token_id": 100280,
}
"""What config.json of the 8B shape has to say: all else is the default."""


@dataclass(frozen=True)
class Ceilings:
    """What the machine can do at best."""

    copy_byte_per_s: float
    """Read and written together."""
    read_byte_per_s: float
    flop_per_s: float
    size: int
    """Side of the matrices that were multiplied."""


@dataclass(frozen=True)
class Floor:
    """No pass over these rows can be faster."""

    seconds: float
    measured_seconds: float
    """With the measured instead of the stated rate of operations."""
    bound: str
    """`weights`: reading them once takes longest; `operations`: multiplying does."""


class Bench:
    """One process's model and main engine; everything is made when first asked for."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        has_gpu = torch.cuda.is_available()
        self.device = torch.device(("cuda" if has_gpu else "cpu") if options.device == "auto" else options.device)
        self.is_gpu = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.is_gpu else torch.float32
        self.checkpoint: Path | None = options.checkpoint or (None if self.is_gpu else DEMO)
        """None: random weights of the 8B shape."""
        self.config = ModelConfig(**EIGHT_B) if self.checkpoint is None else ModelConfig.from_json(self.checkpoint)
        self.rows: tuple[int, ...] = options.rows or ((1, 2, 3, 4, 8, 16, 32) if self.is_gpu else (1, 2))
        contexts = options.contexts or ((256, 1024, 4096) if self.is_gpu else (128, 256))
        self.keys = tuple(keys for keys in contexts if keys <= self.config.block_size)
        self.clients: tuple[int, ...] = options.clients or ((1, 4, 16, 32) if self.is_gpu else (1, 2))
        self.repeats: int = options.repeats or (3 if self.is_gpu else 1)
        self.requests: int = options.requests or (16 if self.is_gpu else 4)
        self.load = Load(self.config, options.prompt_tokens, options.new_tokens)
        self.compiles = CompileCounter()
        self._model: SteerlingModel | None = None
        self._engine: Engine | None = None
        self._ceilings: Ceilings | None = None
        self._gemms: dict[int, list[float]] = {}
        self._blocks: dict[tuple[int, int], Block] = {}

    @property
    def model(self) -> SteerlingModel:
        """The model in bfloat16 on a GPU, float32 elsewhere."""
        if self._model is None:
            self._model = self.make_model()
        return self._model

    @property
    def engine(self) -> Engine:
        """The engine with default options that most sections share."""
        if self._engine is None:
            self._engine = self.make_engine()
        return self._engine

    def make_model(self) -> SteerlingModel:
        """A model of its own, for an engine that may rewrite the weights."""
        if self.checkpoint is not None:
            return load_model(self.checkpoint, device=self.device, dtype=self.dtype)
        return random_model(self.config, self.device, self.dtype)

    def engine_config(self, **changes: Any) -> EngineConfig:
        """The options of the main engine with changes; raises NotAvailable for what cannot be here."""
        most = max(*self.rows, *self.clients, 8)
        blocks = -(-self.config.block_size // self.config.diff_block_size)
        base: dict[str, Any] = {
            "device": str(self.device),
            # A seal row may ride beside every denoise row, and a long prompt come on top.
            "max_rows": 2 * most,
            "max_lanes": most + 2,
            "num_pages": (most + 2) * blocks,
            "use_graphs": not self.options.no_graphs,
        }
        try:
            return EngineConfig(**{**base, **changes})
        except InvalidConfig as error:
            raise NotAvailable(f"not available here: {error}") from error

    def make_engine(self, *, model: SteerlingModel | None = None, **changes: Any) -> Engine:
        """Another engine with other options, on the shared model unless one is given."""
        config = self.engine_config(**changes)
        with self.compiles.expected():
            return Engine(model or self.model, config)

    def close(self) -> None:
        """Free everything."""
        self._engine = self._model = None
        self.compiles.close()
        self.free()

    def free(self) -> None:
        """Give unused memory back."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()

    def replays(self) -> ReplayTimer:
        """A fresh timer of graph replays."""
        return ReplayTimer(self.device)

    @property
    def ceilings(self) -> Ceilings:
        """Bandwidth and matrix rate, measured once in this process."""
        if self._ceilings is None:
            self._ceilings = measure_ceilings(self.device, self.dtype)
            self.free()
        return self._ceilings

    @property
    def flop_per_s(self) -> float:
        """The rate that floors are set by: the stated one on a GPU, the measured one elsewhere."""
        return STATED_FLOP_PER_S if self.is_gpu else self.ceilings.flop_per_s

    def gemms(self, rows: int) -> list[float]:
        """Seconds of the model's matrix products for so many rows, repeated; measured once in this process."""
        if rows not in self._gemms:
            self._gemms[rows] = measure_gemms(self.model, rows, self.device, self.dtype)
            self.free()
        return self._gemms[rows]

    def fresh_gemms(self, rows: int) -> list[float]:
        """The same, measured now."""
        return measure_gemms(self.model, rows, self.device, self.dtype, repeats=30, warm_ups=20)

    @property
    def num_weights(self) -> int:
        """Weights that a pass multiplies with."""
        return sum(weight.numel() for weight in gemm_weights(self.model))

    def operations(self, rows: int) -> float:
        """Multiplications and additions of the matrix products of a pass."""
        return 2.0 * self.num_weights * rows * self.config.diff_block_size

    def floor(self, rows: int) -> Floor:
        """The larger of reading the weights once and doing the operations."""
        ceilings = self.ceilings
        reading = self.num_weights * self.dtype.itemsize / ceilings.copy_byte_per_s
        operating = self.operations(rows) / self.flop_per_s
        return Floor(
            seconds=max(reading, operating),
            measured_seconds=max(reading, self.operations(rows) / ceilings.flop_per_s),
            bound="weights" if reading >= operating else "operations",
        )

    def block(self, rows: int, keys: int) -> Block:
        """So many requests fill one block against so many keys, all options on; measured once in this process."""
        if (rows, keys) not in self._blocks:
            self._blocks[rows, keys] = self.fresh_block(self.engine, rows, keys)
        return self._blocks[rows, keys]

    def fresh_block(self, engine: Engine, rows: int, keys: int, **choices: Any) -> Block:
        """The same on any engine and with other choices of the requests, measured now."""
        requests = [self.load.block_request(row, keys, **choices) for row in range(rows)]
        seal_prompts(engine, requests)
        return run_block(engine, requests, ReplayTimer(self.device, engine.runner))

    def pass_seconds(self, rows: int, keys: int) -> float:
        """Median seconds of an engine step."""
        return median(self.block(rows, keys).step_s)

    def few_keys(self) -> int:
        """The smallest context of the run: 256 keys unless it was asked for others."""
        return min(self.keys)

    def needs_gpu(self, section: Section) -> None:
        """Raise NotAvailable on a CPU."""
        if not self.is_gpu:
            raise NotAvailable(f"{section.name} needs a GPU")


def random_model(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> SteerlingModel:
    """A model of any shape with random weights, made on the device."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = SteerlingModel(config, vocab_multiple=VOCAB_MULTIPLE)
    model = model.to(dtype).to_empty(device=device).requires_grad_(False).eval()
    model.transformer.rotary = Rotary(config).to(device)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.02)
        else:
            parameter.fill_(1.0)
    if config.weight_sharing:
        model.transformer.lm_head.weight = model.transformer.embedding.weight
    return model


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Bandwidth of a kernel that copies, of one that only reads, and the rate of a large matrix product."""
    num_bytes, size = (2**31, 8192) if device.type == "cuda" else (2**25, 512)
    source = torch.ones(num_bytes // dtype.itemsize, dtype=dtype, device=device)
    target = torch.empty_like(source)
    # A kernel that reads and writes; captured, a plain copy becomes a transfer of another and slower kind.
    copying = median(device_seconds(lambda: torch.neg(source, out=target), device))
    reading = median(device_seconds(lambda: source.amax(), device))
    a, b = torch.randn(2, size, size, device=device, dtype=dtype)
    multiplying = median(device_seconds(lambda: a @ b, device))
    return Ceilings(
        copy_byte_per_s=2 * num_bytes / copying,
        read_byte_per_s=num_bytes / reading,
        flop_per_s=2 * size**3 / multiplying,
        size=size,
    )


def gemm_weights(model: SteerlingModel) -> list[Tensor]:
    """The weights that every position of a pass is multiplied with: all layers' and lm_head's, padded."""
    config = model.config
    layers = [module.weight for module in model.transformer.layers.modules() if isinstance(module, nn.Linear)]
    width, kv_width = config.n_embd, config.num_kv_heads * config.head_dim
    mlp = width * config.mlp_width * (3 if config.mlp_type == "swiglu" else 2)
    expected = config.n_layers * (2 * width * (width + kv_width) + mlp)
    found = sum(weight.numel() for weight in layers)
    if found != expected:
        raise RuntimeError(f"the layers' linear maps hold {found:,} weights, their shape says {expected:,}")
    return [*layers, model.transformer.lm_head.weight]


@torch.no_grad()
def measure_gemms(
    model: SteerlingModel, rows: int, device: torch.device, dtype: torch.dtype, repeats: int = 15, warm_ups: int = 3
) -> list[float]:
    """The library's own matrix products in the order and the shapes of a pass, and nothing between them."""
    positions = rows * model.config.diff_block_size
    weights = gemm_weights(model)
    inputs = {
        width: torch.randn(positions, width, device=device, dtype=dtype)
        for width in {weight.shape[1] for weight in weights}
    }

    def work() -> None:
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)

    return device_seconds(work, device, repeats, warm_ups)
