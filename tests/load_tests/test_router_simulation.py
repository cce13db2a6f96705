"""The simulated deployment: known times, conservation, and the same figures each time. No clock is read."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from load_tests import simulate_router
from load_tests.engine_sections.rendering import BEGIN, END
from load_tests.router_simulation import page, study
from load_tests.router_simulation.block_router import BlockRouter
from load_tests.router_simulation.cache import PageCache
from load_tests.router_simulation.replica import MAX_ROWS, SimReplica, pass_table
from load_tests.router_simulation.routers import Ideal, PowerOfTwo, RoundRobin, ShortestQueue
from load_tests.router_simulation.workload import SimRequest, SystemPrompts, draw_requests
from load_tests.router_simulation.world import HOP_S, Deployment, Router, World

T = pass_table()
ROUTERS: list[Callable[[], Router]] = [
    BlockRouter,
    ShortestQueue,
    lambda: ShortestQueue(0.3),
    PowerOfTwo,
    lambda: PowerOfTwo(0.3),
    RoundRobin,
    Ideal,
]


def request(number: int = 0, **changes: object) -> SimRequest:
    """One of 100 prompt tokens: a block to prefill, 28 passes of the first canvas, 64 of each other."""
    fields: dict[str, object] = {
        "number": number,
        "arrival_s": 0.0,
        "num_prompt_tokens": 100,
        "num_blocks": 2,
        "max_blocks": 2,
        "tokens_per_step": 1,
        **changes,
    }
    return SimRequest(**fields)  # type: ignore[arg-type]


def run(requests: list[SimRequest], router: Router, num_replicas: int = 1, **changes: object) -> World:
    world = World(Deployment(num_replicas=num_replicas, **changes), router)  # type: ignore[arg-type]
    world.run(requests)
    return world


def times(requests: list[SimRequest]) -> list[tuple[float | None, float | None]]:
    return [(r.first_block_s, r.finished_s) for r in requests]


def test_pass_times_are_those_measured_and_lines_between():
    assert T[1] == 0.00487 and T[16] == 0.0263 and len(T) == MAX_ROWS + 1
    assert T[6] == pytest.approx((0.00784 + 0.0139) / 2)


def test_a_request_alone_takes_the_time_of_its_passes():
    alone = request()
    run([alone], RoundRobin())
    # The canvas rides with the prompt's last block; the seal rides with the second canvas's first pass.
    first_s = HOP_S + T[2] + 27 * T[1]
    assert alone.first_block_s == pytest.approx(first_s)
    assert alone.finished_s == pytest.approx(first_s + T[2] + 63 * T[1])


def test_a_quicker_pace_takes_fewer_passes():
    quick = request(tokens_per_step=4, num_prompt_tokens=64 * 3)
    run([quick], RoundRobin())
    first_s = HOP_S + T[4] + 15 * T[1]
    assert times([quick]) == [(pytest.approx(first_s), pytest.approx(first_s + T[2] + 15 * T[1]))]


def test_a_request_that_comes_in_the_middle_of_a_pass_begins_with_the_next_one():
    first, second = request(0), request(1, arrival_s=T[2] + 2.5 * T[1], num_prompt_tokens=63, num_blocks=1)
    run([first, second], RoundRobin())
    # Three of the first one's passes are over when the one that runs ends, then one has two rows.
    assert second.first_block_s == pytest.approx(HOP_S + T[2] + 3 * T[1] + T[2])
    assert first.first_block_s == pytest.approx(HOP_S + T[2] + 3 * T[1] + T[2] + 23 * T[1])


def test_a_prompt_longer_than_a_pass_takes_several_with_the_canvas_behind_the_last():
    long = request(num_prompt_tokens=64 * 40, num_blocks=1, tokens_per_step=4)
    run([long], RoundRobin())
    assert long.first_block_s == pytest.approx(HOP_S + T[32] + T[9] + 15 * T[1])


def test_lanes_are_taken_in_order_of_arrival():
    requests = [request(i, num_blocks=1, num_prompt_tokens=0) for i in range(3)]
    run(requests, RoundRobin(), num_lanes=2)
    # The first one's pass has begun when the others come; the third has a pass beside the second one's last.
    first_s = HOP_S + T[1] + 63 * T[2]
    ends_s = [first_s, first_s + T[2], first_s + T[2] + 63 * T[1]]
    assert [r.finished_s for r in requests] == pytest.approx(ends_s)


def pass_by_pass(requests: list[SimRequest], num_lanes: int) -> list[tuple[float, float]]:
    """The slow twin of stretches: one replica, one pass at a time. (first block, end) of each request."""
    coming = sorted(((r.arrival_s + HOP_S, r.number) for r in requests), reverse=True)
    by_number = {r.number: r for r in requests}
    waiting: list[int] = []
    prefill: dict[int, int] = {}
    left: dict[int, int] = {}
    block = dict.fromkeys(by_number, 0)
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    now_s, num_seals = 0.0, 0
    while len(last) < len(requests):
        if not waiting and not prefill and not left:
            now_s = max(now_s, coming[-1][0])
        while coming and coming[-1][0] <= now_s:
            waiting.append(coming.pop()[1])
        while waiting and len(prefill) + len(left) < num_lanes:
            number = waiting.pop(0)
            prefill[number] = by_number[number].num_prompt_blocks
        rows = len(left) + num_seals
        num_seals = 0
        for number in list(prefill):
            taken = min(prefill[number], MAX_ROWS - rows)
            prefill[number] -= taken
            rows += taken
            if not prefill[number] and rows < MAX_ROWS:
                rows += 1
                del prefill[number]
                left[number] = by_number[number].num_passes(0)
        now_s += T[rows]
        for number in list(left):
            left[number] -= 1
            if left[number]:
                continue
            if block[number] == 0:
                first[number] = now_s
            block[number] += 1
            del left[number]
            if block[number] == by_number[number].num_blocks:
                last[number] = now_s
            else:
                num_seals += 1
                left[number] = by_number[number].num_passes(block[number])
    return [(first[r.number], last[r.number]) for r in requests]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32), st.floats(1, 20), st.integers(1, 16))
def test_stretches_of_passes_give_the_times_of_single_passes(seed, rate, num_lanes):
    requests = draw_requests(seed, rate, 5.0, is_bursty=bool(seed % 2))
    if requests:
        run(requests, RoundRobin(), num_lanes=num_lanes)
        expected = pass_by_pass(requests, num_lanes)
        assert [t for pair in times(requests) for t in pair] == pytest.approx([t for pair in expected for t in pair])


def test_with_one_replica_the_direct_routers_do_the_same():
    def ends(router: Router) -> list[tuple[float | None, float | None]]:
        requests = draw_requests(3, 4.0, 20.0)
        run(requests, router)
        return times(requests)

    expected = ends(RoundRobin())
    assert all(ends(make()) == expected for make in ROUTERS[1:6])


def test_asking_the_block_router_costs_two_hops_where_there_is_nothing_to_choose():
    requests = [request(i, arrival_s=5.0 * i) for i in range(3)]
    direct = [request(i, arrival_s=5.0 * i) for i in range(3)]
    run(requests, BlockRouter())
    run(direct, RoundRobin())
    late = [a.first_block_s - b.first_block_s for a, b in zip(requests, direct, strict=True)]
    assert late == pytest.approx([2 * HOP_S] * 3)


class Watched:
    """Any router, and what must hold at each boundary."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.arrive, self.delivered = router.arrive, router.delivered
        self.num_boundaries = 0

    def start(self, world: World) -> None:
        self._world = world
        self._router.start(world)

    def boundary(self, replica: SimReplica) -> None:
        self.num_boundaries += 1
        assert replica.num_running <= replica.num_lanes
        assert not replica.can_admit()
        assert (replica.ends_s is None) == (replica.num_running == 0)
        assert 0 <= replica.cache.num_available <= replica.cache.num_pages
        assert self._world.num_sent[replica.index] >= replica.num_running + len(replica.waiting)
        self._router.boundary(replica)


