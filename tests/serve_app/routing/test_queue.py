from __future__ import annotations

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from serve_app.routing.queue import Waiting, WaitingQueue
from tests.serve_app.routing.helpers import request_of


def order(queue: WaitingQueue, now_s: float = 0.0) -> list[str]:
    return [waiting.request.request_id for waiting in queue.in_order(now_s)]


def serve(queue: WaitingQueue, now_s: float = 0.0) -> Waiting:
    waiting = next(queue.in_order(now_s))
    queue.remove(waiting, served_s=now_s)
    return waiting


def test_one_tenant_is_served_in_order_of_arrival():
    queue = WaitingQueue(10)
    for time_s, id in enumerate("abc"):
        queue.add(request_of(id), time_s)
    queue.add(request_of("old", age_s=9.0), 3)
    assert order(queue, 3) == ["old", "a", "b", "c"]


def test_a_smaller_priority_is_served_first():
    queue = WaitingQueue(10)
    queue.add(request_of("low", priority=1), 0)
    queue.add(request_of("high", priority=-1), 0)
    queue.add(request_of("middle"), 0)
    assert order(queue) == ["high", "middle", "low"]


def test_what_has_waited_too_long_goes_first_by_age_whatever_its_priority():
    queue = WaitingQueue(10)
    queue.add(request_of("low", priority=9), 0)
    queue.add(request_of("lower", priority=10), 1)
    queue.add(request_of("high", priority=0), 5)
    assert order(queue, 9.9) == ["high", "low", "lower"]
    assert order(queue, 10) == ["low", "high", "lower"]
    assert order(queue, 11) == ["low", "lower", "high"]
    assert queue.next_overdue_s(0) == 10 and queue.next_overdue_s(10) == 11 and queue.next_overdue_s(15) == float("inf")


def test_overdue_requests_of_tenants_take_turns_and_the_newest_tenant_comes_last():
    queue = WaitingQueue(10)
    for i in range(4):
        queue.add(request_of(f"flood-{i}", tenant="flood", priority=-1), 0)
    for i in range(2):
        queue.add(request_of(f"few-{i}", tenant="few", priority=i), 1)
    assert order(queue, 11) == ["flood-0", "few-0", "flood-1", "few-1", "flood-2", "flood-3"]
    assert serve(queue, 10).request.request_id == "flood-0"
    queue.add(request_of("third", tenant="third", priority=9, age_s=10.5), 11)
    # It is overdue since 10.5: behind the flood, which was served at 10, and before those of 11.
    assert order(queue, 11) == ["flood-1", "third", "few-0", "flood-2", "few-1", "flood-3"]


def test_an_overdue_request_that_a_replica_returned_costs_its_tenant_no_second_turn():
    queue = WaitingQueue(10)
    queue.add(request_of("a0", tenant="a"), 0)
    queue.add(request_of("a1", tenant="a"), 0.5)
    queue.add(request_of("b0", tenant="b"), 1)
    assert serve(queue, 20).request.request_id == "a0"
    queue.add(request_of("a0", tenant="a", age_s=20.0, is_returned=True), 20)
    assert [serve(queue, 20).request.request_id for _ in range(3)] == ["a0", "b0", "a1"]


def test_a_returned_request_goes_to_the_head_of_its_priority():
    queue = WaitingQueue(10)
    queue.add(request_of("first"), 0)
    queue.add(request_of("returned", is_returned=True, tenant="greedy"), 1)
    queue.add(request_of("high", priority=-1), 2)
    assert order(queue, 2) == ["high", "returned", "first"]


def test_a_tenant_with_many_requests_shares_equally_with_one_that_has_few():
    queue = WaitingQueue(1000)
    for i in range(100):
        queue.add(request_of(f"many-{i}", tenant="many"), 0)
    for i in range(10):
        queue.add(request_of(f"few-{i}", tenant="few"), 1)
    first = order(queue, 1)[:20]
    assert sum(id.startswith("few") for id in first) == 10


def test_fairness_counts_tokens_and_not_requests():
    queue = WaitingQueue(1000)
    for i in range(40):
        queue.add(request_of(f"long-{i}", tenant="long", max_tokens=300), 0)
        queue.add(request_of(f"short-{i}", tenant="short", max_tokens=100), 0)
    served = [serve(queue).request for _ in range(40)]
    assert sum(r.tenant == "long" for r in served) == 10
    assert abs(sum(r.max_tokens * (1 if r.tenant == "long" else -1) for r in served)) <= 300


def test_an_idle_tenant_gains_no_credit():
    """It had no service for long; when it comes back it takes turns and not everything."""
    queue = WaitingQueue(1000)
    queue.add(request_of("idle-0", tenant="idle"), 0)
    for i in range(200):
        queue.add(request_of(f"busy-{i}", tenant="busy"), 0)
    for _ in range(100):
        serve(queue)
    for i in range(50):
        queue.add(request_of(f"back-{i}", tenant="idle"), 1)
    tenants = [serve(queue, 1).request.tenant for _ in range(20)]
    assert tenants.count("idle") == 10


