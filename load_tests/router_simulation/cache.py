"""One replica's pages: held by running requests, or cached until they are needed, least recently used first.

Pages come in groups, so that a request costs a few operations and not one a page: the blocks of a system prompt are one
group, those that only one request has are another. A group is evicted from its last page on, as the engine does.
"""

from __future__ import annotations

import random
from collections import OrderedDict

from .workload import SimRequest, SystemPrompts

_PRIVATE_PAGES = 7
"""Mean number of pages that a request leaves behind besides the system prompt: 4 of its own prompt, 3 of its answer."""


class PageCache:
    """Who has which pages. Negative groups belong to one request and are never looked up."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._num_held = 0
        self._num_cached = 0
        self._sizes: dict[int, int] = {}  # of system prompts: pages that are there, held or cached
        self._holders: dict[int, int] = {}
        self._unused: OrderedDict[int, int] = OrderedDict()  # group -> pages, least recently used first
        self._num_groups = 0
        self.changed: set[int] = set()
        """System prompts whose pages came or went since somebody cleared it."""

    @property
    def num_available(self) -> int:
        """Free and cached pages."""
        return self.num_pages - self._num_held

    @property
    def groups(self) -> set[int]:
        """System prompts of which something is there."""
        return set(self._sizes)

    def num_found(self, group: int | None) -> int:
        """Pages of a system prompt that are there."""
        return 0 if group is None else self._sizes.get(group, 0)

    def can_hold(self, request: SimRequest) -> bool:
        """True if all pages that it will ever need are available."""
        return self._num_needed(request) <= self.num_available

    def take(self, request: SimRequest) -> int:
        """Hold a request's pages, evicting what has to go. Returns how many blocks of its prompt it found."""
        group, found = request.system_prompt, 0
        if group is not None:
            found = self._sizes.get(group, 0)
            if group in self._unused:
                self._num_cached -= self._unused.pop(group)
                self._num_held += found
            self._holders[group] = self._holders.get(group, 0) + 1
            self._num_held += request.num_shared_blocks - found
            self._set_size(group, request.num_shared_blocks)
        self._num_held += self._num_private(request)
        self._evict()
        return found

    def give_back(self, request: SimRequest) -> None:
        """Stop holding them: they stay cached."""
        group = request.system_prompt
        if group is not None:
            self._holders[group] -= 1
            if not self._holders[group]:
                del self._holders[group]
                size = self._sizes[group]
                self._num_held -= size
                self._keep(group, size)
        # The last block is not sealed, so nothing of it stays.
        self._num_held -= self._num_private(request)
        self._num_groups += 1
        self._keep(-self._num_groups, self._num_private(request) - 1)
        self._evict()

    def warm_up(self, rng: random.Random, system: SystemPrompts) -> None:
        """What it would hold after long service of randomly chosen requests."""
        draw = system.chooser()
        for _ in range(2 * self.num_pages // _PRIVATE_PAGES):
            group = draw(rng)
            self._num_cached -= self._unused.pop(group, 0)
            self._set_size(group, system.num_blocks)
            self._keep(group, system.num_blocks)
            self._num_groups += 1
            self._keep(-self._num_groups, _PRIVATE_PAGES)
            self._evict()

    def _num_private(self, request: SimRequest) -> int:
        return request.num_prompt_blocks - request.num_shared_blocks + request.num_blocks

    def _num_needed(self, request: SimRequest) -> int:
        is_held = request.system_prompt in self._holders
        return self._num_private(request) + (0 if is_held else request.num_shared_blocks)

    def _keep(self, group: int, num_pages: int) -> None:
        if num_pages:
            self._unused[group] = num_pages
            self._num_cached += num_pages

    def _set_size(self, group: int, size: int) -> None:
        if self._sizes.get(group, 0) != size:
            self.changed.add(group)
            if size:
                self._sizes[group] = size
            else:
                del self._sizes[group]

    def _evict(self) -> None:
        excess = self._num_held + self._num_cached - self.num_pages
        while excess > 0:
            group, size = next(iter(self._unused.items()))
            gone = min(size, excess)
            excess -= gone
            self._num_cached -= gone
            if gone == size:
                del self._unused[group]
            else:
                self._unused[group] = size - gone
            if group >= 0:
                self._set_size(group, size - gone)
