"""One vector for a text: features of its clean positions, averaged, or of the first or last one."""

from __future__ import annotations

import math

from torch import Tensor

from ..analysis import Embedding, EmbedTokens
from ..scheduling import PageLease
from .texts import CleanText, Slices, Tools, check_text, keys_of, num_blocks_of, on_pages, places_of, require_finite


def start_embedding(analysis: EmbedTokens, tools: Tools) -> Slices:
    """The generator of an analysis; raises InvalidRequest for what can never be served."""
    token_ids, config = tuple(analysis.token_ids), tools.config
    check_text(token_ids, config, name="token_ids")
    # A position sees nothing of later blocks.
    num_blocks = 1 if analysis.pooling == "first" else num_blocks_of(len(token_ids), config)
    keys = keys_of(token_ids, num_blocks, config)
    tools.lending.check_fits(len(keys), 1, "token_ids")
    return _embed(analysis, token_ids, num_blocks, keys, tools)


def _embed(
    analysis: EmbedTokens, token_ids: tuple[int, ...], num_blocks: int, keys: list[bytes], tools: Tools
) -> Slices:
    def work(lease: PageLease) -> Slices:
        text = CleanText(token_ids, lease, tools.passes)
        wanted = _wanted(analysis, len(token_ids))
        first = 0 if analysis.pooling == "mean" else min(lease.num_sealed, num_blocks - 1)
        total_D: Tensor | None = None
        for blocks, hidden_RCD in text.slices(range(first, num_blocks)):
            places = places_of(blocks, wanted, tools.config.diff_block_size)
            if places:
                total_D = tools.passes.add_features(total_D, tools.passes.at(hidden_RCD, places), analysis.kind)
            yield
        assert total_D is not None
        vector = tuple(tools.passes.vector(total_D, len(wanted)).read())
        require_finite(all(map(math.isfinite, vector)), "the text")
        return Embedding(vector=vector)

    most = min(num_blocks, tools.passes.max_rows)
    return (yield from on_pages(tools, keys, least_scratch=1, most_scratch=most, work=work))


def _wanted(analysis: EmbedTokens, num_tokens: int) -> range:
    match analysis.pooling:
        case "mean":
            return range(num_tokens)
        case "first":
            return range(1)
        case "last":
            return range(num_tokens - 1, num_tokens)
