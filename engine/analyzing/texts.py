"""What the analyses share: checks at the door, a text's rows on borrowed pages, reading one piece of work behind.

Shapes: R rows, C positions of a block, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor

from ..admission import check_token_ids
from ..config import ModelConfig
from ..errors import NonFiniteLogits, PromptTooLong
from ..runner.text_passes import TextPasses, TextRow
from ..scheduling import PageLease, PageLending, prefix_keys
from .score_cache import ScoreCache

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Slices = Generator[None, None, Any]
"""Does a slice of work each time it is asked on, and returns the analysis's result in the end."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What an analysis works with."""

    passes: TextPasses
    lending: PageLending
    score_cache: ScoreCache

    @property
    def config(self) -> ModelConfig:
        """Of the checkpoint."""
        return self.passes.config


def check_text(token_ids: tuple[int, ...], config: ModelConfig, *, name: str, others: int = 0) -> None:
    """Raise InvalidRequest for a text that the checkpoint cannot take, `others` tokens before it counted."""
    # Before the tokens are looked at one by one.
    if others + len(token_ids) > config.block_size:
        before = f" behind {others} others" if others else ""
        raise PromptTooLong(
            f"{name} has {len(token_ids)} tokens{before}; together at most {config.block_size}", param=name
        )
    check_token_ids(token_ids, config, name=name)


def num_blocks_of(num_tokens: int, config: ModelConfig) -> int:
    """Blocks that so many tokens stand in, the last one perhaps not complete."""
    return -(-num_tokens // config.diff_block_size)


def keys_of(token_ids: tuple[int, ...], num_blocks: int, config: ModelConfig) -> list[bytes]:
    """Prefix keys of the first blocks, as many as are complete and no more than `num_blocks`."""
    return prefix_keys(token_ids[: num_blocks * config.diff_block_size], config.diff_block_size)


def make_row(
    config: ModelConfig, block: int, token_ids: Iterable[int], page_ids: Iterable[int], key_length: int
) -> TextRow:
    """A row of a block whose last token ids may be left out where no position exists."""
    ids = tuple(token_ids)
    absent = (config.pad_token_id,) * (config.diff_block_size - len(ids))
    return TextRow(block=block, token_ids=ids + absent, page_ids=tuple(page_ids), key_length=key_length)


def places_of(blocks: Sequence[int], positions: range, block_size: int) -> list[tuple[int, int]]:
    """(row, offset) of the positions that stand in a pass's blocks, one block a row."""
    return [
        (row, position % block_size)
        for row, block in enumerate(blocks)
        for position in range(block * block_size, (block + 1) * block_size)
        if position in positions
    ]


class CleanText:
    """A text as it stands, on the pages that it was lent: its complete blocks are prefilled once, for everybody."""

    def __init__(self, token_ids: tuple[int, ...], lease: PageLease, passes: TextPasses) -> None:
        """The lease has pages for the blocks that are complete and needed, and scratch for one more at least."""
        self._token_ids = token_ids
        self._lease = lease
        self._passes = passes

    def slices(self, blocks: Iterable[int]) -> Iterator[tuple[list[int], Tensor]]:
        """Hidden states of blocks, ascending, a pass at a time: the blocks and hidden_RCD.

        What a block attends to must be sealed, or among the blocks before it.
        """
        left, num_scratch = list(blocks), len(self._lease.scratch_page_ids)
        is_stored = [block < self._lease.num_sealed or block >= len(self._lease.page_ids) for block in left]
        while left:
            size = min(len(left), self._passes.max_rows)
            # A block that is not to be written, or shared, writes scratch.
            while sum(is_stored[:size]) > num_scratch:
                size -= 1
            now, left = left[:size], left[size:]
            is_stored = is_stored[size:]
            yield now, self._run(now)

    def seal_all(self) -> Iterator[None]:
        """Prefill the lease's blocks that are not sealed, a pass at a time."""
        lease = self._lease
        for _ in self.slices(range(lease.num_sealed, len(lease.page_ids))):
            yield

    def _run(self, blocks: list[int]) -> Tensor:
        lease, config = self._lease, self._passes.config
        scratch = iter(lease.scratch_page_ids)
        rows, size = [], config.diff_block_size
        for block in blocks:
            own = lease.page_ids[block] if lease.num_sealed <= block < len(lease.page_ids) else next(scratch)
            end = min((block + 1) * size, len(self._token_ids))
            ids = self._token_ids[block * size : end]
            rows.append(make_row(config, block, ids, (*lease.page_ids[:block], own), end))
        hidden_RCD = self._passes.hidden(rows)
        for block in blocks:
            if lease.num_sealed <= block < len(lease.page_ids):
                lease.seal(block)
        return hidden_RCD


class Launched(Protocol[T_co]):
    """Results on their way to the host."""

    def read(self) -> Sequence[T_co]:
        """The results; waits for the device."""


def read_behind(launches: Iterable[Launched[T]]) -> Generator[None, None, list[T]]:
    """All results of some pieces of work, a slice each.

    Each is read when the next has been launched, so that the device goes on while the host waits.
    """
    results: list[T] = []
    last: Launched[T] | None = None
    for launched in launches:
        if last is not None:
            results += last.read()
        last = launched
        yield
    return results if last is None else [*results, *last.read()]


def require_finite(is_finite: bool, what: str) -> None:
    """Raise NonFiniteLogits unless it is."""
    if not is_finite:
        raise NonFiniteLogits(f"the model gave no finite numbers for {what}; check the checkpoint")


def on_pages(
    tools: Tools, keys: list[bytes], *, least_scratch: int, most_scratch: int, work: Callable[[PageLease], Slices]
) -> Slices:
    """Borrow pages, do the work on them, and give them back however it ends."""
    lease = yield from tools.lending.borrow(keys, least_scratch=least_scratch, most_scratch=most_scratch)
    try:
        return (yield from work(lease))
    except NonFiniteLogits:
        # The cause may be on a shared page. Without this every later text with that prefix would fail.
        lease.spoil()
        raise
    finally:
        lease.give_back()
