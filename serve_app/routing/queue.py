"""Who waits, and in which order they are served.

Knows requests and times. Must not know replicas.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from .messages import RouteRequest
from .overdue import OverdueTurns
from .waiting import Line, Waiting, drop

__all__ = ["Waiting", "WaitingQueue"]


@dataclass(eq=False, slots=True)
class _Tenant:
    """One tenant's requests of one priority."""

    number: int
    clock: float
    """Tokens served to it; the tenant whose clock shows least is next."""
    line: Line = field(default_factory=list)


class _Level:
    """The requests of one priority: returned ones first, then fair between tenants (start-time fair queueing).

    The level's own clock shows the start of the last service. A tenant that comes back is set to at least that, so
    nobody saves up credit while idle; a debt stays until the level's clock has passed it. Where nobody of the level
    waits it is dropped, and all debts with it.
    """

    def __init__(self) -> None:
        self.returned: Line = []
        self._tenants: dict[str, _Tenant] = {}
        self._active: list[tuple[float, int, _Tenant]] = []  # by clock; those with a line
        self._idle: list[tuple[float, int, str]] = []  # by clock; a heap of those that are in debt
        self._clock = 0.0
        self._num_tenants = 0

    def __bool__(self) -> bool:
        return bool(self.returned or self._active)

    def add(self, waiting: Waiting) -> None:
        if waiting.request.is_returned:
            insort(self.returned, waiting.place)
            return
        name = waiting.request.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            # Those that owe nothing were forgotten, so one that comes back starts in the present.
            self._num_tenants += 1
            tenant = self._tenants[name] = _Tenant(self._num_tenants, self._clock)
        if not tenant.line:
            insort(self._active, (tenant.clock, tenant.number, tenant))
        insort(tenant.line, waiting.place)

    def remove(self, waiting: Waiting, *, is_served: bool) -> None:
        # A returned request was charged when it was assigned the first time.
        if waiting.request.is_returned:
            drop(self.returned, waiting.place)
            return
        name = waiting.request.tenant
        tenant = self._tenants[name]
        drop(tenant.line, waiting.place)
        drop(self._active, (tenant.clock, tenant.number, tenant))
        if is_served:
            self._clock = max(self._clock, tenant.clock)
            tenant.clock += waiting.cost
        if tenant.line:
            insort(self._active, (tenant.clock, tenant.number, tenant))
        else:
            heappush(self._idle, (tenant.clock, tenant.number, name))
        self._forget_idle()

    def __iter__(self) -> Iterator[Waiting]:
        """In the order in which they would be served, if nobody else came. Not while it changes."""
        for _, _, waiting in self.returned:
            yield waiting
        # Each tenant's next request, once its first was seen: the active ones are in order already.
        following: list[tuple[float, int, int, _Tenant]] = []
        num_seen = 0
        while num_seen < len(self._active) or following:
            first = self._active[num_seen] if num_seen < len(self._active) else None
            if following and (first is None or following[0][:2] < first[:2]):
                clock, _, index, tenant = heappop(following)
            else:
                assert first is not None
                (clock, _, tenant), index = first, 0
                num_seen += 1
            waiting = tenant.line[index][2]
            yield waiting
            if index + 1 < len(tenant.line):
                heappush(following, (clock + waiting.cost, tenant.number, index + 1, tenant))

    def _forget_idle(self) -> None:
        """Forget tenants that wait for nothing and owe nothing."""
        while self._idle and self._idle[0][0] <= self._clock:
            clock, _, name = heappop(self._idle)
            tenant = self._tenants.get(name)
            if tenant is not None and not tenant.line and tenant.clock == clock:
                del self._tenants[name]


