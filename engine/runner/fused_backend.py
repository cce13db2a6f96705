"""The fast way to run the heavy parts of a pass. Imported only where Triton is installed."""

from __future__ import annotations

import torch
from torch import Tensor

from ..decoding.kernels.choose import choose
from ..decoding.kernels.commit import commit
from ..decoding.kernels.confidence import confidence
from ..decoding.kernels.guide import guide
from ..decoding.kernels.pack import pack
from ..decoding.kernels.pick import pick
from ..model import fused
from ..model.attention import num_splits_for
from ..model.kernels.attention import AttentionWorkspace
from ..model.transformer import Transformer
from .batch import RowTensors
from .kv_cache import KVCache
from .lanes import Lanes


class FusedBackend:
    """Triton kernels for the released configuration (`fused_support.is_supported`); see Backend for shapes."""

    is_capturable = True
    guide = staticmethod(guide)
    confidence = staticmethod(confidence)
    pick = staticmethod(pick)
    choose = staticmethod(choose)
    pack = staticmethod(pack)

    def __init__(self, transformer: Transformer, cache: KVCache) -> None:
        self._transformer = transformer
        self._cache = cache

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

    @staticmethod
    def commit(
        lanes: Lanes,
        lane_R: Tensor,
        position_RC: Tensor,
        hidden_RCD: Tensor,
        pick_RK: Tensor,
        token_RK: Tensor,
        is_commit_RK: Tensor,
    ) -> None:
        """See Backend."""
        commit(
            lane_R,
            position_RC,
            hidden_RCD,
            pick_RK,
            token_RK,
            is_commit_RK,
            token_ids_NS=lanes.token_ids_NS,
            present_NV=lanes.present_NV,
            is_end_NV=lanes.is_end_NV,
            hidden_NCD=lanes.hidden_NCD,
            num_committed_N=lanes.num_committed_N,
            end_N=lanes.end_N,
            limit_N=lanes.limit_N,
            eos_token_id=lanes.config.eos_token_id,
        )