@pytest.mark.parametrize("make", ROUTERS)
@pytest.mark.parametrize("system", [None, SystemPrompts(num_prompts=20)])
def test_every_request_is_served_once_by_every_router(make, system):
    requests = draw_requests(5, 12.0, 15.0, is_bursty=True, system=system)
    router = Watched(make())
    world = run(requests, router, num_replicas=3, num_lanes=4, num_pages=300, system=system)
    assert all(
        r.first_block_s is not None and r.finished_s is not None and r.arrival_s < r.first_block_s <= r.finished_s
        for r in requests
    )
    assert world.num_sent == [0, 0, 0]
    assert all(not r.waiting and not r.num_running for r in world.replicas)
    assert all(r.cache.num_available == 300 for r in world.replicas)
    assert router.num_boundaries > len(requests)


def test_the_policy_rejects_and_loses_nobody_beyond_saturation():
    requests = draw_requests(1, 30.0, 10.0)
    router = BlockRouter()
    run(requests, router, num_replicas=2, num_lanes=4)
    assert router.num_rejected == 0 and router.policy.num_waiting == 0
    assert all(r.finished_s is not None for r in requests)


def test_the_same_seed_gives_the_same_figures():
    load = study.Load(deployment=Deployment(num_replicas=2), rate=7.0, measured_s=10.0, warm_up_s=2.0)
    assert load.run(BlockRouter(), 1) == load.run(BlockRouter(), 1)
    assert load.run(BlockRouter(), 1) != load.run(BlockRouter(), 2)


