"""Short ways to say what a request and a report are."""

from __future__ import annotations

from collections.abc import Iterable

from serve_app.routing.messages import (
    Assigned,
    Decision,
    Rejected,
    ReplicaReport,
    Reported,
    RouteRequest,
    RunningBlock,
    Submitted,
)
from serve_app.routing.policy import RoutingPolicy, RoutingSettings

PASS_SECONDS = ((1, 0.005), (2, 0.0055), (4, 0.008), (8, 0.014), (16, 0.026))


def request_of(id: str, **changes: object) -> RouteRequest:
    fields: dict[str, object] = {"request_id": id, "num_prompt_tokens": 0, "max_tokens": 64, **changes}
    return RouteRequest(**fields)  # type: ignore[arg-type]


def block(id: str, steps: int = 64, blocks: int = 0, pages: int = 1, lanes: int = 1) -> RunningBlock:
    return RunningBlock(request_id=id, num_steps_left=steps, num_blocks_left=blocks, num_pages=pages, num_lanes=lanes)


def report_of(id: str, number: int = 1, running: Iterable[RunningBlock] = (), **changes: object) -> ReplicaReport:
    """A replica of 4 lanes and 100 pages, less what runs; what waits wants a lane each."""
    running = tuple(running)
    lanes, pages = changes.get("num_lanes", 4), changes.get("num_pages", 100)
    assert isinstance(lanes, int) and isinstance(pages, int)
    fields: dict[str, object] = {
        "replica_id": id,
        "number": number,
        "num_lanes": lanes,
        "num_pages": pages,
        "num_lanes_free": lanes - sum(b.num_lanes for b in running),
        "num_pages_free": pages - sum(b.num_pages for b in running),
        "num_waiting": 0,
        "num_lanes_waiting": changes.get("num_waiting", 0),
        "running": running,
        "pass_seconds": PASS_SECONDS,
        "has_all_prefixes": number == 1,
        **changes,
    }
    return ReplicaReport(**fields)  # type: ignore[arg-type]


def full(id: str, number: int = 1, steps: Iterable[int] = (64, 64, 64, 64), **changes: object) -> ReplicaReport:
    """All four lanes taken, by sequences in their last blocks."""
    return report_of(id, number, [block(f"{id}-{number}-{i}", s) for i, s in enumerate(steps)], **changes)


class Router:
    """A policy with a clock that the test moves."""

    def __init__(self, **settings: object) -> None:
        self.policy = RoutingPolicy(RoutingSettings(**settings))  # type: ignore[arg-type]
        self.now_s = 100.0

    def report(self, report: ReplicaReport) -> list[Decision]:
        return self.policy.handle(Reported(report), self.now_s)

    def submit(self, id: str, **changes: object) -> list[Decision]:
        return self.policy.handle(Submitted(request_of(id, **changes)), self.now_s)

    def wait(self, seconds: float) -> list[Decision]:
        """Let time pass, waking the policy whenever it asks for it."""
        end_s, decisions = self.now_s + seconds, []
        while True:
            wake_s = self.policy.next_wake_s()
            assert wake_s is None or wake_s > self.now_s, "it asks to be woken in the past"
            if wake_s is None or wake_s > end_s:
                self.now_s = end_s
                return [*decisions, *self.policy.handle(None, end_s)]
            self.now_s = wake_s
            decisions += self.policy.handle(None, wake_s)


def assigned(decisions: Iterable[Decision]) -> list[tuple[str, str]]:
    """(request, replica) of all that were assigned."""
    return [(d.lease.request_id, d.lease.replica_id) for d in decisions if isinstance(d, Assigned)]


def rejected(decisions: Iterable[Decision]) -> list[tuple[str, str]]:
    return [(d.request_id, d.reason.value) for d in decisions if isinstance(d, Rejected)]
