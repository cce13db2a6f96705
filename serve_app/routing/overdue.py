"""Whose turn it is among those that have waited too long.

Oldest first, whoever sent them, would give everything to a tenant that floods: its backlog is always the oldest. So
tenants take turns. One enters the round behind all others, when its oldest request has waited long enough, and goes
behind all others again when it was served: before its next request each of the others has one turn.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from .waiting import Line, Waiting, drop

_Turn = tuple[float, bool, int]
"""A place in the round: since when, whether a service began it, and a number that breaks ties. Least is next."""


@dataclass(eq=False, slots=True)
class _Tenant:
    """One tenant's requests of all priorities, overdue or not."""

    number: int
    served: _Turn = (-float("inf"), False, 0)
    """Its last turn."""
    line: Line = field(default_factory=list)

    def turn(self, index: int, served: _Turn, max_wait_s: float) -> _Turn:
        """When it would be the turn of its request at `index` if that stood first."""
        arrived_s, number, waiting = self.line[index]
        entered = (arrived_s + max_wait_s, False, number)
        # A returned request has had its turn, which came to nothing.
        return entered if waiting.request.is_returned else max(entered, served)


class OverdueTurns:
    """Waiting requests by tenant. The time of a tenant's turn has come when its oldest request is overdue."""

    def __init__(self, max_wait_s: float) -> None:
        self._max_wait_s = max_wait_s
        self._tenants: dict[str, _Tenant] = {}
        self._round: list[tuple[_Turn, int, _Tenant]] = []  # sorted
        self._num_tenants = 0
        self._num_served = 0

    def add(self, waiting: Waiting) -> None:
        """Queue a request."""
        name = waiting.request.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            self._num_tenants += 1
            tenant = self._tenants[name] = _Tenant(self._num_tenants)
        else:
            drop(self._round, self._place(tenant))
        insort(tenant.line, waiting.place)
        insort(self._round, self._place(tenant))

    def remove(self, waiting: Waiting, served_s: float | None) -> None:
        """Take a request out; if it was overdue when it was served, that was its tenant's turn."""
        name = waiting.request.tenant
        tenant = self._tenants[name]
        drop(self._round, self._place(tenant))
        drop(tenant.line, waiting.place)
        is_turn = served_s is not None and waiting.arrived_s + self._max_wait_s <= served_s
        if served_s is not None and is_turn and not waiting.request.is_returned:
            self._num_served += 1
            tenant.served = (served_s, True, self._num_served)
        if tenant.line:
            insort(self._round, self._place(tenant))
        else:
            # What comes from it later will be overdue after its last turn, and so behind those that wait now.
            del self._tenants[name]

    def in_order(self, now_s: float) -> Iterator[Waiting]:
        """Those that are overdue, in the order in which they would be served now. Not while it changes."""
        # Each tenant's next request, once its first was seen: the first ones are in order already.
        following: list[tuple[_Turn, int, int, _Turn, _Tenant]] = []
        num_seen, num_served = 0, self._num_served
        while True:
            first = self._round[num_seen] if num_seen < len(self._round) else None
            if following and (first is None or following[0][:2] < first[:2]):
                turn, _, index, served, tenant = heappop(following)
            elif first is not None:
                (turn, _, tenant), index = first, 0
                served = tenant.served
                num_seen += 1
            else:
                return
            if turn[0] > now_s:
                return
            waiting = tenant.line[index][2]
            yield waiting
            if not waiting.request.is_returned:
                num_served += 1
                served = (now_s, True, num_served)
            if index + 1 < len(tenant.line):
                turn = tenant.turn(index + 1, served, self._max_wait_s)
                heappush(following, (turn, tenant.number, index + 1, served, tenant))

    def _place(self, tenant: _Tenant) -> tuple[_Turn, int, _Tenant]:
        return (tenant.turn(0, tenant.served, self._max_wait_s), tenant.number, tenant)