def test_old_lengths_send_a_burst_to_one_replica_and_fresh_ones_do_not():
    def most(router: Router) -> int:
        requests = [request(i, arrival_s=0.4 + 0.001 * i) for i in range(8)]
        requests[0].arrival_s = 0.0  # replica 0 or 1 has it for long, the other one is empty
        world = World(Deployment(num_replicas=2), router)
        sent: list[int] = []
        send = world.send
        world.send = lambda r, index, delay_s=HOP_S: (sent.append(index), send(r, index, delay_s))[1]  # type: ignore[method-assign]
        world.run(requests)
        return max(sent[1:].count(0), sent[1:].count(1))

    assert most(ShortestQueue(0.3)) == 7
    assert most(ShortestQueue()) == 4


def test_arrivals_have_the_rate_asked_for_and_bursts_the_same_mean():
    for is_bursty in (False, True):
        counts = [len(draw_requests(seed, 20.0, 100.0, is_bursty=is_bursty)) for seed in range(8)]
        assert sum(counts) / 8 == pytest.approx(2000, rel=0.04)


def test_bursts_are_more_uneven_than_poisson_arrivals():
    def dispersion(is_bursty: bool) -> float:
        counts = [0] * 400
        for r in draw_requests(0, 50.0, 200.0, is_bursty=is_bursty):
            counts[min(int(2 * r.arrival_s), 399)] += 1
        return sum((c - 25) ** 2 for c in counts) / 400 / 25

    assert dispersion(False) < 1.4 and dispersion(True) > 3


# Pages.


def shared(number: int, group: int, blocks: int = 4) -> SimRequest:
    """Four blocks of system prompt, one block of its own, one block written: two private pages."""
    return request(
        number, num_prompt_tokens=64 * (blocks + 1), num_blocks=1, system_prompt=group, num_shared_blocks=blocks
    )


def test_a_system_prompt_is_found_until_it_is_evicted_last_pages_first():
    cache = PageCache(10)
    a, b, c = shared(0, 7), shared(1, 7), shared(2, 8)
    assert cache.take(a) == 0 and cache.num_available == 4
    assert cache.take(b) == 4 and cache.num_available == 2
    assert not cache.can_hold(c)
    cache.give_back(a)
    assert cache.num_available == 4
    cache.give_back(b)
    assert cache.num_available == 10 and cache.num_found(7) == 4 and cache.changed == {7}
    assert cache.take(c) == 0  # 6 pages: b's private page stays no longer, then 7 loses its end
    assert cache.num_found(7) + cache.num_found(8) <= 10 - 2
    assert 0 < cache.num_found(7) <= 4


def test_the_least_recently_used_prompt_goes_first():
    cache = PageCache(14)
    for number, group in enumerate((1, 2, 1)):
        used = shared(number, group)
        cache.take(used)
        cache.give_back(used)
    cache.take(shared(3, 3))
    assert cache.num_found(1) == 4 and cache.num_found(2) < 4


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32), st.integers(8, 60))
def test_pages_held_and_cached_never_exceed_the_pool(seed, num_pages):
    rng = random.Random(seed)
    cache = PageCache(num_pages)
    held: list[SimRequest] = []
    for number in range(100):
        new = shared(number, rng.randrange(5))
        if rng.random() < 0.6 and cache.can_hold(new):
            cache.take(new)
            held.append(new)
        elif held:
            cache.give_back(held.pop(rng.randrange(len(held))))
        groups = {r.system_prompt for r in held}
        assert cache.num_available == num_pages - 2 * len(held) - 4 * len(groups)
        assert all(cache.num_found(group) == 4 for group in groups)
        assert sum(cache.num_found(group) for group in cache.groups) <= num_pages - 2 * len(held)


