"""The demo model's sizes, its config.json and its fresh weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from engine.model.steerling import SteerlingModel

from .tokenizer import special_ids


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes that command-line arguments may change."""

    vocab_size: int = 6144
    n_layers: int = 6
    n_embd: int = 256
    n_head: int = 4
    n_kv_heads: int = 2
    intermediate_size: int = 384


def config_json(shape: Shape, tokenizer: Tokenizer, num_known: int) -> dict[str, Any]:
    """config.json in the flat public layout."""
    return {
        "model_type": "steerling",
        "interpretable": True,
        **asdict(shape),
        "block_size": 1024,
        "diff_block_size": 64,
        "use_rms_norm": True,
        "norm_eps": 1e-5,
        "norm_order": "post",
        "use_qk_norm": True,
        "use_rope": True,
        "rope_base": 10000.0,
        "rope_full_precision": True,
        "mlp_type": "swiglu",
        "activation": "gelu",
        "mlp_ratio": 4,
        "use_bias": False,
        "clip_qkv": 10.0,
        "weight_sharing": True,
        "n_concepts": num_known,
        "n_unknown_concepts": 512,
        "concept_dim": shape.n_embd,
        "use_attention_known": False,
        "use_attention_unknown": False,
        "topk_known": 16,
        "topk_known_features": 16,
        "use_unknown": True,
        "factorize_unknown": True,
        "factorize_rank": 32,
        "unknown_topk": 32,
        "apply_topk_to_unknown": True,
        "use_epsilon_correction": True,
        "topk_on_logits": False,
        "concept_block_size": 512,
        "pad_multiple": 16,
        **special_ids(tokenizer),
    }


def initialise(model: SteerlingModel, seed: int) -> None:
    """Fresh weights, drawn on the CPU so that every device starts alike."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            nn.init.constant_(parameter, 0.5 if name.endswith(("attention_norm.weight", "mlp_norm.weight")) else 1.0)
        else:
            is_table = "embedding" in name or "coefficient" in name
            std = 0.05 if is_table else parameter.shape[-1] ** -0.5
            nn.init.normal_(parameter, std=std, generator=generator)
