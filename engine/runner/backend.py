"""Two ways to run the heavy parts of a pass: plain torch anywhere, Triton kernels on a GPU.

Shapes: R rows, C canvas positions, K picks a row, D model width, L layers, N lanes, W padded vocabulary.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..decoding import guidance, policies, sampler, steering
from ..decoding.policies import Picks
from ..decoding.sampler import Adjustment, Choice, Chosen
from ..model.attention import paged_attention
from ..model.transformer import Transformer
from .batch import RowTensors
from .kv_cache import KVCache
from .lanes import Lanes


class Backend(Protocol):
    """The layers over pages, and the choice of tokens from their logits."""

    is_capturable: bool
    """Its work may go into a CUDA graph: shapes follow from the row tensors alone, and the host waits for nothing."""

    def layers(
        self, rows: RowTensors, token_RC: Tensor, position_RC: Tensor, masked_RC: Tensor, added_LRD: Tensor
    ) -> Tensor:
        """Hidden states hidden_RCD; writes the rows' pages. `added_LRD` (float32) is added at masked positions."""

    def guide(self, logits_RCW: Tensor, masked_RC: Tensor, shadow_R: Tensor, guidance_R: Tensor) -> None:
        """Make the logits of guided rows guided ones, in place, as `guidance.guide` does."""

    def confidence(
        self, logits_RCW: Tensor, masked_RC: Tensor, position_RC: Tensor, adjustment: Adjustment
    ) -> tuple[Tensor, Tensor, Tensor]:
        """confidence_RC, entropy_RC and is_finite_RC, as `sampler.confidence` defines them."""

    def pick(
        self,
        confidence_RC: Tensor,
        entropy_RC: Tensor,
        is_finite_RC: Tensor,
        masked_RC: Tensor,
        position_RC: Tensor,
        quota_R: Tensor,
        lane_R: Tensor,
        policy_N: Tensor,
        parameter_N: Tensor,
        num_picks: int,
    ) -> Picks:
        """The positions that rows commit, as `policies.pick` defines them."""

    def choose(
        self,
        logits_RCW: Tensor,
        position_RC: Tensor,
        pick_RK: Tensor,
        is_commit_RK: Tensor,
        adjustment: Adjustment,
        choice: Choice,
        seed_N: Tensor,
        choice_index_N: Tensor,
    ) -> Chosen:
        """Tokens of the picks that are commits, as `sampler.choose` defines them."""

    def pack(
        self,
        picks: Picks,
        chosen: Chosen,
        is_commit_RK: Tensor,
        lane_R: Tensor,
        draft_position_N: Tensor,
        draft_token_N: Tensor,
    ) -> Tensor:
        """What the host reads of a pass, as `policies.pack` defines it."""

    def commit(
        self,
        lanes: Lanes,
        lane_R: Tensor,
        position_RC: Tensor,
        hidden_RCD: Tensor,
        pick_RK: Tensor,
        token_RK: Tensor,
        is_commit_RK: Tensor,
    ) -> None:
        """Write the commits into the lanes, as `Lanes.commit` does."""


class PlainBackend:
    """The slow twin: the model's own modules, any configuration, any device."""

    # It could be captured, but gathers every page of the table for every row, however short the row is.
    is_capturable = False
    guide = staticmethod(guidance.guide)
    confidence = staticmethod(sampler.confidence)
    pick = staticmethod(policies.pick)
    choose = staticmethod(sampler.choose)
    pack = staticmethod(policies.pack)
    commit = staticmethod(Lanes.commit)

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
