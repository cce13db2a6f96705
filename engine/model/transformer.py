"""The block-causal transformer, with attention and injection passed in.

The same layers serve three callers: training over complete sequences, the engine's paged rows, and tests.
None of them needs another model class, because a layer is told how to attend (`Attend`) and what to add
to the residual stream after it (`Inject`).

Shapes: R rows (or sequences), C positions in a row, D model width, H query heads, G KV heads,
E head width, V vocabulary without padding, K vectors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..config import ModelConfig
from .attention import dense_block_causal_attention

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q_RCHE, k_RCGE, v_RCGE) -> y_RCHE; may write the keys and values to pages first."""
Inject = Callable[[int, Tensor], Tensor]
"""(layer, x_RCD) -> x_RCD, called after every layer; layers count from 0 here."""

_ALIGNED_TOKENS = 8192
"""Tokens whose rows of lm_head are converted to float32 at a time."""


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Any leading shape; returns x's dtype."""
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + self.eps)
        return (self.weight * (wide * scale)).to(x.dtype)


def make_norm(config: ModelConfig, width: int) -> nn.Module:
    """The config's norm. LayerNorm ignores `norm_eps`, as the reference does."""
    return RMSNorm(width, config.norm_eps) if config.use_rms_norm else nn.LayerNorm(width)


