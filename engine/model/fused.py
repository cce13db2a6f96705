"""The layers of the released configuration with fused kernels; the slow twin is `Transformer.forward` over pages.

A layer is four GEMMs and one kernel each for what stands between two of them. `Tuning` says which GEMMs are ours;
the others are the modules' own, whatever these are. Other configurations (see `fused_support`) run the plain modules.

Shapes: R rows, C canvas positions, B page table length, L layers, P pages, G KV heads, E head width, D model width,
S partial sums (one, complete, where a module ran).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .kernels.attention import AttentionWorkspace, paged_attention
from .kernels.gemm import gated_product, partial_products
from .kernels.norm import residual_norm
from .kernels.qkv import prepare_qkv
from .kernels.swiglu import swiglu
from .transformer import MLP, Attention, RMSNorm, Rotary, Transformer, TransformerLayer
from .tuning import PLAIN, GemmKey, GemmSettings, Tuning, tuning_for


@dataclass(frozen=True, slots=True)
class _Rows:
    """What attention needs of the rows of a pass."""

    rotary: Rotary
    block_R: Tensor
    page_R: Tensor
    page_table_RB: Tensor
    key_length_R: Tensor
    workspace: AttentionWorkspace


def forward(
    transformer: Transformer,
    token_ids_RC: Tensor,
    block_R: Tensor,
    page_R: Tensor,
    page_table_RB: Tensor,
    key_length_R: Tensor,
    masked_RC: Tensor,
    added_LRD: Tensor,
    k_LPCGE: Tensor,
    v_LPCGE: Tensor,
    workspace: AttentionWorkspace,
    tuning: Tuning | None = None,
) -> Tensor:
    """Hidden states after the final norm, hidden_RCD; writes each row's page of every layer.

    `added_LRD` (float32) is what steering adds after each layer at masked positions. Without `tuning`, the device's.
    """
    assert transformer.rotary is not None
    x_RCD: Tensor = transformer.embedding(token_ids_RC)
    tuning = (_tuning_for(x_RCD) if tuning is None else tuning).with_splits(workspace.num_splits)
    rows = _Rows(transformer.rotary, block_R, page_R, page_table_RB, key_length_R, workspace)
    layers = [layer for layer in transformer.layers if isinstance(layer, TransformerLayer)]
    eps, overlaps = transformer.config.norm_eps, tuning.overlaps
    for index, layer in enumerate(layers):
        attention, mlp = layer.attention, layer.mlp
        x_RCD = residual_norm(
            x_RCD,
            _attend(attention, x_RCD, rows, k_LPCGE[index], v_LPCGE[index], tuning),
            _weight(layer.attention_norm),
            eps,
            overlaps=overlaps,
        )
        x_RCD = residual_norm(
            x_RCD,
            _project(mlp.down, _gate(mlp, x_RCD, tuning), tuning),
            _weight(layer.mlp_norm),
            eps,
            added_RD=added_LRD[index],
            masked_RC=masked_RC,
            overlaps=overlaps,
        )
    return residual_norm(None, x_RCD[None], _weight(transformer.final_norm), eps, overlaps=overlaps)


def _attend(attention: Attention, x_RCD: Tensor, rows: _Rows, k_PCGE: Tensor, v_PCGE: Tensor, tuning: Tuning) -> Tensor:
    """The attention branch, in partial sums [S, R, C, D]; writes the rows' pages."""
    config = attention.config
    q_RCHE = prepare_qkv(
        _project(attention.qkv, x_RCD, tuning),
        rows.block_R,
        rows.page_R,
        rows.rotary.cos_SE,
        rows.rotary.sin_SE,
        _weight(attention.q_norm),
        _weight(attention.k_norm),
        k_PCGE,
        v_PCGE,
        heads=config.n_head,
        clip=math.inf if config.clip_qkv is None else config.clip_qkv,
        eps=config.norm_eps,
        overlaps=tuning.overlaps,
    )
    y_RCHE = paged_attention(
        q_RCHE,
        k_PCGE,
        v_PCGE,
        rows.page_table_RB,
        rows.key_length_R,
        rows.workspace,
        tuning.attention_for(config.diff_block_size, config.head_dim),
        overlaps=tuning.overlaps,
    )
    return _project(attention.output, y_RCHE.flatten(2), tuning)


def _gate(mlp: MLP, x_RCD: Tensor, tuning: Tuning) -> Tensor:
    """SwiGLU's hidden layer: in the GEMM's own kernel, or in one after it."""
    settings = _settings(tuning.gated, mlp.up, x_RCD)
    if settings is not None:
        return gated_product(x_RCD, mlp.up.weight, settings, overlaps=tuning.overlaps)
    return swiglu(mlp.up(x_RCD), overlaps=tuning.overlaps)


def _project(linear: nn.Linear, x_RCD: Tensor, tuning: Tuning) -> Tensor:
    """The layer's output in partial sums, which the kernel that reads them adds up."""
    settings = _settings(tuning.products, linear, x_RCD)
    if settings is not None:
        return partial_products(x_RCD, linear.weight, settings, overlaps=tuning.overlaps)
    complete: Tensor = linear(x_RCD)
    return complete[None]


def _settings(table: Mapping[GemmKey, GemmSettings], linear: nn.Module, x_RCD: Tensor) -> GemmSettings | None:
    # Exactly this class: one that computes something else with its weight has to be called.
    if type(linear) is not nn.Linear or linear.weight.dtype != torch.bfloat16:
        return None
    if getattr(linear, "bias", None) is not None:
        return None
    return table.get((x_RCD.numel() // linear.in_features, linear.out_features, linear.in_features))


def _tuning_for(x_RCD: Tensor) -> Tuning:
    if x_RCD.dtype != torch.bfloat16 or x_RCD.device.type != "cuda":
        return PLAIN
    return tuning_for(torch.cuda.get_device_capability(x_RCD.device))


def _weight(norm: nn.Module) -> Tensor:
    assert isinstance(norm, RMSNorm)
    return norm.weight
