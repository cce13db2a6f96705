"""SteerlingModel: the transformer and its concept heads together, and what is computed from both."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from .concept_heads import make_discovered_head, make_known_head
from .transformer import Transformer


class SteerlingModel(nn.Module):
    """An interpretable block-diffusion language model.

    Shapes: R rows (or sequences), S positions, M hidden states, D model width, V vocabulary.
    """

    def __init__(self, config: ModelConfig, *, vocab_multiple: int = 1) -> None:
        super().__init__()
        self.config = config
        self.transformer = Transformer(config, vocab_multiple=vocab_multiple)
        self.known_head = make_known_head(config)
        self.discovered_head = make_discovered_head(config)

    def compose(self, hidden_MD: Tensor) -> Tensor:
        """What lm_head reads, composed_MD: hidden itself where the epsilon correction holds.

        With the correction, known + discovered + (hidden - known - discovered) is hidden, so no head is needed
        to choose tokens. Without it the discovered features stand in for the remainder.
        """
        if not self.config.needs_heads_for_tokens:
            return hidden_MD
        return self.known_features(hidden_MD) + self.discovered_features(hidden_MD)

    def known_features(self, hidden_MD: Tensor) -> Tensor:
        """Sum of active known concepts' weighted embeddings, [M, D]."""
        concept = self.config.concept
        return self.known_head.features(hidden_MD, None if concept.topk_known is None else concept.num_active_known)

    def discovered_features(self, hidden_MD: Tensor) -> Tensor:
        """Sum of active discovered concepts' weighted embeddings, [M, D]; zeros without a discovered head."""
        if self.discovered_head is None:
            return torch.zeros_like(hidden_MD)
        concept = self.config.concept
        is_sparse = concept.discovered_topk is not None and concept.apply_topk_to_discovered
        return self.discovered_head.features(hidden_MD, concept.discovered_topk if is_sparse else None)

    def hidden_dense(
        self, token_ids_RS: Tensor, injection_RSD: Tensor | None = None, inject_layer: int | None = None
    ) -> Tensor:
        """Hidden states hidden_RSD of complete sequences. Differentiable.

        `injection_RSD`, already scaled by alpha, is added after every layer i (from 0) with i + 1 >= inject_layer;
        None for `inject_layer` means n_layers // 2.
        """
        if injection_RSD is None:
            return self.transformer.dense(token_ids_RS)
        first = self.config.n_layers // 2 if inject_layer is None else inject_layer
        added = injection_RSD

        def inject(layer: int, x_RSD: Tensor) -> Tensor:
            return x_RSD + added if layer + 1 >= first else x_RSD

        return self.transformer.dense(token_ids_RS, inject)
