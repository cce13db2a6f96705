"""What holds for every workload. `Driver` checks pages, lanes, budgets, turns and texts at each step."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from engine.errors import QueueFull
from engine.output import FinishReason
from tests.engine.scheduling.driver import Driver, Spec, draw, generate_alone, prompt_of

MAX_POSITIONS = 24


@dataclass(frozen=True, kw_only=True)
class Setting:
    block_size: int
    num_extra_pages: int
    max_rows: int
    max_lanes: int
    max_prefill_rows: int
    share_prefixes: bool
    is_late: bool
    batching: str
    has_guided: bool
    """Some requests may be guided."""

    @property
    def num_members(self) -> int:
        """Lanes and page tables of the largest request."""
        return 2 if self.has_guided else 1

    def driver(self) -> Driver:
        return Driver(
            block_size=self.block_size,
            # The largest request always fits alone, often with next to nothing beside it.
            num_pages=self.num_members * -(-MAX_POSITIONS // self.block_size) + self.num_extra_pages,
            max_rows=self.max_rows,
            max_lanes=self.max_lanes,
            max_prefill_rows=self.max_prefill_rows,
            share_prefixes=self.share_prefixes,
            is_late=self.is_late,
            batching=self.batching,
        )


def settings_of(has_guided: bool) -> st.SearchStrategy[Setting]:
    return st.builds(
        Setting,
        block_size=st.sampled_from([1, 2, 4]),
        num_extra_pages=st.integers(0, 12),
        max_rows=st.integers(2, 8),
        max_lanes=st.integers(1 + has_guided, 8),
        max_prefill_rows=st.integers(1, 8),
        share_prefixes=st.booleans(),
        is_late=st.booleans(),
        batching=st.sampled_from(["independent", "independent", "lockstep"]),
        has_guided=st.just(has_guided),
    )


SETTINGS = settings_of(False)
GUIDED_SETTINGS = settings_of(True)


@st.composite
def specs(draw_from: st.DrawFn, id: str, priorities: st.SearchStrategy[int], has_guided: bool = False) -> Spec:
    prompt_length = draw_from(st.integers(0, MAX_POSITIONS - 1))
    is_guided = has_guided and draw_from(st.sampled_from([True, True, False]))
    return Spec(
        id=id,
        prompt=prompt_of(draw_from(st.integers(0, 1)), prompt_length),
        max_tokens=draw_from(st.integers(1, MAX_POSITIONS - prompt_length)),
        priority=draw_from(priorities),
        tokens_per_step=draw_from(st.integers(1, 5)),
        # Sometimes the same text twice, so that equal blocks are sealed at the same time.
        stream=draw_from(st.sampled_from(["", "", "one"])),
        end_percent=draw_from(st.sampled_from([0, 0, 10, 60])),
        is_adaptive=draw_from(st.booleans()),
        has_drafts=not is_guided and draw_from(st.sampled_from([False, False, True])),
        is_guided=is_guided,
        cutoffs=tuple(sorted(draw_from(st.sets(st.integers(1, 12), max_size=3)))) if is_guided else (),
    )


@st.composite
def workloads(
    draw_from: st.DrawFn, priorities: st.SearchStrategy[int], has_guided: bool = False
) -> list[tuple[int, Spec]]:
    """Requests, each with the number of passes that run before it arrives."""
    num_requests = draw_from(st.integers(1, 8))
    return [
        (draw_from(st.integers(0, 4)), draw_from(specs(str(i), priorities, has_guided))) for i in range(num_requests)
    ]


def preempt_one(driver: Driver, seed: int) -> None:
    """Now and then preempt some sequence, running or not."""
    number = draw(seed, driver.num_passes)
    if number % 4 == 0 and driver.sequences:
        driver.preempt(str(number % len(driver.sequences)))


def run_workload(setting: Setting, workload: list[tuple[int, Spec]], preemption_seed: int) -> None:
    """Serve all; each must end with the text that it has alone."""
    driver = setting.driver()
    for delay, spec in workload:
        for _ in range(delay):
            driver.step()
            preempt_one(driver, preemption_seed)
        driver.add(spec)
    for _ in range(20):
        driver.step()
        preempt_one(driver, preemption_seed)
    driver.finish()
    for _, spec in workload:
        text, reason = generate_alone(spec, setting.block_size)
        assert driver.sequences[spec.id].text_token_ids == text
        assert driver.reasons[spec.id] is reason


@settings(deadline=None, max_examples=400)
@given(SETTINGS, workloads(st.integers(-1, 1)), st.integers(0, 2**32))
def test_every_request_ends_with_the_text_it_has_alone(setting, workload, preemption_seed):
    """In any company, order of arrival, prefill limit and pool, and with preemptions between any two passes."""
    run_workload(setting, workload, preemption_seed)


@settings(deadline=None, max_examples=200)
@given(GUIDED_SETTINGS, workloads(st.integers(-1, 1), has_guided=True), st.integers(0, 2**32))
def test_guided_requests_too_with_copies_whose_pages_are_never_stale(setting, workload, preemption_seed):
    run_workload(setting, workload, preemption_seed)


@settings(deadline=None, max_examples=100)
@given(SETTINGS, workloads(st.just(0)))
def test_requests_of_one_priority_start_in_order_of_arrival(setting, workload):
    driver = setting.driver()
    first_admissions: list[str] = []
    for _, spec in workload:
        driver.add(spec)
    while driver.scheduler.has_work:
        for admission in driver.step().admitted:
            if admission.sequence.num_preemptions == 0:
                first_admissions.append(admission.sequence.id)
    assert first_admissions == [spec.id for _, spec in workload]


@settings(deadline=None, max_examples=100)
@given(SETTINGS, workloads(st.integers(-1, 1)))
def test_the_same_calls_give_the_same_plans(setting, workload):
    def plans() -> list[list[tuple[object, ...]]]:
        driver = setting.driver()
        found = []
        for _, spec in workload:
            driver.add(spec)
        while driver.scheduler.has_work:
            plan = driver.step()
            found.append([(r.sequence.id, r.kind, r.block, r.lane, r.page_ids, r.num_commits) for r in plan.rows])
        return found

    assert plans() == plans()


class AnyCalls(RuleBasedStateMachine):
    """Adds, steps, aborts, failures and preemptions in any order; the driver checks after each."""

    @initialize(setting=st.one_of(SETTINGS, GUIDED_SETTINGS))
    def start(self, setting: Setting) -> None:
        self.driver, self.has_guided = setting.driver(), setting.has_guided
        self.gone: set[str] = set()

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        self.driver.add(data.draw(specs(str(len(self.driver.sequences)), st.integers(-1, 1), self.has_guided)))

    @rule(num_passes=st.integers(1, 4))
    def step(self, num_passes: int) -> None:
        for _ in range(num_passes):
            self.driver.step()

    @rule(number=st.integers(0, 30))
    def abort(self, number: int) -> None:
        if self.driver.abort(str(number)):
            self.gone.add(str(number))

    @rule(number=st.integers(0, 30))
    def abort_during_a_pass(self, number: int) -> None:
        driver = self.driver
        plan = driver.scheduler.plan()
        driver.check_plan(plan)
        driver.run(plan)
        self.abort(number)
        while driver.in_flight:
            driver.land()

    @rule(number=st.integers(0, 30))
    def fail(self, number: int) -> None:
        sequence = self.driver.sequences.get(str(number))
        if sequence is not None and (sequence.is_running or sequence.is_waiting):
            self.driver.device.fail_next.add(sequence.id)

    @rule(number=st.integers(0, 30))
    def preempt(self, number: int) -> None:
        if str(number) in self.driver.sequences:
            self.driver.preempt(str(number))

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.finish()
        assert set(self.driver.sequences) == set(self.driver.reasons) | self.gone
        assert not set(self.driver.reasons) & self.gone


TestAnyCalls = AnyCalls.TestCase
TestAnyCalls.settings = settings(deadline=None, max_examples=200, stateful_step_count=50)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_long_mix_of_shared_prefixes_prefill_and_decode_in_a_tiny_pool(seed, is_late):
    """Hundreds of requests with few pages: each way of losing and sharing a page happens many times."""
    rng = random.Random(seed)
    driver = Driver(
        block_size=4, num_pages=10, max_rows=6, max_lanes=6, max_prefill_rows=3, max_waiting=12, is_late=is_late
    )
    happened: Counter[str] = Counter()
    for number in range(600):
        prompt_length = rng.choice([0, 3, 4, 5, 8, 13, 16, 17, 21])
        max_tokens = rng.randint(1, 16)
        # Twice its pages must fit.
        guided = {"is_guided": True, "cutoffs": (2, 7)} if prompt_length + max_tokens <= 20 else {}
        spec = Spec(
            id=str(number),
            prompt=prompt_of(rng.choice([0, 0, 0, 1, 2]), prompt_length),
            max_tokens=max_tokens,
            priority=rng.choice([0, 0, 0, 0, -1, 1]),
            tokens_per_step=rng.randint(1, 4),
            stream=rng.choice(["", "", "one"]),
            end_percent=rng.choice([0, 0, 5, 40]),
            is_adaptive=rng.random() < 0.3,
            **rng.choice([{}, {}, {}, {"has_drafts": True}, guided]),
        )
        try:
            driver.add(spec)
        except QueueFull:
            happened["refused"] += 1
        for _ in range(rng.choice([0, 0, 0, 1, 2, 20])):
            driver.step()
        if rng.random() < 0.1:
            happened["aborted"] += driver.abort(str(rng.randint(max(0, number - 10), number)))
        if rng.random() < 0.02 and driver.scheduler.num_running:
            running = [s.id for s in driver.sequences.values() if s.is_running]
            driver.device.fail_next.add(rng.choice(running))
    driver.finish()
    happened += driver.counts + Counter(reason.value for reason in driver.reasons.values())
    assert happened["length"] + happened["stop"] + happened["error"] + happened["aborted"] == len(driver.sequences)
    names = (
        "aborted",
        "error",
        "refused",
        "preempted",
        "cached_tokens",
        "mixed",
        "drafts",
        "rewritten",
        FinishReason.STOP.value,
    )
    for name in names:
        assert happened[name] > 0, f"{name} never happened: {happened}"
    assert happened["admitted"] > len(driver.reasons)
