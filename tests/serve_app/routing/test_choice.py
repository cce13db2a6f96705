"""What a replica would cost a request."""

from __future__ import annotations

import pytest

from serve_app.routing.choice import Work, cheapest, cheapest_of_all, estimate, sooner_with_prefix
from serve_app.routing.pass_times import PassTimes
from serve_app.routing.replica import Replica
from serve_app.routing.settings import RoutingSettings
from tests.serve_app.routing.helpers import PASS_SECONDS, block, report_of, request_of

KEYS = tuple(bytes([i]) * 8 for i in range(4))
SECONDS = PassTimes(PASS_SECONDS)


def replica_of(id: str = "a", **fields: object) -> Replica:
    return Replica(report_of(id, **fields), 0.0, RoutingSettings())  # type: ignore[arg-type]


def test_a_guided_request_reserves_the_pages_of_both_its_lanes():
    assert Work.of(request_of("r", num_prompt_tokens=3 * 64), 64).num_pages == 4
    assert Work.of(request_of("r", num_prompt_tokens=3 * 64, num_lanes=2), 64).num_pages == 8


def test_a_guided_request_has_two_rows_a_pass_and_twice_the_prompt_to_prefill():
    """But only one of its lanes shares cached prefixes."""
    replica = replica_of(num_lanes=16, running=[block("x", 64, 3)], prefixes_added=KEYS[:1])
    request = request_of("r", num_prompt_tokens=4 * 64, prefix_keys=KEYS, num_lanes=2)
    found = estimate(replica, Work.of(request, 64), 0.0)
    prefill_s = SECONDS(3 + 8 - 1) - SECONDS(3)
    assert found.num_cached == 1
    assert found.first_block_s == pytest.approx(64 * SECONDS(3) + prefill_s)
    assert found.cost_s == pytest.approx(found.first_block_s + 64 * (SECONDS(3) - SECONDS(1)) + prefill_s)
    assert found.cost_uncached_s - found.cost_s == pytest.approx(2 * (SECONDS(11) - SECONDS(10)))


def test_a_guided_request_starts_when_both_lanes_are_free():
    replica = replica_of(running=[block("x", 10), block("y", 20), block("z", 64, 1)])
    start_s = 10 * SECONDS(3)
    assert estimate(replica, Work.of(request_of("r"), 64), 0.0).first_block_s == pytest.approx(64 * SECONDS(4))
    found = estimate(replica, Work.of(request_of("r", num_lanes=2), 64), 0.0)
    assert found.first_block_s == pytest.approx(start_s + 64 * SECONDS(4))


@pytest.mark.parametrize("choose", [cheapest, cheapest_of_all])
def test_only_replicas_with_both_lanes_are_weighed(choose):
    one_free = replica_of("quick", num_lanes=2, running=[block("x", 64, 3)])
    two_free = replica_of("slow", running=[block("y", 64, 3)], pass_seconds=((1, 1.0), (4, 2.0)))
    (guided, _), (single, _) = (
        choose([one_free, two_free], Work.of(request_of("r", num_lanes=number), 64), 0.0) for number in (2, 1)
    )
    assert guided.replica is two_free and single.replica is one_free
    assert choose([one_free], Work.of(request_of("r", num_lanes=2), 64), 0.0) == (None, False)


def test_a_full_replica_with_the_prefix_is_waited_for_until_both_lanes_are_free():
    going_on = [block(f"on{i}", 64, 1) for i in range(2)]
    holds = replica_of("holds", running=[block("x", 5), block("y", 9), *going_on], prefixes_added=KEYS)
    other = replica_of("other", pass_seconds=((1, 1.0), (4, 2.0)))
    for number, opens_s in ((1, 5 * SECONDS(4) - 0.02), (2, 9 * SECONDS(4) - 0.02)):
        work = Work.of(request_of("r", num_prompt_tokens=256, prefix_keys=KEYS, num_lanes=number), 64)
        best = estimate(other, work, 0.0)
        assert sooner_with_prefix([holds], work, best, 0.0, opens_s - 1e-6) is None
        found = sooner_with_prefix([holds], work, best, 0.0, opens_s)
        assert found is not None and found.replica is holds