def test_the_block_router_finds_prefixes_that_chance_does_not():
    system = SystemPrompts(num_prompts=60, num_blocks=16)
    found = {}
    for name, router in (("block", BlockRouter()), ("two", PowerOfTwo())):
        requests = draw_requests(2, 12.0, 30.0, system=system)
        run(requests, router, num_replicas=4, num_pages=500, system=system)
        found[name] = sum(r.num_found_blocks for r in requests) / sum(r.num_shared_blocks for r in requests)
    assert found["block"] > 1.4 * found["two"] > 0


# What is shown.


@pytest.fixture(scope="module")
def result() -> dict[str, object]:
    scale = study.Scale(
        num_replicas=(2,), requests_per_run=60, main_seeds=2, other_seeds=1, prefix_seeds=1, prefix_replicas=2,
        overload_seeds=1, least_measured_s=1.0, warm_up_s=1.0, saturation_requests=300,
    )  # fmt: skip

    def silent(line: str) -> None:
        assert "replicas" in line

    return {
        "command": "python -m load_tests.simulate_router",
        "date": "2000-01-01",
        "python": "3",
        "took_s": 1.0,
        "saturation_per_s": study.saturation_rate(num_requests=200),
        "balance": study.balance(scale, silent),
        "overload": study.overload(scale, silent),
        "prefixes": study.prefixes(scale, silent),
    }


def test_the_study_has_a_cell_for_each_load_and_all_routers_in_it(result):
    assert [(c["load"], c["arrivals"], c["seeds"]) for c in result["balance"]] == [
        (0.6, "Poisson", 1), (0.6, "bursty", 1), (0.8, "Poisson", 2), (0.8, "bursty", 1),
        (0.95, "Poisson", 1), (0.95, "bursty", 1),
    ]  # fmt: skip
    assert all(set(c["routers"]) == set(study.ROUTERS) for c in result["balance"])
    assert len(result["prefixes"]) == len(study.SYSTEMS)


def test_a_bar_is_met_or_missed_by_its_figure(result):
    changed = json.loads(json.dumps(result))
    for cell in changed["balance"]:
        cell["ratios"]["over_shortest_queue"] = {"mean": 1.02, "error": 0.001}
    verdicts = [row["verdict"] for row in page.bars(changed)]
    assert verdicts[:2] == ["met", "met"]
    changed["balance"][0]["ratios"]["over_shortest_queue"]["mean"] = 1.021
    assert [row["verdict"] for row in page.bars(changed)][:2] == ["met", "**missed**"]
    changed["prefixes"][0]["hits_over_power_of_two"]["mean"] = 1.99
    assert page.bars(changed)[-len(study.SYSTEMS)]["verdict"] == "**missed**"


def test_the_command_shows_a_file_and_writes_between_the_marks(result, tmp_path, capsys):
    source, target = tmp_path / "routing.json", tmp_path / "page.md"
    source.write_text(json.dumps(result))
    target.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert simulate_router.main(["--from", str(source), "--markdown", str(target)]) == 0
    shown, written = capsys.readouterr().out, target.read_text()
    assert "p95 of the time to the first block, 2 replicas" in shown
    assert written.startswith(f"before\n{BEGIN}\n`python -m") and written.endswith(f"{END}\nafter\n")
    assert "old" not in written.split("\n")[2] and "| block router" in written


def test_the_page_shows_the_figures_of_the_file_beside_it(tmp_path):
    docs = Path(__file__).resolve().parents[2] / "docs"
    copy = tmp_path / "page.md"
    copy.write_text((docs / "routing.md").read_text())
    page.write_markdown(json.loads((docs / "routing.json").read_text()), copy)
    assert copy.read_text() == (docs / "routing.md").read_text()
