"""Which concepts are active at each token of a clean text, and what each gives to that token's logit."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..analysis import Inspection, InspectTokens, TokenConcepts
from ..runner.text_passes import Readable
from ..scheduling import PageLease
from .texts import (
    CleanText,
    Slices,
    Tools,
    check_text,
    keys_of,
    num_blocks_of,
    on_pages,
    places_of,
    read_behind,
    require_finite,
)


def start_inspection(analysis: InspectTokens, tools: Tools) -> Slices:
    """The generator of an analysis; raises InvalidRequest for what can never be served."""
    token_ids, config = tuple(analysis.token_ids), tools.config
    check_text(token_ids, config, name="token_ids")
    num_blocks = num_blocks_of(len(token_ids), config)
    keys = keys_of(token_ids, num_blocks, config)
    tools.lending.check_fits(len(keys), 1, "token_ids")
    return _inspect(token_ids, analysis.top_k, num_blocks, keys, tools)


def _inspect(token_ids: tuple[int, ...], top_k: int, num_blocks: int, keys: list[bytes], tools: Tools) -> Slices:
    passes, block_size = tools.passes, tools.config.diff_block_size

    def launches(text: CleanText) -> Iterator[Readable[TokenConcepts]]:
        for blocks, hidden_RCD in text.slices(range(num_blocks)):
            places = places_of(blocks, range(len(token_ids)), block_size)
            ids = [token_ids[blocks[row] * block_size + offset] for row, offset in places]
            yield passes.top_concepts(passes.at(hidden_RCD, places), ids, top_k)

    def work(lease: PageLease) -> Slices:
        tokens = yield from read_behind(launches(CleanText(token_ids, lease, passes)))
        for position, token in enumerate(tokens):
            weights = [concept.weight for concept in (*token.known, *token.discovered)]
            require_finite(all(map(math.isfinite, weights)), f"position {position}")
        return Inspection(tokens=tuple(tokens))

    if top_k == 0:
        return Inspection(tokens=(TokenConcepts(known=(), discovered=()),) * len(token_ids))
    most = min(num_blocks, passes.max_rows)
    return (yield from on_pages(tools, keys, least_scratch=1, most_scratch=most, work=work))
