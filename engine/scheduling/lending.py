"""Pages lent to work that is no sequence: an analysis of a text.

Knows pages, prefix keys, who borrows, and which sequence is held up for want of pages. Must not know what is written
on a page. A lease is all that its borrower needs, so nobody holds pages while waiting for more, and every lease ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator

from ..errors import RequestTooLarge
from .page_pool import PagePool
from .prefix_index import PrefixIndex
from .sequence import Sequence


class PageLease:
    """Pages of a text's leading complete blocks, in order, and scratch pages. Give it back in a `finally`."""

    def __init__(
        self, lending: PageLending, keys: list[bytes], found: list[int], new: list[int], scratch: list[int]
    ) -> None:
        self.page_ids = found + new
        """Page of each block; `seal` may exchange one for another of equal content, so read them for each pass."""
        self.scratch_page_ids = tuple(scratch)
        """Pages for what nobody else may read."""
        self.num_sealed = len(found)
        """Leading blocks whose final keys and values are on their pages: these are not to be written."""
        self._lending = lending
        self._keys = keys

    def seal(self, block: int) -> None:
        """The device has been given the block to write: count it, and offer its page to others."""
        assert block == self.num_sealed, f"block {block} seals after {self.num_sealed} blocks"
        self.num_sealed += 1
        self.page_ids[block] = self._lending.offer(self._keys[block], self.page_ids[block])

    def spoil(self) -> None:
        """What is on the text's pages is not to be trusted: nobody is to find them any more."""
        self._lending.withdraw(self.page_ids)

    def give_back(self) -> None:
        """End it; sealed pages stay cached."""
        self._lending.take_back(self)


class PageLending:
    """Lends pages of a pool, first come first served, in turn with the admission of sequences.

    While both sides lack pages, one borrower and one sequence are served by turns, so neither waits for ever.
    """

    def __init__(self, pool: PagePool, prefix_index: PrefixIndex, *, share_prefixes: bool) -> None:
        self._pool = pool
        self._prefix_index = prefix_index
        self._share_prefixes = share_prefixes
        self._line: deque[object] = deque()  # who waits for pages
        self._leases: list[PageLease] = []
        self._held_up: Sequence | None = None
        self._is_after_sequence = False

    @property
    def is_in_use(self) -> bool:
        """True while pages are lent or somebody waits for some."""
        return bool(self._leases or self._line)

    @property
    def has_turn(self) -> bool:
        """True while a borrower comes before the next sequence."""
        return self._is_after_sequence and bool(self._line)

    @property
    def page_ids(self) -> Iterator[int]:
        """Every page of every lease; a page of two leases comes twice."""
        for lease in self._leases:
            yield from (*lease.page_ids, *lease.scratch_page_ids)

    def admitted(self) -> None:
        """A sequence was given its pages: whoever waits here comes next."""
        self._is_after_sequence = True

    def hold_up(self, sequence: Sequence | None) -> None:
        """Note which sequence would have a lane and lacks pages."""
        self._held_up = sequence

    def check_fits(self, num_blocks: int, num_scratch: int, param: str) -> None:
        """Raise RequestTooLarge, for the field `param`, if so many pages will never be there."""
        if num_blocks + num_scratch > self._pool.num_pages:
            raise RequestTooLarge(
                f"{param} needs {num_blocks + num_scratch} pages at once and the engine has {self._pool.num_pages}; "
                "shorten it, or raise num_pages",
                param=param,
            )

    def borrow(self, keys: list[bytes], *, least_scratch: int, most_scratch: int) -> Generator[None, None, PageLease]:
        """Wait, yielding, until all pages can be had at once; those found by prefix `keys` are shared.

        `least_scratch` pages must have passed `check_fits`; up to `most_scratch` come if there are more.
        """
        place = object()
        self._line.append(place)
        try:
            while not self._is_next(place) or (lease := self._take(keys, least_scratch, most_scratch)) is None:
                yield
        finally:
            self._line.remove(place)
        return lease

    def offer(self, key: bytes, page_id: int) -> int:
        """Let others find a lent page; returns the page to use, which is another where its prefix has one already."""
        if not self._share_prefixes:
            return page_id
        shared = self._prefix_index.find(key)
        if shared is None:
            self._prefix_index.register(key, page_id)
            return page_id
        # As sequences do: a holder of a block's indexed page holds the indexed pages before it.
        self._pool.hold(shared)
        self._pool.release(page_id)
        return shared

    def withdraw(self, page_ids: Iterable[int]) -> None:
        """Let nobody find these pages any more."""
        for page_id in page_ids:
            self._prefix_index.forget(page_id)

    def take_back(self, lease: PageLease) -> None:
        """End a lease."""
        self._leases.remove(lease)
        self._pool.release_all(lease.page_ids)
        self._pool.release_all(lease.scratch_page_ids)

    def check_integrity(self) -> None:
        """Assert that what leases write is theirs alone."""
        for lease in self._leases:
            for page_id in (*lease.page_ids[lease.num_sealed :], *lease.scratch_page_ids):
                assert self._pool.num_holders(page_id) == 1, f"lent page {page_id} is written and shared"
                assert page_id not in self._prefix_index, f"lent page {page_id} is written and indexed"

    def _is_next(self, place: object) -> bool:
        is_held_up = self._held_up is not None and self._held_up.is_waiting
        return self._line[0] is place and (self._is_after_sequence or not is_held_up)

    def _take(self, keys: list[bytes], least_scratch: int, most_scratch: int) -> PageLease | None:
        found = self._prefix_index.longest_match(keys) if self._share_prefixes else []
        num_new = len(keys) - len(found)
        num_left = self._pool.num_available - sum(map(self._pool.is_cached, found)) - num_new
        if num_left < least_scratch:
            return None
        # Hold what was found before allocating: allocation evicts cached pages.
        for page_id in found:
            self._pool.hold(page_id)
        new = [self._pool.allocate() for _ in range(num_new)]
        scratch = [self._pool.allocate() for _ in range(min(most_scratch, num_left))]
        lease = PageLease(self, keys, found, new, scratch)
        self._leases.append(lease)
        self._is_after_sequence = False
        return lease
