from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import PrefixChanges
from serve_app.lease_desk import LeaseDesk
from serve_app.lease_messages import ReportAnswer
from serve_app.replica_reports import Reporter, both_changes, make_report
from serve_app.routing.messages import ReplicaReport
from tests.serve_app.test_lease_desk import block, lease, load

pytestmark = pytest.mark.anyio


def test_a_report_repeats_the_load_and_counts_who_is_on_the_way():
    desk = LeaseDesk("here", grace_s=0.1)
    desk.take("a", 1, 1)
    desk.take("b", 1, 1)
    said = load(block("a", 4, 2, 5), prefixes=PrefixChanges(added=(b"12345678rest",), removed=(b"abcdefghrest",)))
    desk.update(said)
    report = make_report(said, desk, number=3, settled_leases=("l1",))
    assert (report.replica_id, report.number, report.settled_leases) == ("here", 3, ("l1",))
    assert (report.num_lanes, report.num_lanes_free, report.num_waiting) == (2, 1, 1)
    assert (report.running[0].num_steps_left, report.running[0].num_blocks_left, report.running[0].num_pages) == (
        4,
        2,
        5,
    )
    assert (report.prefixes_added, report.prefixes_removed) == ((b"12345678",), (b"abcdefgh",))
    assert not report.has_all_prefixes


def test_a_report_counts_the_lanes_of_those_who_run_and_of_those_who_wait():
    desk = LeaseDesk("here", grace_s=0.1)
    said = load(block("a", lanes=2), block("b"), lanes=8, waiting=2, lanes_waiting=3)
    desk.update(said)
    report = make_report(said, desk, number=1)
    assert [block.num_lanes for block in report.running] == [2, 1]
    assert (report.num_lanes_free, report.num_waiting, report.num_lanes_waiting) == (5, 2, 3)


def apply(changes: PrefixChanges, known: set[bytes]) -> set[bytes]:
    known = set() if changes.is_everything else known
    return (known - set(changes.removed)) | set(changes.added)


def changes() -> st.SearchStrategy[PrefixChanges]:
    keys = st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), unique=True)
    return st.tuples(keys, keys, st.booleans()).map(
        lambda t: PrefixChanges(tuple(t[0]), tuple(k for k in t[1] if k not in t[0] and not t[2]), t[2])
    )


@given(changes(), changes(), st.sets(st.sampled_from([b"a", b"b", b"c", b"d"])))
def test_two_changes_as_one_lead_to_the_same(first, then, known):
    assert apply(both_changes(first, then), known) == apply(then, apply(first, known))


class Router:
    """Takes reports, when it is there."""

    def __init__(self) -> None:
        self.reports: list[ReplicaReport] = []
        self.is_away = False
        self.wants_all_prefixes = False
        self.is_slow: asyncio.Event | None = None

    async def __call__(self, report: ReplicaReport) -> ReportAnswer:
        if self.is_slow is not None:
            await self.is_slow.wait()
        if self.is_away:
            raise ConnectionError("nobody there")
        self.reports.append(report)
        wants, self.wants_all_prefixes = self.wants_all_prefixes, False
        return ReportAnswer(wants, 7, 1.5)


class Replica:
    """A reporter between a router and an engine that says its load when it is asked."""

    def __init__(self, *, heartbeat_s: float, timeout_s: float = 5.0) -> None:
        self.router, self.asked = Router(), []
        self.desk = LeaseDesk("here", grace_s=0.1)
        self.reporter = Reporter(
            self.desk, send=self.router, ask_load=self.ask, heartbeat_s=heartbeat_s, timeout_s=timeout_s
        )

    def ask(self, with_all_prefixes: bool) -> None:
        self.asked.append(with_all_prefixes)
        self.reporter.take(load(prefixes=PrefixChanges(is_everything=with_all_prefixes)))

    async def until(self, check) -> None:
        task = asyncio.ensure_future(self.reporter.run())
        try:
            async with asyncio.timeout(30):
                while not check():
                    await asyncio.sleep(0.001)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_news_is_told_at_once_and_numbered():
    replica = Replica(heartbeat_s=3600)
    replica.desk.refusal(lease(5), 1, 1, ())
    replica.reporter.take(load(block("a")))
    await replica.until(lambda: replica.router.reports)
    replica.reporter.take(load())
    await replica.until(lambda: len(replica.router.reports) == 2)
    first, second = replica.router.reports
    assert (first.number, second.number) == (1, 2)
    assert (first.settled_leases, second.settled_leases) == (("l5",), ())
    assert replica.reporter.last_answer == ReportAnswer(False, 7, 1.5)


async def test_silence_is_broken_by_a_heartbeat():
    replica = Replica(heartbeat_s=0.01)
    await replica.until(lambda: len(replica.router.reports) >= 3)
    assert replica.asked[:3] == [False, False, False]


async def test_an_engine_that_says_nothing_is_not_reported():
    replica = Replica(heartbeat_s=0.001)
    replica.ask = lambda with_all_prefixes: replica.asked.append(with_all_prefixes)
    replica.reporter._ask_load = replica.ask
    await replica.until(lambda: replica.asked)
    await asyncio.sleep(0.02)
    assert not replica.router.reports


async def test_what_the_router_said_to_an_engine_that_hangs_is_forgotten():
    """The controller was told of the queue as it had been, and wanted one replica more each time it looked."""
    replica = Replica(heartbeat_s=0.001, timeout_s=0.01)
    replica.reporter._ask_load = lambda with_all_prefixes: None
    replica.reporter.take(load())
    await replica.until(lambda: replica.reporter.last_answer is not None)
    await replica.until(lambda: replica.reporter.last_answer is None)
    replica.reporter.take(load())
    await replica.until(lambda: replica.reporter.last_answer is not None)


async def test_what_comes_while_a_report_is_on_its_way_goes_with_the_next():
    replica = Replica(heartbeat_s=3600)
    replica.router.is_slow = asyncio.Event()
    replica.reporter.take(load(block("a")))

    async def meanwhile() -> None:
        await asyncio.sleep(0.01)
        replica.reporter.take(load(block("a"), prefixes=PrefixChanges(added=(b"a",))))
        replica.reporter.take(load(prefixes=PrefixChanges(added=(b"b",))))
        replica.router.is_slow.set()

    task = asyncio.ensure_future(meanwhile())
    await replica.until(lambda: len(replica.router.reports) == 2)
    await task
    assert [len(report.running) for report in replica.router.reports] == [1, 0]
    assert replica.router.reports[1].prefixes_added == (b"a", b"b")


async def test_a_router_that_was_away_is_told_everything():
    replica = Replica(heartbeat_s=0.005)
    replica.router.is_away = True
    replica.reporter.take(load())
    await replica.until(lambda: len(replica.asked) > 1)
    assert replica.reporter.last_answer is None
    replica.router.is_away = False
    await replica.until(lambda: replica.router.reports)
    assert replica.router.reports[0].has_all_prefixes
    assert replica.router.reports[0].number > 1


async def test_a_router_that_missed_prefixes_gets_them_all():
    replica = Replica(heartbeat_s=3600)
    replica.router.wants_all_prefixes = True
    replica.reporter.take(load())
    await replica.until(lambda: len(replica.router.reports) == 2)
    assert [report.has_all_prefixes for report in replica.router.reports] == [False, True]
