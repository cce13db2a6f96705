"""When requests are sent and what they hold: the same from the same seed, whatever the server does."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from load_tests.engine_sections.report import Section
from load_tests.replicas import order, parse
from load_tests.serving_sections import figures
from load_tests.serving_sections.client import Answer, Outcome
from load_tests.serving_sections.events import BlockSpan, Stream
from load_tests.serving_sections.pacing import arrivals, closed_loop, open_loop
from load_tests.serving_sections.traffic import Traffic
from load_tests.stream_lag import late, moments
from serve_app.schemas import CompletionRequest


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


def test_arrivals_have_the_rate_that_was_asked_for_and_follow_from_the_seed():
    moments = arrivals(5.0, 2000.0, seed=1)
    assert moments == arrivals(5.0, 2000.0, seed=1) != arrivals(5.0, 2000.0, seed=2)
    assert moments == sorted(moments) and moments[-1] < 2000.0
    assert len(moments) == pytest.approx(10_000, rel=0.05)
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
    # Of a Poisson process the gaps' standard deviation equals their mean.
    mean = sum(gaps) / len(gaps)
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.05)


def test_slow_answers_do_not_slow_an_open_loop():
    """No answer comes before the last request is sent."""
    clock, sent = Clock(), []
    all_sent = asyncio.Event()

    async def send(body, due):
        sent.append((body["n"], due))
        if len(sent) == 4:
            all_sent.set()
        await all_sent.wait()
        return Answer(due=due, sent=clock())

    bodies = ({"n": n} for n in itertools.count())
    answers = asyncio.run(open_loop(send, bodies, [0.5, 1.0, 1.0, 7.0], clock=clock, sleep=clock.sleep))
    assert sorted(sent) == [(0, 100.5), (1, 101.0), (2, 101.0), (3, 107.0)]
    assert len(answers) == 4


def test_a_closed_loop_keeps_its_clients_busy_until_the_time_is_over():
    clock, running, most = Clock(), 0, 0

    async def send(body, due):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        clock.now += 1.0
        running -= 1
        return Answer(due=due, sent=due, status=200)

    bodies = iter([{"n": n} for n in range(100)])
    answers = asyncio.run(closed_loop(send, bodies, num_clients=3, seconds=9.5, clock=clock))
    assert most == 3
    # Ten begin before 9.5 s have passed, and those that run then end too.
    assert 10 <= len(answers) <= 12
    assert all(answer.sent < 109.5 for answer in answers)


def test_the_same_number_is_always_the_same_request_and_shares_are_kept():
    traffic = Traffic(steered_share=0.25, attributed_share=0.75, shared_share=0.5, num_shared=2, concepts=(5, 6))
    bodies = [traffic.body(index) for index in range(400)]
    assert bodies[:3] == list(itertools.islice(traffic.bodies(), 3))
    assert traffic.body(7) != Traffic(seed=1).body(7)
    assert sum("steering" in body for body in bodies) == pytest.approx(100, abs=30)
    assert sum("attribution" in body for body in bodies) == pytest.approx(300, abs=30)
    long = [tuple(body["prompt"][:128]) for body in bodies if len(body["prompt"]) > 128]
    common = {prefix for prefix in long if long.count(prefix) > 20}
    assert len(common) == 2


def test_every_request_is_one_that_the_server_takes():
    traffic = Traffic(policies=("confidence", "threshold", "lossless"), steered_share=1.0, attributed_share=1.0)
    for index in range(20):
        parsed = CompletionRequest.model_validate(traffic.body(index))
        assert parsed.stream and parsed.ignore_eos and parsed.attribution.level == "token"
        assert 64 <= parsed.max_tokens <= 256


def outcome(due: float, ended: float, *, code=None, is_cut=False) -> Outcome:
    blocks = [BlockSpan(due + 1, due + 2, 8), BlockSpan(due + 2, due + 4, 8)]
    stream = Stream(first_byte=due + 0.5, first_token=due + 1, blocks=blocks, num_tokens=16, is_done=not is_cut)
    return Outcome(due, due + 0.25, ended, stream, code=code, is_cut=is_cut)


def test_waits_count_from_when_a_request_was_due():
    waits = figures.waits([outcome(10.0, 15.0)])
    assert waits == {
        "first byte": [0.5],
        "first token": [1.0],
        "first block": [2.0],
        "between blocks": [2.0],
        "end to end": [5.0],
    }


def test_errors_are_counted_by_code_and_broken_streams_have_no_end():
    outcomes = [outcome(0.0, 5.0), outcome(0.0, 5.0, code="queue_full"), outcome(0.0, 9.0, is_cut=True)]
    assert figures.error_counts(outcomes) == {"queue_full": 1, "cut": 1}
    assert figures.waits(outcomes)["end to end"] == [5.0]
    section = Section("load")
    figures.describe(section, outcomes, loop="closed")
    served, _, errors = section.tables
    (row,) = served["rows"]
    assert (row["requests"], row["ok"], row["cut"]) == (3, 1, 1)
    assert row["tokens_per_s"] == pytest.approx(16 / (9.0 - 0.25), rel=1e-4)
    assert row["sent_late_ms"] == 250
    assert errors["rows"] == [{"loop": "closed", "code": code, "requests": 1} for code in ("cut", "queue_full")]


def test_percentiles_of_a_wait():
    spread = figures.spread([n / 1000 for n in range(101)])
    assert spread == {"count": 101, "at_p50_ms": 50.0, "at_p95_ms": 95.0, "at_p99_ms": 99.0}
    assert figures.spread([]) == {"count": 0, "at_p50_ms": None, "at_p95_ms": None, "at_p99_ms": None}


def test_tokens_tell_when_they_were_made_once():
    text = {"choices": [{"text": "120 130 "}]}
    step = {"choices": [], "diffusion": {"type": "step", "commits": [{"token": "120 "}, {"token": "130 "}]}}
    assert moments(text, "text") == [120, 130] == moments(step, "steps")
    assert moments(text, "steps") == []
    assert moments({"choices": [], "diffusion": {"type": "block.started"}}, "steps") == []


def test_lag_is_right_where_the_moment_starts_again_from_zero():
    assert late(200.050, 0) == pytest.approx(50)
    assert late(200.010, 99_990) == pytest.approx(20)
    # Clocks are read one after the other: what came at once may seem to have come before.
    assert late(199.999, 0) == pytest.approx(-1)


@pytest.mark.parametrize("router", ["both", "on", "off"])
def test_replicas_only_ever_leave_and_none_is_loaded_twice(router):
    orders = order(parse(["--router", router, "--replicas", "3"]))
    counts = [count for count, _ in orders]
    assert counts == sorted(counts, reverse=True) and {3, 1} == set(counts)
    ways = [way for _, way in orders]
    assert ways == ways[::-1], "the ingress is replaced as seldom as can be"