class WaitingQueue:
    """All that waits, in order of service.

    First those that have waited `max_wait_s`: tenants take turns, oldest first within a tenant. Then by priority,
    smallest first; within a priority those that were returned, then fair between tenants by the tokens they ask for, in
    order of arrival within a tenant.
    """

    def __init__(self, max_wait_s: float) -> None:
        self._max_wait_s = max_wait_s
        self._waiting: dict[str, Waiting] = {}
        self._by_age: Line = []
        self._overdue = OverdueTurns(max_wait_s)
        self._by_deadline: list[tuple[float, int, Waiting]] = []
        self._levels: dict[int, _Level] = {}
        self._priorities: list[int] = []  # sorted
        self._num_of_tenant: dict[str, int] = {}
        self._num_of_lanes: dict[int, int] = {}  # requests by the lanes that each wants
        self._num_submitted = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_tenants(self) -> int:
        """Tenants that wait for something."""
        return len(self._num_of_tenant)

    @property
    def num_lanes(self) -> int:
        """Lanes that all waiting requests want; a guided one wants two."""
        return sum(num_lanes * number for num_lanes, number in self._num_of_lanes.items())

    @property
    def lanes_wanted(self) -> Iterable[int]:
        """Every number of lanes that one of them wants."""
        return self._num_of_lanes

    @property
    def next_deadline_s(self) -> float:
        """When the next one gives up."""
        return self._by_deadline[0][0] if self._by_deadline else float("inf")

    @property
    def next_deadline(self) -> Waiting:
        """The one that gives up next; there must be one."""
        return self._by_deadline[0][2]

    @property
    def oldest(self) -> Waiting | None:
        """The one that arrived first."""
        return self._by_age[0][2] if self._by_age else None

    def num_of_tenant(self, tenant: str) -> int:
        """How many requests of a tenant wait."""
        return self._num_of_tenant.get(tenant, 0)

    def find(self, request_id: str) -> Waiting | None:
        """The waiting request of that name."""
        return self._waiting.get(request_id)

    def add(self, request: RouteRequest, now_s: float) -> Waiting:
        """Queue a request. One that waits under its name already gives it its place."""
        arrived_s = now_s - max(request.age_s, 0.0)
        earlier = self._waiting.get(request.request_id)
        self._num_submitted += 1
        waiting = Waiting(request=request, number=self._num_submitted, arrived_s=arrived_s, submitted_s=now_s)
        if earlier is not None:
            self.remove(earlier)
            waiting.number, waiting.arrived_s = earlier.number, min(earlier.arrived_s, arrived_s)
        self._waiting[request.request_id] = waiting
        insort(self._by_age, waiting.place)
        self._overdue.add(waiting)
        if request.deadline_s is not None:
            insort(self._by_deadline, (waiting.gives_up_s, waiting.number, waiting))
        self._num_of_tenant[request.tenant] = self.num_of_tenant(request.tenant) + 1
        self._num_of_lanes[request.num_lanes] = self._num_of_lanes.get(request.num_lanes, 0) + 1
        if request.priority not in self._levels:
            self._levels[request.priority] = _Level()
            insort(self._priorities, request.priority)
        self._levels[request.priority].add(waiting)
        return waiting

    def remove(self, waiting: Waiting, *, served_s: float | None = None) -> None:
        """Take a request out; one that is served, at that time, is charged to its tenant."""
        request = waiting.request
        del self._waiting[request.request_id]
        drop(self._by_age, waiting.place)
        self._overdue.remove(waiting, served_s)
        if request.deadline_s is not None:
            drop(self._by_deadline, (waiting.gives_up_s, waiting.number, waiting))
        self._num_of_tenant[request.tenant] -= 1
        if not self._num_of_tenant[request.tenant]:
            del self._num_of_tenant[request.tenant]
        self._num_of_lanes[request.num_lanes] -= 1
        if not self._num_of_lanes[request.num_lanes]:
            del self._num_of_lanes[request.num_lanes]
        level = self._levels[request.priority]
        level.remove(waiting, is_served=served_s is not None)
        if not level:
            del self._levels[request.priority]
            self._priorities.remove(request.priority)

    def is_overdue(self, waiting: Waiting, now_s: float) -> bool:
        """True once it has waited so long that it goes first."""
        return waiting.arrived_s + self._max_wait_s <= now_s

    def next_overdue_s(self, now_s: float) -> float:
        """When the next one that is not overdue will be."""
        place = bisect_right(self._by_age, now_s, key=lambda entry: entry[0] + self._max_wait_s)
        return self._by_age[place][0] + self._max_wait_s if place < len(self._by_age) else float("inf")

    def in_order(self, now_s: float) -> Iterator[Waiting]:
        """Everybody, in order of service. Not while it changes."""
        yield from self._overdue.in_order(now_s)
        for priority in self._priorities:
            for waiting in self._levels[priority]:
                if not self.is_overdue(waiting, now_s):
                    yield waiting
