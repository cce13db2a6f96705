"""What the router believes of one replica: its last report, aged, and what it has been promised since.

Knows reports, leases and times. Must not know the queue or other replicas.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate

from .messages import Lease, ReplicaReport, RouteRequest, RunningBlock
from .pass_times import UNMEASURED, PassTimes
from .settings import RoutingSettings

NEVER = float("inf")
_VOID_REPORTS_OF_A_NEW_LIFE = 3
"""So many void reports that follow each other are not late ones: the replica counts from the start again."""


@dataclass(frozen=True, slots=True)
class _Promise:
    """A lease that the replica has not answered yet, or whose request it has not begun."""

    request_id: str
    num_pages: int
    expires_s: float
    is_refused: bool = False
    """The replica had no room, whatever its report said: not asked again before the next one."""


class RowForecast:
    """How many sequences will run, if none come: a replica gets quicker as they end."""

    def __init__(self, passes_left: Iterable[int]) -> None:
        self._left = sorted(passes_left)
        self._sums = [0, *accumulate(self._left)]

    def mean_rows(self, start: float, span: float) -> float:
        """The mean number of rows from `start` passes from now on, for `span` passes."""
        return (self._row_passes(start + span) - self._row_passes(start)) / span

    def _row_passes(self, passes: float) -> float:
        """Rows run in so many passes from now."""
        num_ended = bisect_right(self._left, passes)
        return self._sums[num_ended] + (len(self._left) - num_ended) * passes


class Replica:
    """One replica as the router sees it."""

    def __init__(self, report: ReplicaReport, now_s: float, settings: RoutingSettings) -> None:
        self._settings = settings
        self._leases: dict[str, _Promise] = {}
        self._begun: dict[str, _Promise] = {}  # by request: taken by the replica, not seen running yet
        self._prefixes: set[bytes] = set()
        self._has_all_prefixes = False
        self._asked_for_prefixes_s = -NEVER
        self._last_void = 0
        self._num_void = 0
        self.pass_times = UNMEASURED
        self.last_leased = 0
        """Number of the last lease it got, of all: whose turn it is among equals."""
        self.opens_s = NEVER
        """When it has room for one more, as far as lanes go; in the past if it has."""
        self.heard_until_s = NEVER
        """When it will have been silent for too long."""
        self.next_expiry_s = NEVER
        """When the next lease times out."""
        self.load = 0.0
        """Rows, as a mean over the time of a block, of what runs there, waits there, or is on its way."""
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
            self._begun.clear()
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
        if report.pass_seconds:
            self.pass_times = PassTimes(report.pass_seconds)
        self._learn_prefixes(report)
        self._settle(report)
        rows = min(len(report.running) + report.num_waiting, report.num_lanes)
        self._pass_s = self.pass_times(max(rows, 1))
        ending = sorted(
            (block for block in report.running if block.num_blocks_left == 0),
            key=lambda b: (b.num_steps_left, b.num_pages),
        )
        self._ends_s = [now_s + block.num_steps_left * self._pass_s for block in ending]
        self._pages_at_end = list(accumulate(block.num_pages for block in ending))
        self._forecast = RowForecast(self._passes_left(block) for block in report.running)
        self._rows_reported = self._forecast.mean_rows(0, self._settings.block_size)
        self._refresh()

    def _learn_prefixes(self, report: ReplicaReport) -> None:
        if report.has_all_prefixes:
            self._prefixes = set(report.prefixes_added)
            self._has_all_prefixes = True
        else:
            self._prefixes.difference_update(report.prefixes_removed)
            self._prefixes.update(report.prefixes_added)

    def _settle(self, report: ReplicaReport) -> None:
        """Drop promises that the report accounts for."""
        for lease_id in report.settled_leases:
            promise = self._leases.pop(lease_id, None)
            if promise is not None and not promise.is_refused:
                self._begun[promise.request_id] = promise
        running = {block.request_id for block in report.running}
        self._leases = {
            lease_id: promise
            for lease_id, promise in self._leases.items()
            if not promise.is_refused and promise.request_id not in running
        }
        # It says how many wait and not which, nor their pages: those it took last are the ones that wait still.
        begun = [promise for request_id, promise in self._begun.items() if request_id not in running]
        kept = begun[-report.num_waiting :] if report.num_waiting else []
        self._begun = {promise.request_id: promise for promise in kept}

    def _passes_left(self, block: RunningBlock) -> int:
        """Passes until a sequence ends, as if its other blocks went one token a pass and none ended sooner."""
        return block.num_steps_left + block.num_blocks_left * self._settings.block_size

    # What it is promised.

    def promise(self, lease: Lease, request: RouteRequest, now_s: float) -> None:
        """Reserve a lane and pages for a lease."""
        expires_s = now_s + lease.expected_start_s + self._settings.lease_timeout_s
        self._leases[lease.lease_id] = _Promise(request.request_id, self.num_pages_for(request), expires_s)
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

    def expire(self, now_s: float) -> None:
        """Drop leases of which it has said nothing for too long."""
        self._leases = {key: lease for key, lease in self._leases.items() if lease.expires_s > now_s}
        self._refresh()

    # What can be expected of it.

    @property
    def _num_lanes_free(self) -> int:
        """Negative if more is promised than has ended yet."""
        return self.report.num_lanes_free - self.report.num_waiting - len(self._leases)

    def num_pages_for(self, request: RouteRequest) -> int:
        """Pages that the replica reserves at admission: the prompt's complete blocks and the first canvas.

        Shared pages count too: whether they are held by somebody, and so cost nothing, only the replica knows. No more
        than it has: what can never fit is refused there.
        """
        num_blocks = max(request.num_prompt_tokens // self._settings.block_size, len(request.prefix_keys))
        return min(num_blocks + 1, self.report.num_pages)

    def num_pages_available(self) -> int:
        """Pages for one more request when a lane is free for it."""
        free = self._num_lanes_free
        coming = self._pages_at_end[-free] if free <= 0 and -free < len(self._ends_s) else 0
        return self.report.num_pages_free + coming - self._num_pages_promised

    def starts_in_s(self, now_s: float) -> float:
        """Seconds until one more request could begin; infinite where that cannot be told."""
        free = self._num_lanes_free
        if free > 0:
            return 0.0
        return max(self._ends_s[-free] - now_s, 0.0) if -free < len(self._ends_s) else NEVER

    def mean_rows(self, at_s: float, span: float) -> float:
        """Rows that would run beside a request in its first `span` passes, if it began at that time."""
        rows = self._forecast.mean_rows((at_s - self.reported_s) / self._pass_s, span) + self._num_not_running
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
        self._num_not_running = self.report.num_waiting + len(leases)
        self.load = self._rows_reported + self._num_not_running
        self._num_pages_promised = sum(lease.num_pages for lease in leases)
        self._num_pages_promised += sum(promise.num_pages for promise in self._begun.values())
        self.next_expiry_s = min((lease.expires_s for lease in leases), default=NEVER)
        free = self._num_lanes_free
        if self.report.is_draining:
            self.opens_s = NEVER
        elif free > 0:
            self.opens_s = -NEVER
        elif -free < len(self._ends_s):
            self.opens_s = self._ends_s[-free] - self._settings.release_ahead_s
        else:
            self.opens_s = NEVER
