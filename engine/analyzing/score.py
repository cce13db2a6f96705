"""How likely each token of a text is, left to right: one row a token, its block masked from the token on.

Scores of complete blocks are looked for in the engine's cache and offered there. Without a cache the same code computes
every position, which is what cached scores are tested against.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from ..analysis import Scores, ScoreTokens
from ..config import ModelConfig
from ..errors import NonFiniteLogits
from ..runner.text_passes import Readable, TextRow, TokenScore
from ..scheduling import PageLease
from .texts import (
    CleanText,
    Slices,
    Tools,
    check_text,
    keys_of,
    make_row,
    num_blocks_of,
    on_pages,
    read_behind,
    require_finite,
)


def start_scores(analysis: ScoreTokens, tools: Tools) -> Slices:
    """The generator of an analysis; raises InvalidRequest for what can never be served."""
    token_ids, config = tuple(analysis.token_ids), tools.config
    check_text(token_ids, config, name="token_ids")
    # What the last token stands on; the blocks before it are read clean.
    num_clean = max(len(token_ids) - 1, 0) // config.diff_block_size
    # Also where all is cached: what is refused must not depend on who came before.
    tools.lending.check_fits(num_clean, 1, "token_ids")
    return _score(_ScoredText(token_ids, analysis.num_logprobs, tools), num_clean, tools)


def _score(text: _ScoredText, num_clean: int, tools: Tools) -> Slices:
    text.look_up()
    if not text.num_missing:
        return text.result()

    def work(lease: PageLease) -> Slices:
        yield from CleanText(text.token_ids, lease, tools.passes).seal_all()
        while text.num_missing:
            if not (yield from read_behind(_launches(text, lease, tools))):
                # All that is left is promised by other analyses. No circle: whoever waits has computed and released all
                # that it had promised.
                yield
        return text.result()

    keys, num_rows = text.keys[:num_clean], min(tools.passes.max_rows, text.num_missing)
    try:
        return (yield from on_pages(tools, keys, least_scratch=1, most_scratch=num_rows, work=work))
    except NonFiniteLogits:
        # The cause may be on a shared page, which on_pages has just spoiled; scores computed on it are no better.
        tools.score_cache.forget(text.keys)
        raise
    finally:
        text.end()


class _ScoredText:
    """A text and its scores as they come: from the cache, or computed and offered there when a block is complete."""

    def __init__(self, token_ids: tuple[int, ...], num_logprobs: int, tools: Tools) -> None:
        self.token_ids = token_ids
        self.num_logprobs = num_logprobs
        self._block_size = tools.config.diff_block_size
        num_blocks = num_blocks_of(len(token_ids), tools.config)
        self.keys = keys_of(token_ids, num_blocks, tools.config)
        """Of the complete blocks."""
        self._cache = tools.score_cache
        self._scores: dict[int, TokenScore] = {}
        self._left = [block for block in range(num_blocks) if self._positions(block)]
        """Blocks that are neither found nor being computed for this text."""

    @property
    def num_missing(self) -> int:
        """Positions without a score."""
        return max(len(self.token_ids) - 1, 0) - len(self._scores)

    def look_up(self) -> None:
        """Take what the cache has."""
        self._left = [block for block in self._left if not self._is_found(block)]

    def claim(self) -> Iterator[int]:
        """Positions to compute for this text now, in order.

        A block is looked for when its first position's turn comes, since other analyses may have added it meanwhile. It
        is left for a later call while one of them computes it.
        """
        for block in tuple(self._left):
            key = self._key(block)
            if self._is_found(block):
                self._left.remove(block)
            elif key is None or not self._cache.is_promised(key, self.num_logprobs):
                if key is not None:
                    self._cache.promise(key, self.num_logprobs, by=self)
                self._left.remove(block)
                yield from self._positions(block)

    def take(self, positions: list[int], scores: list[TokenScore]) -> None:
        """Take computed scores; of each block they come in order."""
        for position, score in zip(positions, scores, strict=True):
            self._scores[position] = score
            if (position + 1) % self._block_size == 0:
                self._offer(position // self._block_size)

    def end(self) -> None:
        """Promise nothing any more."""
        for key in self.keys:
            self._cache.release(key, by=self)

    def result(self) -> Scores:
        """All scores; raises NonFiniteLogits."""
        found = [self._scores[position] for position in range(1, len(self.token_ids))]
        for position, score in enumerate(found, start=1):
            require_finite(math.isfinite(score.logprob), f"position {position}")
        is_there = len(self.token_ids) > 0
        return Scores(
            logprobs=((None,) if is_there else ()) + tuple(score.logprob for score in found),
            top_logprobs=(((),) if is_there else ()) + tuple(score.top for score in found),
        )

    def _positions(self, block: int) -> range:
        # Nothing precedes the first token, so it has no score.
        return range(max(block * self._block_size, 1), min((block + 1) * self._block_size, len(self.token_ids)))

    def _key(self, block: int) -> bytes | None:
        """None for a block that is not complete."""
        return self.keys[block] if block < len(self.keys) else None

    def _is_found(self, block: int) -> bool:
        key = self._key(block)
        found = None if key is None else self._cache.find(key, self.num_logprobs)
        if found is not None:
            self._scores.update(zip(self._positions(block), found, strict=True))
        return found is not None

    def _offer(self, block: int) -> None:
        scores, key = [self._scores[position] for position in self._positions(block)], self.keys[block]
        if all(math.isfinite(score.logprob) for score in scores):
            self._cache.add(key, self.num_logprobs, scores)
        self._cache.release(key, by=self)


@dataclass(frozen=True, slots=True)
class _LaunchedScores:
    """Scores of one pass on their way to the host."""

    text: _ScoredText
    positions: list[int]
    scores: Readable[TokenScore]

    def read(self) -> list[int]:
        """Give the text its scores, and return the positions."""
        self.text.take(self.positions, self.scores.read())
        return self.positions


def _launches(text: _ScoredText, lease: PageLease, tools: Tools) -> Iterator[_LaunchedScores]:
    """A pass for as many tokens as there are scratch pages."""
    block_size, claimed = tools.config.diff_block_size, text.claim()
    while positions := list(islice(claimed, len(lease.scratch_page_ids))):
        rows = [
            score_row(text.token_ids, position, (*lease.page_ids[: position // block_size], scratch), tools.config)
            for position, scratch in zip(positions, lease.scratch_page_ids, strict=False)
        ]
        hidden_RCD = tools.passes.hidden(rows)
        # lm_head is as wide as the vocabulary: it sees one position a row.
        hidden_MD = tools.passes.at(hidden_RCD, [(row, p % block_size) for row, p in enumerate(positions)])
        target_ids = [text.token_ids[position] for position in positions]
        scores = tools.passes.scores(hidden_MD, target_ids, num_logprobs=text.num_logprobs)
        tools.score_cache.count_computed(len(positions))
        yield _LaunchedScores(text, positions, scores)


def score_row(token_ids: tuple[int, ...], position: int, page_ids: tuple[int, ...], config: ModelConfig) -> TextRow:
    """The row that scores a position: its block masked from there to the block's end, or to the context's."""
    block = position // config.diff_block_size
    start = block * config.diff_block_size
    end = min(start + config.diff_block_size, config.block_size)
    ids = (*token_ids[start:position], *[config.mask_token_id] * (end - position))
    return make_row(config, block, ids, page_ids, end)
