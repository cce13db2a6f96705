"""The fast way to run the heavy parts of a pass. Imported only where Triton is installed."""

from __future__ import annotations

import torch
from torch import Tensor

from ..decoding import sampler
from ..decoding.kernels.confidence import confidence
from ..model import fused
from ..model.attention import num_splits_for
from ..model.kernels.attention import AttentionWorkspace
from ..model.transformer import Transformer
from .batch import RowTensors
from .kv_cache import KVCache


class FusedBackend:
    """Triton kernels for the released configuration (`fused.is_supported`); see Backend for shapes."""

    is_capturable = True

    def __init__(self, transformer: Transformer, cache: KVCache) -> None:
        self._transformer = transformer
        self._cache = cache

    def confidence(self, *given: Tensor, **named: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See Backend. The entropies are the slow twin's: the kernel does not sum them yet."""
        confidence_RC, is_finite_RC = confidence(*given, **named)
        return confidence_RC, sampler.confidence(*given, **named)[1], is_finite_RC

    def layers(
        self, rows: RowTensors, token_RC: Tensor, position_RC: Tensor, masked_RC: Tensor, added_LRD: Tensor
    ) -> Tensor:
        """See Backend. The page table's length says into how many splits long rows may be cut."""
        config = self._transformer.config
        num_rows, table_length = rows.page_table_RB.shape
        workspace = AttentionWorkspace(
            num_rows,
            num_splits_for(table_length),
            config.diff_block_size,
            config.n_head,
            config.head_dim,
            torch.device(token_RC.device),
        )
        return fused.forward(
            self._transformer,
            token_RC,
            rows.block_R,
            rows.page_R,
            rows.page_table_RB,
            rows.key_length_R,
            masked_RC,
            added_LRD,
            self._cache.k_LPCGE,
            self._cache.v_LPCGE,
            workspace,
        )
