"""Keys and values of every page and layer, and how many pages memory allows.

Shapes: L layers, P pages, C positions of a page, G KV heads, E head width, R rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import EngineConfig, ModelConfig
from ..errors import InvalidConfig

# Without a GPU there is no memory to plan for: enough for every lane's whole context, within this bound.
_CPU_CACHE_BYTES = 2 * 1024**3
# Tensors of a pass that live at the same time, in the sampler (every position picked; measured on a CPU: 10, to which
# a GPU's sort adds its own), the attention, a layer and a concept head.
_LOGIT_COPIES = 14
_KEY_COPIES = 2
_MLP_COPIES = 5
_HIDDEN_COPIES = 12
_EMBEDDING_COPIES = 4
# The same of a replayed trace's slice with gradients: in a layer whose forward pass is done again and undone.
_REPLAYED_MLP_COPIES = 8
_REPLAYED_HIDDEN_COPIES = 30
_MASK_COPIES = 3
_REPLAYED_LOGIT_COPIES = 4

REPLAYED_COMMITS = 64
"""Commits of a replayed trace whose logits over the vocabulary are there at a time."""


def page_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one page: keys and values of one block in all layers."""
    slot = 2 * config.num_kv_heads * config.head_dim * dtype.itemsize
    return config.n_layers * config.diff_block_size * slot


def pass_bytes(config: ModelConfig, max_rows: int, dtype: torch.dtype) -> int:
    """Bytes that a pass of `max_rows` denoise rows takes beside weights, lanes and pages: an upper bound."""
    num_positions = max_rows * config.diff_block_size
    keys = 2 * max_rows * config.block_size * config.num_kv_heads * config.head_dim * dtype.itemsize
    inner = _MLP_COPIES * config.mlp_width + _HIDDEN_COPIES * config.n_embd
    logits = _LOGIT_COPIES * config.vocab_size
    return _KEY_COPIES * keys + num_positions * torch.float32.itemsize * (inner + logits + _embedding_floats(config))


def _embedding_floats(config: ModelConfig) -> int:
    """Numbers that choosing one token from concept features gathers; 0 where tokens are chosen from hidden states."""
    if not config.needs_heads_for_tokens:
        return 0
    num_embeddings = max(config.concept.num_active_known, config.concept.num_reported_discovered)
    return _EMBEDDING_COPIES * num_embeddings * config.n_embd


def replay_context(config: ModelConfig, engine: EngineConfig) -> int:
    """Longest prompt and max_tokens, together, of a trace that is replayed; 0: none is."""
    asked = engine.input_attribution_context
    return config.block_size if asked is None else min(asked, config.block_size)


def replay_bytes(config: ModelConfig, num_positions: int, dtype: torch.dtype) -> int:
    """Bytes that a slice over `num_positions` takes, of replaying a trace or attributing to its inputs: an upper bound.

    The input of every layer stays for the gradients, and one layer at a time is worked through again.
    """
    # The MLP stays in the model's dtype; norms, rotary embedding and the path's own embeddings are float32.
    kept = ((config.n_layers + 1) * config.n_embd + _REPLAYED_MLP_COPIES * config.mlp_width) * dtype.itemsize
    floats = _REPLAYED_HIDDEN_COPIES * config.n_embd + _MASK_COPIES * num_positions
    logits = _REPLAYED_LOGIT_COPIES * config.vocab_size + _embedding_floats(config)
    num_floats = num_positions * floats + min(num_positions, REPLAYED_COMMITS) * logits
    return num_positions * kept + num_floats * torch.float32.itemsize


def plan_num_pages(
    config: ModelConfig, engine: EngineConfig, device: torch.device, dtype: torch.dtype, num_spare: int = 1
) -> int:
    """Pages for sequences: what was asked for, else what memory allows beside `num_spare` pages of nobody.

    Call it once weights and lanes are there.

    Raises InvalidConfig when not even one sequence of full context fits beside the weights.
    """
    if engine.num_pages is not None:
        return engine.num_pages
    size = page_bytes(config, dtype)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return pages_that_fit(config, engine, dtype, free=free, total=total, num_spare=num_spare)
    num_pages = min(engine.num_lanes * _blocks_per_context(config), _CPU_CACHE_BYTES // size)
    return _at_least_one_context(num_pages, config, engine, size)


def pages_that_fit(
    config: ModelConfig, engine: EngineConfig, dtype: torch.dtype, *, free: int, total: int, num_spare: int
) -> int:
    """Pages for sequences on a GPU of `total` bytes of which `free` are free, `num_spare` pages of nobody beside them.

    Raises InvalidConfig as `plan_num_pages` does.
    """
    size = page_bytes(config, dtype)
    budget = int(total * engine.gpu_memory_fraction) - (total - free)
    reserve = pass_bytes(config, engine.max_rows, dtype) + replay_bytes(config, replay_context(config, engine), dtype)
    num_pages = min(budget, free - reserve) // size - num_spare
    return _at_least_one_context(num_pages, config, engine, size)


def _blocks_per_context(config: ModelConfig) -> int:
    return -(-config.block_size // config.diff_block_size)


def _at_least_one_context(num_pages: int, config: ModelConfig, engine: EngineConfig, size: int) -> int:
    if num_pages < _blocks_per_context(config):
        raise InvalidConfig(
            f"memory has room for {max(num_pages, 0)} pages of {size} bytes, but one sequence of full context needs "
            f"{_blocks_per_context(config)}; raise gpu_memory_fraction (now {engine.gpu_memory_fraction}), or lower "
            "max_rows, max_lanes or input_attribution_context"
        )
    return num_pages


class KVCache:
    """The K and V tensors. Page `num_pages` is scratch: rows that only fill a bucket write there. Drafts write the
    pages after it, one each."""

    def __init__(
        self, config: ModelConfig, num_pages: int, device: torch.device, dtype: torch.dtype, num_drafts: int = 0
    ) -> None:
        shape = (
            config.n_layers,
            num_pages + 1 + num_drafts,
            config.diff_block_size,
            config.num_kv_heads,
            config.head_dim,
        )
        self.num_pages = num_pages
        # Zeros, not empty: keys that do not exist are masked, but 0 * NaN would still be NaN.
        self.k_LPCGE = torch.zeros(shape, device=device, dtype=dtype)
        self.v_LPCGE = torch.zeros(shape, device=device, dtype=dtype)

    @property
    def scratch_page(self) -> int:
        """A page that no sequence owns."""
        return self.num_pages

    def write(self, layer: int, page_R: Tensor, k_RCGE: Tensor, v_RCGE: Tensor) -> None:
        """Overwrite each row's own page in one layer. Pages of different rows must differ, scratch aside."""
        self.k_LPCGE[layer].index_copy_(0, page_R, k_RCGE.to(self.k_LPCGE.dtype))
        self.v_LPCGE[layer].index_copy_(0, page_R, v_RCGE.to(self.v_LPCGE.dtype))
