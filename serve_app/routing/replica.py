"""What the router believes of one replica: its last report, aged, and what it has been promised since.

Knows reports, leases and times. Must not know the queue or other replicas.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate

from .messages import Lease, ReplicaReport
from .pass_times import UNMEASURED, PassTimes, num_rows_to_come
from .settings import RoutingSettings

NEVER = float("inf")
_VOID_REPORTS_OF_A_NEW_LIFE = 3
"""So many void reports that follow each other are not late ones: the replica counts from the start again."""


@dataclass(frozen=True, slots=True)
class _OpenLease:
    """A lease that the replica has not answered yet, or whose request it has not begun."""

    request_id: str
    num_pages: int
    expires_s: float
    is_refused: bool = False
    """The replica had no room, whatever its report said: not asked again before the next one."""


class Replica:
    """One replica as the router sees it."""

    def __init__(self, report: ReplicaReport, now_s: float, settings: RoutingSettings) -> None:
        self._settings = settings
        self._leases: dict[str, _OpenLease] = {}
        self._taken: dict[str, _OpenLease] = {}  # by request: taken by the replica, not seen running yet
        self._prefixes: set[bytes] = set()
        self._has_all_prefixes = False
        self._asked_for_prefixes_s = -NEVER
        self._last_void = 0
        self._num_void = 0
        self._points: tuple[tuple[int, float], ...] = ()
        self.pass_times = UNMEASURED
        self.last_leased = 0
        """Number of the last lease it got, of all: whose turn it is among equals."""
        self.opens_s = NEVER
        """When it has room for one more, as far as lanes go; in the past if it has."""
        self.heard_until_s = NEVER
        """When it will have been silent for too long."""
        self.next_expiry_s = NEVER
        """When the next lease times out."""
        self.num_rows = 0
        """Sequences that run there, wait there, or are on their way."""
        self.standing = 0
        """Rises with its rows, and with its last lease's number where rows are equal."""
        self._accept(report, now_s)

    @property
    def id(self) -> str:
        """The replica's name."""
        return self.report.replica_id

    @property
    def num_leases(self) -> int:
        """Leases that count: the replica has said nothing of them yet."""
        return len(self._leases)

    # What it says.

    def hear(self, report: ReplicaReport, now_s: float) -> None:
        """Take a report in, unless it is void."""
        if report.number > self.report.number:
            is_next = report.number == self.report.number + 1
            self._has_all_prefixes = self._has_all_prefixes and is_next
            self._accept(report, now_s)
        elif self._is_new_life(report, now_s):
            self._leases.clear()
            self._taken.clear()
            self._prefixes.clear()
            self._has_all_prefixes = False
            self._asked_for_prefixes_s = -NEVER
            self._accept(report, now_s)

    def wants_prefixes(self, now_s: float) -> bool:
        """True, once in a while, as long as a report is missing that named prefixes."""
        if self._has_all_prefixes or now_s < self._asked_for_prefixes_s + self._settings.lease_timeout_s:
            return False
        self._asked_for_prefixes_s = now_s
        return True

    def _is_new_life(self, report: ReplicaReport, now_s: float) -> bool:
        """Whether a report with too small a number is of a replica that was started again under its name."""
        self._num_void = self._num_void + 1 if report.number == self._last_void + 1 else 1
        self._last_void = report.number
        return self._num_void >= _VOID_REPORTS_OF_A_NEW_LIFE or now_s > self.heard_until_s

    def _accept(self, report: ReplicaReport, now_s: float) -> None:
        self.report = report
        self.reported_s = now_s
        self.heard_until_s = now_s + self._settings.replica_timeout_s
        self._num_void = 0
        if report.pass_seconds and report.pass_seconds != self._points:
            self._points = report.pass_seconds
            self.pass_times = PassTimes(report.pass_seconds)
        self._learn_prefixes(report)
        self._settle(report)
        pass_s = self.pass_times(num_rows_to_come(report))
        ending = sorted(
            (block for block in report.running if block.num_blocks_left == 0),
            key=lambda b: (b.num_steps_left, b.num_pages),
        )
        self._ends_s = [now_s + block.num_steps_left * pass_s for block in ending]
        self._pages_at_end = list(accumulate(block.num_pages for block in ending))
        self._refresh()

    def _learn_prefixes(self, report: ReplicaReport) -> None:
        if report.has_all_prefixes:
            self._prefixes = set(report.prefixes_added)
            self._has_all_prefixes = True
        else:
            self._prefixes.difference_update(report.prefixes_removed)
            self._prefixes.update(report.prefixes_added)

    def _settle(self, report: ReplicaReport) -> None:
        """Drop leases that the report accounts for."""
        for lease_id in report.settled_leases:
            settled = self._leases.pop(lease_id, None)
            if settled is not None and not settled.is_refused:
                self._taken[settled.request_id] = settled
        running = {block.request_id for block in report.running}
        self._leases = {
            lease_id: lease
            for lease_id, lease in self._leases.items()
            if not lease.is_refused and lease.request_id not in running
        }
        # It says how many wait and not which, nor their pages: those it took last are the ones that wait still.
        taken = [lease for request_id, lease in self._taken.items() if request_id not in running]
        kept = taken[-report.num_waiting :] if report.num_waiting else []
        self._taken = {lease.request_id: lease for lease in kept}

    # What it is promised.

    def promise(self, lease: Lease, number: int, num_blocks: int, now_s: float) -> None:
        """Reserve a lane and pages for the number-th lease of all, for so many complete blocks of prompt."""
        self.last_leased = number
        expires_s = now_s + lease.expected_start_s + self._settings.lease_timeout_s
        self._leases[lease.lease_id] = _OpenLease(lease.request_id, self._num_pages_for(num_blocks), expires_s)
        self._refresh()

    def refused(self, lease_id: str) -> bool:
        """The replica had no room: what was reserved stays so until it has said how it is. False if unknown."""
        if lease_id not in self._leases:
            return False
        self._leases[lease_id] = replace(self._leases[lease_id], is_refused=True)
        return True

    def cancel(self, request_id: str) -> None:
        """Nobody will use the request's lease."""
        for lease_id in [key for key, lease in self._leases.items() if lease.request_id == request_id]:
            del self._leases[lease_id]
        self._refresh()

    def unused(self, lease_id: str) -> bool:
        """Nobody will use the lease. False if unknown."""
        if self._leases.pop(lease_id, None) is None:
            return False
        self._refresh()
        return True

    def expire(self, now_s: float) -> None:
        """Drop leases of which it has said nothing for too long."""
        self._leases = {key: lease for key, lease in self._leases.items() if lease.expires_s > now_s}
        self._refresh()

    # What can be expected of it.

    @property
    def _num_lanes_free(self) -> int:
        """Negative if more is promised than has ended yet."""
        return self.report.num_lanes_free - self.report.num_waiting - len(self._leases)

    def has_pages(self, num_blocks: int) -> bool:
        """Whether it would admit a prompt of so many complete blocks when a lane is free for it."""
        return self.num_pages_short(num_blocks) <= 0

    def num_pages_short(self, num_blocks: int) -> int:
        """Pages that lack for a prompt of so many complete blocks; negative if some would be left."""
        return self._num_pages_for(num_blocks) - self._num_pages_available

    def _num_pages_for(self, num_blocks: int) -> int:
        """Pages that the replica reserves at admission: the prompt's complete blocks and the first canvas.

        Shared pages count too: whether they are held by somebody, and so cost nothing, only the replica knows. No more
        than it has: what can never fit is refused there.
        """
        return min(num_blocks + 1, self.report.num_pages)

    def starts_in_s(self, now_s: float) -> float:
        """Seconds until one more request could begin; infinite where that cannot be told."""
        free = self._num_lanes_free
        if free > 0:
            return 0.0
        return max(self._ends_s[-free] - now_s, 0.0) if -free < len(self._ends_s) else NEVER

    def rows_at(self, time_s: float) -> int:
        """Rows that would run beside a request that began then.

        Those that end later count in full: their lanes are given away again, so a forecast of an emptier replica
        comes true for nobody. Weighing rows by their time left made the slowest first blocks 2 % slower.
        """
        rows = self.num_rows - bisect_right(self._ends_s, time_s)
        most = self.report.num_lanes - 1
        return rows if rows < most else most

    def has_prefix(self, prefix_key: bytes) -> bool:
        """True if it can share the pages of all blocks up to the key's."""
        return prefix_key in self._prefixes

    def num_cached(self, prefix_keys: tuple[bytes, ...]) -> int:
        """Blocks of a prompt that it can share, from the first on."""
        prefixes = self._prefixes
        if not prefix_keys or prefix_keys[0] not in prefixes:
            return 0
        # A block is shared only after all before it: so the last one is found by halving.
        low, high = 1, len(prefix_keys)
        while low < high:
            middle = (low + high + 1) // 2
            if prefix_keys[middle - 1] in prefixes:
                low = middle
            else:
                high = middle - 1
        return low

    def _refresh(self) -> None:
        """Tell anew what follows from report and promises."""
        leases = self._leases.values()
        self.num_rows = len(self.report.running) + self.report.num_waiting + len(leases)
        # One number, since it is what all replicas are sorted by for each request.
        self.standing = (self.num_rows << 48) + self.last_leased
        self.next_expiry_s = min((lease.expires_s for lease in leases), default=NEVER)
        free = self._num_lanes_free
        promised = sum(lease.num_pages for lease in leases) + sum(taken.num_pages for taken in self._taken.values())
        # Those of the sequences at whose ends the lane comes free.
        coming = self._pages_at_end[-free] if free <= 0 and -free < len(self._ends_s) else 0
        self._num_pages_available = self.report.num_pages_free + coming - promised
        if free > 0:
            self.opens_s = -NEVER
        elif -free < len(self._ends_s):
            self.opens_s = self._ends_s[-free] - self._settings.release_ahead_s
        else:
            self.opens_s = NEVER
