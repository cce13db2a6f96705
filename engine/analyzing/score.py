"""How likely each token of a text is, left to right: one row a token, its block masked from the token on."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..analysis import Scores, ScoreTokens
from ..config import ModelConfig
from ..runner.text_passes import Readable, TextRow, TokenScore
from ..scheduling import PageLease
from .texts import CleanText, Slices, Tools, check_text, keys_of, make_row, on_pages, read_behind, require_finite


def start_scores(analysis: ScoreTokens, tools: Tools) -> Slices:
    """The generator of an analysis; raises InvalidRequest for what can never be served."""
    token_ids, config = tuple(analysis.token_ids), tools.config
    check_text(token_ids, config, name="token_ids")
    # What the last token stands on; the blocks before it are read clean.
    num_clean = max(len(token_ids) - 1, 0) // config.diff_block_size
    tools.lending.check_fits(num_clean, 1, "token_ids")
    return _score(analysis, token_ids, keys_of(token_ids, num_clean, config), tools)


def _score(analysis: ScoreTokens, token_ids: tuple[int, ...], keys: list[bytes], tools: Tools) -> Slices:
    if len(token_ids) < 2:
        return _scores([], len(token_ids))
    num_rows = min(tools.passes.max_rows, len(token_ids) - 1)

    def work(lease: PageLease) -> Slices:
        yield from CleanText(token_ids, lease, tools.passes).seal_all()
        launches = _launches(token_ids, lease, tools, analysis.num_logprobs)
        return _scores((yield from read_behind(launches)), len(token_ids))

    return (yield from on_pages(tools, keys, least_scratch=1, most_scratch=num_rows, work=work))


def _launches(
    token_ids: tuple[int, ...], lease: PageLease, tools: Tools, num_logprobs: int
) -> Iterator[Readable[TokenScore]]:
    """A pass for as many tokens as there are scratch pages."""
    at_once, block_size = len(lease.scratch_page_ids), tools.config.diff_block_size
    for start in range(1, len(token_ids), at_once):
        positions = range(start, min(start + at_once, len(token_ids)))
        rows = [
            score_row(token_ids, position, (*lease.page_ids[: position // block_size], scratch), tools.config)
            for position, scratch in zip(positions, lease.scratch_page_ids, strict=False)
        ]
        hidden_RCD = tools.passes.hidden(rows)
        # lm_head is as wide as the vocabulary: it sees one position a row.
        hidden_MD = tools.passes.at(hidden_RCD, [(row, p % block_size) for row, p in enumerate(positions)])
        yield tools.passes.scores(hidden_MD, [token_ids[p] for p in positions], num_logprobs=num_logprobs)


def score_row(token_ids: tuple[int, ...], position: int, page_ids: tuple[int, ...], config: ModelConfig) -> TextRow:
    """The row that scores a position: its block masked from there to the block's end, or to the context's."""
    block = position // config.diff_block_size
    start = block * config.diff_block_size
    end = min(start + config.diff_block_size, config.block_size)
    ids = (*token_ids[start:position], *[config.mask_token_id] * (end - position))
    return make_row(config, block, ids, page_ids, end)


def _scores(found: list[TokenScore], num_tokens: int) -> Scores:
    for position, score in enumerate(found, start=1):
        require_finite(math.isfinite(score.logprob), f"position {position}")
    nothing = num_tokens > 0
    return Scores(
        logprobs=((None,) if nothing else ()) + tuple(score.logprob for score in found),
        top_logprobs=(((),) if nothing else ()) + tuple(score.top for score in found),
    )
