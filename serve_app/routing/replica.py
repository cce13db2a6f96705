"""What the router believes of one replica: its last report, aged, and what it has been promised since.

Knows reports, leases and times. Must not know the queue or other replicas.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

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
    num_lanes: int
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
        """When it has room for one lane more, whatever pages it wants; in the past if it has."""
        self.heard_until_s = NEVER
        """When it will have been silent for too long."""
        self.next_expiry_s = NEVER
        """When the next lease times out."""
        self.num_rows = 0
        """Of sequences that run there, wait there, or are on their way: one a lane."""
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
        # What wants more lanes, or pages, than there are can never fit: it is refused there, once these are free.
        self._most_lanes, self._most_pages = max(report.num_lanes, 1), report.num_pages
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
        # Of each lane that comes free, in order: when, and the pages that have come free with it and those before.
        self._ends_s: list[float] = []
        self._pages_at_end: list[int] = []
        num_pages = 0
        for block in ending:
            num_pages += block.num_pages
            end_s = now_s + block.num_steps_left * pass_s
            for _ in range(block.num_lanes):
                self._ends_s.append(end_s)
                self._pages_at_end.append(num_pages)
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

    def promise(self, lease: Lease, number: int, num_lanes: int, num_pages: int, now_s: float) -> None:
        """Reserve lanes and pages for the number-th lease of all, no more than there are."""
        self.last_leased = number
        expires_s = now_s + lease.expected_start_s + self._settings.lease_timeout_s
        num_lanes, num_pages = min(num_lanes, self._most_lanes), min(num_pages, self._most_pages)
        self._leases[lease.lease_id] = _OpenLease(lease.request_id, num_lanes, num_pages, expires_s)
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

    def opens_for(self, num_lanes: int) -> float:
        """When it has room for so many lanes more, whatever pages they want; in the past if it has."""
        return self.opens_s if num_lanes == 1 else self._opening(num_lanes)[0]

    def has_room(self, num_lanes: int, num_pages: int, now_s: float) -> bool:
        """Whether it is open for so many lanes now, and would admit what reserves so many pages when they are free."""
        opens_s, num_pages_free = self._opening_of_one if num_lanes == 1 else self._opening(num_lanes)
        return opens_s <= now_s and min(num_pages, self._most_pages) <= num_pages_free

    def num_pages_short(self, num_lanes: int, num_pages: int) -> int:
        """Pages that lack when it opens for so many lanes; negative if some would be left.

        Shared pages count too: whether they are held by somebody, and so cost nothing, only the replica knows.
        """
        return min(num_pages, self._most_pages) - self._opening(num_lanes)[1]

    def starts_in_s(self, now_s: float, num_lanes: int) -> float:
        """Seconds until a request of so many lanes could begin; infinite where that cannot be told."""
        missing = min(num_lanes, self._most_lanes) - self._num_lanes_free
        if missing <= 0:
            return 0.0
        return max(self._ends_s[missing - 1] - now_s, 0.0) if missing <= len(self._ends_s) else NEVER

    def rows_at(self, time_s: float, num_lanes: int) -> int:
        """Rows that would run beside a request of so many lanes that began then.

        Those that end later count in full: their lanes are given away again, so a forecast of an emptier replica
        comes true for nobody. Weighing rows by their time left made the slowest first blocks 2 % slower.
        """
        rows = self.num_rows - bisect_right(self._ends_s, time_s)
        most = self.report.num_lanes - num_lanes
        # One that wants more lanes than there are would run beside nobody.
        return min(rows, max(most, 0))

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
        leases, report = self._leases.values(), self.report
        num_lanes_leased = sum(lease.num_lanes for lease in leases)
        # Negative if more is promised than has ended yet.
        self._num_lanes_free = report.num_lanes_free - report.num_lanes_waiting - num_lanes_leased
        self.num_rows = report.num_lanes - self._num_lanes_free
        # One number, since it is what all replicas are sorted by for each request.
        self.standing = (self.num_rows << 48) + self.last_leased
        self.next_expiry_s = min((lease.expires_s for lease in leases), default=NEVER)
        promised = sum(lease.num_pages for lease in leases) + sum(taken.num_pages for taken in self._taken.values())
        self._num_pages_free = report.num_pages_free - promised
        # Kept, since one lane is what nearly every request wants.
        self._opening_of_one = self._opening(1)
        self.opens_s = self._opening_of_one[0]

    def _opening(self, num_lanes: int) -> tuple[float, int]:
        """When it has room for so many lanes more, and the pages that are free then."""
        missing = min(num_lanes, self._most_lanes) - self._num_lanes_free
        if missing <= 0:
            return -NEVER, self._num_pages_free
        if missing > len(self._ends_s):
            return NEVER, self._num_pages_free
        # With the pages of the sequences at whose ends the lanes come free.
        opens_s = self._ends_s[missing - 1] - self._settings.release_ahead_s
        return opens_s, self._num_pages_free + self._pages_at_end[missing - 1]
