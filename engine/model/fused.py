"""The layers of the released configuration with fused kernels; the slow twin is `Transformer.forward` over pages.

Ten kernels a layer: four GEMMs, and around them one kernel each for what stands between two GEMMs. Other
configurations (see `fused_support`) run the plain modules.

Shapes: R rows, C canvas positions, B page table length, L layers, P pages, G KV heads, E head width, D model width.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from .kernels.attention import AttentionWorkspace, paged_attention
from .kernels.norm import residual_norm
from .kernels.qkv import prepare_qkv
from .kernels.swiglu import swiglu
from .transformer import RMSNorm, Transformer, TransformerLayer


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
) -> Tensor:
    """Hidden states after the final norm, hidden_RCD; writes each row's page of every layer.

    `added_LRD` (float32) is what steering adds after each layer at masked positions.
    """
    config = transformer.config
    rotary = transformer.rotary
    assert rotary is not None
    clip = math.inf if config.clip_qkv is None else config.clip_qkv
    x_RCD: Tensor = transformer.embedding(token_ids_RC)
    for index, layer in enumerate(transformer.layers):
        assert isinstance(layer, TransformerLayer)
        attention, mlp = layer.attention, layer.mlp
        q_RCHE = prepare_qkv(
            attention.qkv(x_RCD),
            block_R,
            page_R,
            rotary.cos_SE,
            rotary.sin_SE,
            _weight(attention.q_norm),
            _weight(attention.k_norm),
            k_LPCGE[index],
            v_LPCGE[index],
            heads=config.n_head,
            clip=clip,
            eps=config.norm_eps,
        )
        y_RCHE = paged_attention(q_RCHE, k_LPCGE[index], v_LPCGE[index], page_table_RB, key_length_R, workspace)
        x_RCD = residual_norm(
            x_RCD, attention.output(y_RCHE.flatten(2)), _weight(layer.attention_norm), config.norm_eps
        )
        x_RCD = residual_norm(
            x_RCD,
            mlp.down(swiglu(mlp.up(x_RCD))),
            _weight(layer.mlp_norm),
            config.norm_eps,
            added_RD=added_LRD[index],
            masked_RC=masked_RC,
        )
    return residual_norm(None, x_RCD, _weight(transformer.final_norm), config.norm_eps)


def _weight(norm: nn.Module) -> Tensor:
    assert isinstance(norm, RMSNorm)
    return norm.weight
