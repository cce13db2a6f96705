"""Two ways to run the heavy parts of a pass: plain torch anywhere, Triton kernels on a GPU.

Shapes: R rows, C canvas positions, D model width, L layers, V vocabulary, W padded vocabulary.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..decoding import sampler, steering
from ..model.attention import paged_attention
from ..model.transformer import Transformer
from .batch import RowTensors
from .kv_cache import KVCache


class Backend(Protocol):
    """The layers over pages, and the confidences of their logits."""

    is_capturable: bool
    """Its work may go into a CUDA graph: shapes follow from the row tensors alone, and the host waits for nothing."""

    def layers(
        self, rows: RowTensors, token_RC: Tensor, position_RC: Tensor, masked_RC: Tensor, added_LRD: Tensor
    ) -> Tensor:
        """Hidden states hidden_RCD; writes the rows' pages. `added_LRD` (float32) is added at masked positions."""

    def confidence(
        self,
        logits_RCW: Tensor,
        masked_RC: Tensor,
        position_RC: Tensor,
        first_end_R: Tensor,
        offset_RV: Tensor,
        present_RV: Tensor,
        penalty_R: Tensor,
        banned_V: Tensor,
        is_end_RV: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """confidence_RC, entropy_RC and is_finite_RC, as `sampler.confidence` defines them."""


class PlainBackend:
    """The slow twin: the model's own modules, any configuration, any device."""

    # It could be captured, but gathers every page of the table for every row, however short the row is.
    is_capturable = False
    confidence = staticmethod(sampler.confidence)

    def __init__(self, transformer: Transformer, cache: KVCache) -> None:
        self._transformer = transformer
        self._cache = cache

    def layers(
        self, rows: RowTensors, token_RC: Tensor, position_RC: Tensor, masked_RC: Tensor, added_LRD: Tensor
    ) -> Tensor:
        """See Backend."""
        cache = self._cache

        def attend(layer: int, q_RCHE: Tensor, k_RCGE: Tensor, v_RCGE: Tensor) -> Tensor:
            # All rows write before any attends: a seal row's block is read by the next block's row in this pass.
            cache.write(layer, rows.page_R, k_RCGE, v_RCGE)
            return paged_attention(
                q_RCHE, cache.k_LPCGE[layer], cache.v_LPCGE[layer], rows.page_table_RB, rows.key_length_R
            )

        def inject(layer: int, x_RCD: Tensor) -> Tensor:
            return steering.inject(x_RCD, added_LRD[layer], masked_RC)

        hidden_RCD: Tensor = self._transformer(token_RC, position_RC, attend, inject)
        return hidden_RCD
