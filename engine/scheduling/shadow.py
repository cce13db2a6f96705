"""The unconditional copy of a guided sequence: a second lane and page table that follow the first.

Its tokens are its sequence's, with masks in place of the prompt. A copy has no life of its own: it is admitted,
stepped and preempted with its sequence. Knows lanes, pages and alphas of one copy. Must not know rows, pools or queues.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True, eq=False)
class Shadow:
    """Where the copy runs, and which of its pages hold what its next row may attend to.

    The masks in place of the prompt are injected like all others, and every later block attends to them. So its pages
    belong to it alone, are never indexed, and all of them are stale once a steering schedule ends.
    """

    cutoffs: tuple[int, ...] = ()
    """Numbers of commits from which on some injection no longer acts; ascending."""

    lane: int | None = field(init=False, default=None)
    page_ids: list[int] = field(init=False, default_factory=list)
    """As long as its sequence's."""
    num_sealed: int = field(init=False, default=0)
    """Leading blocks whose keys and values are on their pages, computed with the alphas in force."""
    num_prefill_blocks: int = field(init=False, default=0)
    """Blocks that were finished when the lane was given or when alphas last changed: these are prefilled."""
    _num_passed: int = field(init=False, default=0)
    """Cutoffs that the pages have behind them."""

    @property
    def is_prefilling(self) -> bool:
        """True while blocks are not on their pages, or stale there."""
        return self.num_sealed < self.num_prefill_blocks

    def take_lane(self, lane: int, page_ids: list[int], num_committed: int) -> None:
        """Start to run, with pages for every block up to the canvas, none of them written."""
        self.lane = lane
        self.page_ids = page_ids
        self._num_passed = bisect_right(self.cutoffs, num_committed)
        self._rewrite(len(page_ids) - 1)

    def leave_lane(self) -> None:
        """Stop running."""
        self.lane = None
        self.page_ids = []
        self._rewrite(0)

    def may_pass_cutoff(self, num_committed: int, most: int) -> bool:
        """True if alphas differ between these numbers of commits, so that it matters which of them it will be."""
        return bisect_right(self.cutoffs, num_committed) != bisect_right(self.cutoffs, most)

    def follow(self, num_committed: int, num_finished: int) -> None:
        """Its sequence has so many commits and finished blocks now; if an alpha has changed, all are written again."""
        num_passed = bisect_right(self.cutoffs, num_committed)
        if num_passed != self._num_passed:
            self._num_passed = num_passed
            self._rewrite(num_finished)

    def _rewrite(self, num_blocks: int) -> None:
        self.num_sealed = 0
        self.num_prefill_blocks = num_blocks
