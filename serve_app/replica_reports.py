"""How a replica tells the router how it is: at block boundaries, and as a sign of life in between."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from engine import EngineLoad, PrefixChanges

from .lease_desk import LeaseDesk
from .lease_messages import ReportAnswer
from .routing.messages import PREFIX_KEY_BYTES, ReplicaReport, RunningBlock

logger = logging.getLogger("ray.serve")


def make_report(
    load: EngineLoad, desk: LeaseDesk, *, number: int, settled_leases: tuple[str, ...] = ()
) -> ReplicaReport:
    """The engine's load and the desk's counts as a report."""
    return ReplicaReport(
        replica_id=desk.replica_id,
        number=number,
        num_lanes=load.num_lanes,
        num_pages=load.num_pages,
        num_lanes_free=load.num_lanes_free,
        num_pages_free=load.num_pages_free,
        num_waiting=desk.num_waiting,
        num_lanes_waiting=desk.num_lanes_waiting,
        running=tuple(
            RunningBlock(
                request_id=block.request_id,
                num_steps_left=block.num_steps_left,
                num_blocks_left=block.num_blocks_left,
                num_pages=block.num_pages,
                num_lanes=block.num_lanes,
            )
            for block in load.running
        ),
        pass_seconds=load.pass_seconds,
        prefixes_added=short_keys(load.prefixes.added),
        prefixes_removed=short_keys(load.prefixes.removed),
        has_all_prefixes=load.prefixes.is_everything,
        settled_leases=settled_leases,
    )


def short_keys(keys: tuple[bytes, ...] | list[bytes]) -> tuple[bytes, ...]:
    """Prefix keys as they travel."""
    return tuple(key[:PREFIX_KEY_BYTES] for key in keys)


def both_changes(first: PrefixChanges, then: PrefixChanges) -> PrefixChanges:
    """Two changes, one after the other, as one."""
    if then.is_everything:
        return then
    added, removed = set(then.added), set(then.removed)
    return PrefixChanges(
        added=tuple(key for key in first.added if key not in removed) + then.added,
        removed=tuple(key for key in first.removed if key not in added) + then.removed,
        is_everything=first.is_everything,
    )


class Reporter:
    """Sends reports one after the other: what comes while one is on its way goes with the next."""

    def __init__(
        self,
        desk: LeaseDesk,
        *,
        send: Callable[[ReplicaReport], Awaitable[ReportAnswer]],
        ask_load: Callable[[bool], None],
        heartbeat_s: float,
        timeout_s: float = 2.0,
    ) -> None:
        """`ask_load(with_all_prefixes)` has a load come to `take` as soon as the engine can say it.

        An engine that hangs says none, so its replica falls silent, and the router sends it nothing more.
        """
        self._desk = desk
        self._send, self._ask_load = send, ask_load
        self._heartbeat_s, self._timeout_s = heartbeat_s, timeout_s
        self._load: EngineLoad | None = None
        self._news = asyncio.Event()
        self._number = 0
        self._is_failing = False
        self._must_tell_all = False
        self.last_answer: ReportAnswer | None = None
        """What the router said last; None before, while it cannot be reached, and once the engine has fallen silent."""

    def take(self, load: EngineLoad) -> None:
        """Take a load, to be told soon; loads come in their order."""
        self._desk.update(load)
        if self._load is not None:
            load = replace(load, prefixes=both_changes(self._load.prefixes, load.prefixes))
        self._load = load
        self._news.set()

    async def run(self) -> None:
        """Report for ever; a router that is away is told everything when it is back."""
        while True:
            await self._wait_for_news()
            self._news.clear()
            load, self._load = self._load, None
            assert load is not None
            self._number += 1
            report = make_report(load, self._desk, number=self._number, settled_leases=self._desk.take_settled())
            try:
                async with asyncio.timeout(self._timeout_s):
                    self.last_answer = await self._send(report)
            except Exception as error:
                # Whatever it is, the next report comes after it, and it tells all.
                await self._outlive(error)
                continue
            self._is_failing = False
            if report.has_all_prefixes:
                self._must_tell_all = False
            if self.last_answer.wants_all_prefixes or self._must_tell_all:
                self._must_tell_all = True
                self._ask_load(True)

    async def _wait_for_news(self) -> None:
        # Not wait_for: where news and a cancellation come together, it loses the cancellation.
        try:
            async with asyncio.timeout(self._heartbeat_s):
                await self._news.wait()
        except TimeoutError:
            self._ask_load(self._must_tell_all)
            await self._wait_for_the_engine()

    async def _wait_for_the_engine(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._news.wait()
        except TimeoutError:
            # It hangs, and with it what is known of the queue: repeated, that would ask for ever more replicas.
            self.last_answer = None
            await self._news.wait()

    async def _outlive(self, error: Exception) -> None:
        self.last_answer = None
        self._must_tell_all = True
        if not self._is_failing:
            self._is_failing = True
            logger.warning("the router cannot be told how this replica is; trying on: %r", error)
        await asyncio.sleep(self._heartbeat_s)
        self._ask_load(True)
