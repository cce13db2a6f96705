"""The rows of a text whose continuation is masked at random, on pages of its own for each sample.

Knows the block grid and page ids. Must not know tensors: everything here is arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..config import ModelConfig
from ..runner.text_passes import TextRow
from ..scheduling import PageLease
from .texts import make_row, num_blocks_of

Mask = tuple[int, ...]
"""Masked tokens of a continuation, counted from its first, ascending; at least one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NoisyRow:
    """One block of one sample."""

    row: TextRow
    sample: int
    offsets: tuple[int, ...]
    """Masked positions of the continuation in the block, counted from its start."""
    factor: float
    """The continuation's length over the sample's number of masked tokens."""
    is_unconditional: bool
    """It guides the row before it: the same with every token of the prompt masked."""


class NoisyText:
    """A prompt and its continuation. Complete blocks of the prompt are clean, and the same for all samples.

    Scratch pages are, in order: the prompt's complete blocks with every token masked, if guided; then for each sample
    at once, a set of pages: its blocks from the first with a token of the continuation on, once or, if guided, twice.
    """

    def __init__(
        self, prompt: tuple[int, ...], continuation: tuple[int, ...], config: ModelConfig, *, is_guided: bool
    ) -> None:
        self.token_ids = prompt + continuation
        self.block_size = config.diff_block_size
        self.is_guided = is_guided
        self.num_copies = 2 if is_guided else 1
        """Rows of one block of one sample."""
        self.num_clean = len(prompt) // config.diff_block_size
        self._num_prompt = len(prompt)
        self._num_noisy = num_blocks_of(len(self.token_ids), config) - self.num_clean
        self._config = config

    @property
    def _num_shared(self) -> int:
        return self.num_clean if self.is_guided else 0

    def num_scratch(self, num_page_sets: int) -> int:
        """Scratch pages for so many samples at once."""
        return self._num_shared + num_page_sets * self.num_copies * self._num_noisy

    def num_page_sets(self, num_scratch: int) -> int:
        """How many samples at once so many scratch pages are for."""
        return (num_scratch - self._num_shared) // (self.num_copies * self._num_noisy)

    def num_at_once(self, max_rows: int) -> int:
        """Samples that fill a pass; 1 where one takes several."""
        return max(max_rows // (self.num_copies * self._num_noisy), 1)

    def unconditional_prompt(self, scratch_page_ids: Sequence[int]) -> list[TextRow]:
        """Rows that write the masked blocks which all samples share."""
        masks = [self._config.mask_token_id] * self.block_size
        return [
            make_row(self._config, block, masks, scratch_page_ids[: block + 1], (block + 1) * self.block_size)
            for block in range(self._num_shared)
        ]

    def rows(self, sample: int, mask: Mask, page_set: int, lease: PageLease) -> Iterator[NoisyRow]:
        """A sample's rows in order, the guiding one behind each. Behind the last masked token nothing is asked."""
        scratch, shared = lease.scratch_page_ids, self._num_shared
        start = shared + page_set * self.num_copies * self._num_noisy
        own, other = scratch[start : start + self._num_noisy], scratch[start + self._num_noisy :]
        positions = {self._num_prompt + index for index in mask}
        without_prompt = positions.union(range(self._num_prompt))
        factor = (len(self.token_ids) - self._num_prompt) / len(mask)
        for block in range(self.num_clean, max(positions) // self.block_size + 1):
            num_own = block - self.num_clean + 1
            offsets = tuple(p % self.block_size for p in self._range(block) if p in positions)
            copies = [(positions, (*lease.page_ids[: self.num_clean], *own[:num_own]))]
            if self.is_guided:
                copies.append((without_prompt, (*scratch[:shared], *other[:num_own])))
            for number, (masked, page_ids) in enumerate(copies):
                yield NoisyRow(
                    row=self._row(block, masked, page_ids),
                    sample=sample,
                    offsets=offsets,
                    factor=factor,
                    is_unconditional=number == 1,
                )

    def _range(self, block: int) -> range:
        return range(block * self.block_size, min((block + 1) * self.block_size, len(self.token_ids)))

    def _row(self, block: int, masked: set[int], page_ids: tuple[int, ...]) -> TextRow:
        positions = self._range(block)
        ids = (self._config.mask_token_id if p in masked else self.token_ids[p] for p in positions)
        return make_row(self._config, block, ids, page_ids, positions.stop)