def test_a_tenant_does_not_lose_its_debt_by_letting_its_queue_run_empty():
    queue = WaitingQueue(1000)
    for i in range(20):
        queue.add(request_of(f"steady-{i}", tenant="steady", max_tokens=10), 0)
    queue.add(request_of("large", tenant="sneaky", max_tokens=100), 0)
    served = []
    while "large" not in served:
        served.append(serve(queue).request.request_id)
    queue.add(request_of("next", tenant="sneaky", max_tokens=100), 0)
    tenants = [serve(queue).request.tenant for _ in range(11)]
    assert tenants.index("sneaky") >= 9


def test_an_id_that_waits_already_keeps_its_place_and_takes_the_new_deadline():
    queue = WaitingQueue(10)
    queue.add(request_of("a", deadline_s=1.0), 0)
    queue.add(request_of("b"), 0)
    queue.add(request_of("a", deadline_s=5.0), 0.5)
    assert order(queue, 1) == ["a", "b"]
    assert queue.next_deadline_s == 5.5
    assert len(queue) == 2 and queue.num_of_tenant("") == 2


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "serve", "drop"]),
        st.integers(0, 2),  # priority
        st.integers(0, 3),  # tenant
        st.integers(1, 200),  # tokens
        st.booleans(),  # returned
    ),
    max_size=60,
)


@given(OPERATIONS)
def test_the_order_told_is_the_order_of_service(operations):
    """`in_order` looks ahead without serving; serving one by one must give the same."""
    queue = WaitingQueue(20)
    names: list[str] = []
    for now_s, (what, priority, tenant, tokens, is_returned) in enumerate(operations):
        if what == "add":
            names.append(f"r{now_s}")
            queue.add(
                request_of(
                    names[-1], priority=priority, tenant=f"t{tenant}", max_tokens=tokens, is_returned=is_returned
                ),
                now_s,
            )
        elif what == "serve" and len(queue):
            serve(queue, now_s)
        elif what == "drop" and names and (waiting := queue.find(names[tokens % len(names)])) is not None:
            queue.remove(waiting)
    now_s = len(operations)
    told = order(queue, now_s)
    assert len(told) == len(set(told)) == len(queue)
    assert told == [serve(queue, now_s).request.request_id for _ in range(len(queue))]
    assert not queue and not queue.num_tenants and queue.next_deadline_s == float("inf")


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(-3, 3), st.booleans()), max_size=80),
    st.integers(0, 5),
    st.integers(1, 3),
)
def test_an_overdue_request_waits_for_one_of_each_other_tenant_and_those_of_its_own(arrivals, max_wait_s, every_s):
    """Whatever the priorities, and however much the others send: one service each `every_s` seconds."""
    queue = WaitingQueue(max_wait_s)
    now_s = 0
    passed: dict[str, list[str]] = {}
    tenant_of: dict[str, str] = {}
    pending = list(arrivals)
    while pending or len(queue):
        while pending and not pending[0][3]:
            submit(queue, pending.pop(0), tenant_of, now_s)
        if pending:
            submit(queue, pending.pop(0), tenant_of, now_s)
        if now_s % every_s == 0 and len(queue):
            overdue = [w for w in queue.in_order(now_s) if queue.is_overdue(w, now_s)]
            for waiting in overdue:
                passed.setdefault(waiting.request.request_id, [])
            served = serve(queue, now_s)
            if overdue:
                assert served is overdue[0]
            for waiting in overdue:
                passed[waiting.request.request_id].append(served.request.tenant)
        now_s += 1
    for id, tenants in passed.items():
        own = tenants.count(tenant_of[id])
        # Its own older ones each take a turn, and so may each other tenant before each of them and before it.
        assert all(tenants.count(other) <= own for other in set(tenants) - {tenant_of[id]}), (id, tenants)


def submit(queue: WaitingQueue, arrival: tuple[int, int, int, bool], tenant_of: dict[str, str], now_s: float) -> None:
    num_more, tenant, priority, _ = arrival
    for _ in range(1 + 3 * num_more):
        id = f"r{len(tenant_of)}"
        tenant_of[id] = f"t{tenant}"
        queue.add(request_of(id, tenant=f"t{tenant}", priority=priority), now_s)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 100)), min_size=30, max_size=80))
def test_service_of_tenants_that_wait_all_the_time_differs_by_two_requests_at_most(requests):
    queue = WaitingQueue(1e9)
    for i, (tenant, tokens) in enumerate(requests):
        queue.add(request_of(f"r{i}", tenant=f"t{tenant}", max_tokens=tokens), 0)
    backlogged = {f"t{tenant}" for tenant, _ in requests}
    tokens_of = dict.fromkeys(backlogged, 0)
    while all(queue.num_of_tenant(tenant) for tenant in backlogged):
        served = serve(queue).request
        tokens_of[served.tenant] += served.max_tokens
        assert max(tokens_of.values()) - min(tokens_of.values()) <= 2 * 100


def test_looking_at_the_head_of_many_does_not_visit_them_all():
    queue = WaitingQueue(10)
    for i in range(2000):
        queue.add(request_of(f"r{i}", tenant=f"t{i % 100}"), 0)
    visited = []
    for waiting in islice(queue.in_order(0), 5):
        visited.append(waiting.request.request_id)
    assert visited == ["r0", "r1", "r2", "r3", "r4"]
