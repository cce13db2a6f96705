"""Pages of the KV cache: free, cached or held.

Knows page ids, how many sequences hold each and which are indexed. Must not know what a page
contains or who holds it. Every wrong call is a mistake of ours, so everything here asserts.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable

from .prefix_index import PrefixIndex


class PagePool:
    """Hands out pages and takes them back; free + cached + held is always `num_pages`.

    - free: nobody holds it and it means nothing
    - cached: nobody holds it, but the prefix index offers it; the least recently used go first
    - held: one or more sequences have it in their page table
    """

    def __init__(self, num_pages: int, prefix_index: PrefixIndex) -> None:
        assert num_pages >= 1, f"a pool of {num_pages} pages"
        self.num_pages = num_pages
        self._prefix_index = prefix_index
        self._num_holders = [0] * num_pages
        self._free = deque(range(num_pages))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._num_held = 0

    @property
    def num_free(self) -> int:
        """Pages that mean nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages that nobody holds and the prefix index offers."""
        return len(self._cached)

    @property
    def num_held(self) -> int:
        """Pages in at least one page table."""
        return self._num_held

    @property
    def num_available(self) -> int:
        """Pages that `allocate` could hand out: free and cached ones."""
        return len(self._free) + len(self._cached)

    def is_cached(self, page_id: int) -> bool:
        """True if nobody holds the page and the prefix index offers it."""
        return page_id in self._cached

    def num_holders(self, page_id: int) -> int:
        """Page tables that have the page."""
        return self._num_holders[page_id]

    def allocate(self) -> int:
        """A page with one holder: a free one, else the least recently used cached one, which is forgotten."""
        assert self.num_available, f"all {self.num_pages} pages are held"
        if self._free:
            page_id = self._free.popleft()
        else:
            page_id, _ = self._cached.popitem(last=False)
            self._prefix_index.forget(page_id)
        self._num_holders[page_id] = 1
        self._num_held += 1
        return page_id

    def hold(self, page_id: int) -> None:
        """Add a holder to a held page, or take up a cached one."""
        if self._num_holders[page_id] == 0:
            assert page_id in self._cached, f"page {page_id} is free: it holds nothing to share"
            del self._cached[page_id]
            self._num_held += 1
        self._num_holders[page_id] += 1

    def release(self, page_id: int) -> None:
        """Drop one holder. After the last the page is cached if it is indexed, free if not."""
        assert self._num_holders[page_id] > 0, f"page {page_id} is released but nobody holds it"
        self._num_holders[page_id] -= 1
        if self._num_holders[page_id] == 0:
            self._num_held -= 1
            if page_id in self._prefix_index:
                self._cached[page_id] = None
            else:
                self._free.append(page_id)

    def release_all(self, page_ids: Iterable[int]) -> None:
        """Drop one holder of each page of a page table, given in block order."""
        # Last block first: whoever holds a block holds its parents too, so a parent is always
        # released after its children and evicted after them. No child is stranded in the cache.
        for page_id in reversed(tuple(page_ids)):
            self.release(page_id)

    def check_integrity(self) -> None:
        """Assert that every page is in exactly one of the three states and that the counts are right."""
        held = {page_id for page_id, holders in enumerate(self._num_holders) if holders}
        free, cached = set(self._free), set(self._cached)
        assert min(self._num_holders) >= 0, "a page has fewer than no holders"
        assert len(free) == len(self._free), "a page is free twice"
        assert self._num_held == len(held)
        assert self.num_free + self.num_cached + self.num_held == self.num_pages, (
            f"{self.num_free} free + {self.num_cached} cached + {self.num_held} held is not {self.num_pages}"
        )
        assert free | cached | held == set(range(self.num_pages)), "a page is in no state"
        self._prefix_index.check_integrity()
        indexed = self._prefix_index.page_ids
        assert cached <= indexed, f"cached but not indexed: {cached - indexed}"
        assert not free & indexed, f"free but indexed: {free & indexed}"
