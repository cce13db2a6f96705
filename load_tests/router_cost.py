"""What the router's policy costs: CPU time of a decision, for some numbers of replicas and of waiting requests.

    python -m load_tests.router_cost

Replicas of 32 lanes report in turn; a request comes with each report. No Ray and no network are in it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

from serve_app.routing.messages import ReplicaReport, Reported, RouteRequest, RunningBlock, Submitted
from serve_app.routing.policy import RoutingPolicy, RoutingSettings

from .engine_sections.report import percentile

NUM_LANES = 32
PASS_SECONDS = ((1, 0.0049), (2, 0.0056), (4, 0.0080), (8, 0.0142), (16, 0.0267), (32, 0.0532))
CASES = ((1, 0), (16, 0), (16, 1000), (64, 0), (64, 4000))
"""(replicas, requests that wait throughout)."""


def decisions(num_replicas: int, num_waiting: int, count: int) -> tuple[list[float], list[float]]:
    """CPU seconds of each of `count` requests and of each of as many reports."""
    policy = RoutingPolicy(RoutingSettings(max_queue=10 * (num_waiting + count)))
    num_free = 2 if num_waiting else NUM_LANES // 2
    for replica in range(num_replicas):
        policy.handle(_report(replica, 1, 0 if num_waiting else NUM_LANES), 0.0)
    for number in range(num_waiting):
        policy.handle(_request(f"waiting-{number}"), 0.0)
    requests, reports = [], []
    for number in range(count):
        now_s = 0.001 * (number + 1)
        report = _report(number % num_replicas, number // num_replicas + 2, num_free)
        request = _request(f"request-{number}")
        reports.append(_cpu_seconds(lambda report=report, now_s=now_s: policy.handle(report, now_s)))  # type: ignore[misc]
        requests.append(_cpu_seconds(lambda request=request, now_s=now_s: policy.handle(request, now_s)))  # type: ignore[misc]
    return requests, reports


def _cpu_seconds(call: Callable[[], object]) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


def _report(replica: int, number: int, num_free: int) -> Reported:
    running = tuple(
        RunningBlock(
            request_id=f"running-{replica}-{lane}",
            num_steps_left=lane * 7 % 64 + 1,
            num_blocks_left=lane % 4,
            num_pages=8,
        )
        for lane in range(NUM_LANES - num_free)
    )
    return Reported(
        ReplicaReport(
            replica_id=f"replica-{replica}",
            number=number,
            num_lanes=NUM_LANES,
            num_pages=20_000,
            num_lanes_free=num_free,
            num_pages_free=15_000,
            num_waiting=0,
            num_lanes_waiting=0,
            running=running,
            pass_seconds=PASS_SECONDS,
            has_all_prefixes=number == 1,
        )
    )


def _request(name: str) -> Submitted:
    keys = tuple(f"{name}-{block}".encode() for block in range(3))
    return Submitted(RouteRequest(request_id=name, num_prompt_tokens=200, max_tokens=200, prefix_keys=keys))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="decisions of each kind (1000)")
    options = parser.parse_args(arguments)
    print(f"replicas of {NUM_LANES} lanes  waiting  a request comes, p50 / p99  a report comes, p50 / p99")
    for num_replicas, num_waiting in CASES:
        requests, reports = decisions(num_replicas, num_waiting, options.count)
        shown = [f"{_us(times, 0.5)} / {_us(times, 0.99)} us" for times in (requests, reports)]
        print(f"{num_replicas:>20}  {num_waiting:>7}  {shown[0]:>26}  {shown[1]:>25}")
    return 0


def _us(seconds: list[float], share: float) -> str:
    return f"{1e6 * percentile(seconds, share):.0f}"


if __name__ == "__main__":
    sys.exit(main())