class Rotary(nn.Module):
    """Rotary position embedding, the two halves of a head rotated against each other.

    Source: Su et al., RoFormer (2021), equation 34, in the half-split layout.
    """

    cos_SE: Tensor
    sin_SE: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.head_dim
        frequency = 1.0 / config.rope_base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
        # The last block may reach past the context; its positions there exist for nobody but need an angle.
        length = -(-config.block_size // config.diff_block_size) * config.diff_block_size
        angle = torch.outer(torch.arange(length, dtype=torch.float32), frequency)
        angle_SE = torch.cat((angle, angle), dim=-1)
        self.register_buffer("cos_SE", angle_SE.cos(), persistent=False)
        self.register_buffer("sin_SE", angle_SE.sin(), persistent=False)
        self.full_precision = config.rope_full_precision

    def forward(self, x_RCHE: Tensor, positions_RC: Tensor) -> Tensor:
        """Rotate each head by its position; returns x's dtype."""
        wide = x_RCHE.float() if self.full_precision else x_RCHE
        cos = self.cos_SE[positions_RC].unsqueeze(2).to(wide.dtype)
        sin = self.sin_SE[positions_RC].unsqueeze(2).to(wide.dtype)
        first, second = wide.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return (wide * cos + turned * sin).to(x_RCHE.dtype)


class Attention(nn.Module):
    """Projections, clamping, qk-norm and rotary around an `Attend`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        kv_width = config.num_kv_heads * config.head_dim
        self.qkv = nn.Linear(config.n_embd, config.n_embd + 2 * kv_width, bias=config.use_bias)
        self.output = nn.Linear(config.n_embd, config.n_embd, bias=config.use_bias)
        self.q_norm = make_norm(config, config.head_dim) if config.use_qk_norm else nn.Identity()
        self.k_norm = make_norm(config, config.head_dim) if config.use_qk_norm else nn.Identity()

    def forward(self, x_RCD: Tensor, positions_RC: Tensor, rotary: Rotary | None, attend: Attend, layer: int) -> Tensor:
        """Attention output y_RCD before any norm or residual."""
        config = self.config
        kv_width = config.num_kv_heads * config.head_dim
        qkv = self.qkv(x_RCD)
        if config.clip_qkv is not None:
            qkv = qkv.clamp(-config.clip_qkv, config.clip_qkv)
        q, k, v = qkv.split((config.n_embd, kv_width, kv_width), dim=-1)
        q_RCHE = self.q_norm(q.unflatten(-1, (config.n_head, config.head_dim)))
        k_RCGE = self.k_norm(k.unflatten(-1, (config.num_kv_heads, config.head_dim)))
        v_RCGE = v.unflatten(-1, (config.num_kv_heads, config.head_dim))
        if rotary is not None:
            q_RCHE, k_RCGE = rotary(q_RCHE, positions_RC), rotary(k_RCGE, positions_RC)
        y_RCD: Tensor = self.output(attend(layer, q_RCHE, k_RCGE, v_RCGE).flatten(2))
        return y_RCD


class MLP(nn.Module):
    """SwiGLU, or one activation between two linear maps."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.is_gated = config.mlp_type == "swiglu"
        inner = config.mlp_width
        self.up = nn.Linear(config.n_embd, 2 * inner if self.is_gated else inner, bias=config.use_bias)
        self.down = nn.Linear(inner, config.n_embd, bias=config.use_bias)
        self.activation: nn.Module = {
            "gelu": nn.GELU(approximate="tanh"),
            "relu": nn.ReLU(),
            "silu": nn.SiLU(),
        }[config.activation]

    def forward(self, x_RCD: Tensor) -> Tensor:
        """Returns y_RCD before any norm or residual."""
        inner = self.up(x_RCD)
        if self.is_gated:
            value, gate = inner.chunk(2, dim=-1)
            inner = F.silu(gate) * value
        else:
            inner = self.activation(inner)
        y_RCD: Tensor = self.down(inner)
        return y_RCD


class TransformerLayer(nn.Module):
    """One layer: attention and MLP, each normed before (`pre`) or after (`post`) its residual branch."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm_order = config.norm_order
        self.attention_norm = make_norm(config, config.n_embd)
        self.attention = Attention(config)
        self.mlp_norm = make_norm(config, config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x_RCD: Tensor, positions_RC: Tensor, rotary: Rotary | None, attend: Attend, layer: int) -> Tensor:
        """The residual stream after this layer."""
        if self.norm_order == "pre":
            x_RCD = x_RCD + self.attention(self.attention_norm(x_RCD), positions_RC, rotary, attend, layer)
            x_RCD = x_RCD + self.mlp(self.mlp_norm(x_RCD))
        else:
            x_RCD = x_RCD + self.attention_norm(self.attention(x_RCD, positions_RC, rotary, attend, layer))
            x_RCD = x_RCD + self.mlp_norm(self.mlp(x_RCD))
        return x_RCD


class Transformer(nn.Module):
    """Embedding, layers, final norm and output projection."""

    def __init__(self, config: ModelConfig, *, vocab_multiple: int = 1) -> None:
        """`vocab_multiple` pads the vocabulary's rows: an odd vocabulary makes lm_head several times slower."""
        super().__init__()
        self.config = config
        vocab_rows = -(-config.vocab_size // vocab_multiple) * vocab_multiple
        self.embedding = nn.Embedding(vocab_rows, config.n_embd)
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(config.n_layers))
        self.final_norm = make_norm(config, config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, vocab_rows, bias=False)
        if config.weight_sharing:
            self.lm_head.weight = self.embedding.weight
        self.rotary = Rotary(config) if config.use_rope else None

    def forward(
        self, token_ids_RC: Tensor, positions_RC: Tensor, attend: Attend, inject: Inject | None = None
    ) -> Tensor:
        """Hidden states after the final norm, hidden_RCD. Token ids and positions are int64."""
        return self._through_layers(self.embedding(token_ids_RC), positions_RC, attend, inject)

    def dense(self, token_ids_RS: Tensor, inject: Inject | None = None) -> Tensor:
        """Hidden states hidden_RSD of complete sequences from position 0. Differentiable."""
        return self.dense_from_embeddings(self.embedding(token_ids_RS), inject)

    def dense_from_embeddings(
        self, embeddings_RSD: Tensor, inject: Inject | None = None, *, recomputes: bool = False
    ) -> Tensor:
        """What `dense` gives for embeddings, of tokens or of anything between, in the model's dtype.

        `recomputes`: for gradients only the input of each layer is kept, and its forward pass is done again, so that
        memory holds the inside of one layer at a time.
        """
        block_size = self.config.diff_block_size

        def attend(layer: int, q_RSHE: Tensor, k_RSGE: Tensor, v_RSGE: Tensor) -> Tensor:
            return dense_block_causal_attention(q_RSHE, k_RSGE, v_RSGE, block_size)

        num_rows, length = embeddings_RSD.shape[:2]
        positions_RS = torch.arange(length, device=embeddings_RSD.device).expand(num_rows, length)
        return self._through_layers(embeddings_RSD, positions_RS, attend, inject, recomputes=recomputes)

    def _through_layers(
        self, x_RCD: Tensor, positions_RC: Tensor, attend: Attend, inject: Inject | None, *, recomputes: bool = False
    ) -> Tensor:
        def through(index: int, x_RCD: Tensor) -> Tensor:
            x_RCD = self.layers[index](x_RCD, positions_RC, self.rotary, attend, index)
            return x_RCD if inject is None else inject(index, x_RCD)

        for index in range(len(self.layers)):
            if recomputes:
                # Nothing in a layer is random, and to keep the generators' states would wait for the device.
                x_RCD = checkpoint(through, index, x_RCD, use_reentrant=False, preserve_rng_state=False)
            else:
                x_RCD = through(index, x_RCD)
        hidden_RCD: Tensor = self.final_norm(x_RCD)
        return hidden_RCD

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits over the real vocabulary, in hidden's dtype: [..., D] -> [..., vocab_size]."""
        logits: Tensor = self.lm_head(hidden)
        return logits[..., : self.config.vocab_size]

    def token_alignments(self, vectors_KD: Tensor) -> Tensor:
        """Dot product of each vector (float32) with every token's row of lm_head, float32 alignments_KV."""
        # In parts: a float32 copy of all rows at once would be as large as several layers.
        starts = range(0, self.config.vocab_size, _ALIGNED_TOKENS)
        parts = [self.token_vectors_VD[start : start + _ALIGNED_TOKENS] for start in starts]
        return torch.cat([vectors_KD @ part_VD.float().T for part_VD in parts], dim=-1)

    @property
    def token_vectors_VD(self) -> Tensor:
        """Rows of lm_head for the real vocabulary."""
        return self.lm_head.weight[: self.config.vocab_size]
