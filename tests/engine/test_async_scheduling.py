"""Passes are planned and launched ahead of results: what callers see stays what it is without that."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest

from engine import (
    AttributionParams,
    BlockFinished,
    BlockStarted,
    Committed,
    Finished,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    Started,
)
from tests.checkpoints import EOT

BLOCK = EOT.block


def asked(index: int, num_prompt: int = 5, max_tokens: int = 2 * BLOCK + 3, **values) -> GenerateRequest:
    sampling = {"temperature": 0.0, "ignore_eos": True, "seed": index, **values.pop("sampling", {})}
    return GenerateRequest(
        prompt_token_ids=EOT.plain_ids(num_prompt, seed=index),
        max_tokens=max_tokens,
        sampling=SamplingParams(**sampling),
        request_id=f"r{index}",
        **values,
    )


def decisions(output) -> list[tuple[int, int, int]]:
    return [(c.denoising_step, c.position, c.token_id) for c in output.commits]


def launches(engine) -> list[int]:
    """Rows of every pass that the engine will launch from now on."""
    found, launch = [], engine.runner.launch

    def counted(rows, num_logprobs):
        found.append(len(rows))
        return launch(rows, num_logprobs)

    engine.runner.launch = counted
    return found


def events_by_request(engine, requests):
    for request in requests:
        engine.add_request(request)
    events = defaultdict(list)
    while engine.has_work:
        for event in engine.step():
            events[event.request_id].append(event)
    return events


def test_where_the_number_of_commits_is_known_no_pass_is_wasted(make_engine):
    """Nor is a row: the last pass of a request is not followed by one that finds nothing to do."""
    requests = [asked(n, max_tokens=20 + 9 * n, sampling={"tokens_per_step": 1 + n % 3}) for n in range(5)]
    soon, late = (make_engine(EOT, async_scheduling=flag) for flag in (False, True))
    rows = [launches(engine) for engine in (soon, late)]
    outputs = [engine.generate(requests) for engine in (soon, late)]
    assert rows[0] == rows[1]
    assert [o.num_forward_passes for o in outputs[0]] == [o.num_forward_passes for o in outputs[1]]


def test_the_next_pass_is_launched_before_the_last_one_is_read(make_engine):
    engine = make_engine(EOT, async_scheduling=True)
    log, launch = [], engine.runner.launch

    def logged(rows, num_logprobs):
        log.append("launch")
        in_flight = launch(rows, num_logprobs)
        read = in_flight.read
        in_flight.read = lambda: log.append("read") or read()
        return in_flight

    engine.runner.launch = logged
    engine.generate([asked(0, max_tokens=4)])
    assert log == ["launch", "launch", "read", "launch", "read", "launch", "read", "read"]


def test_an_end_that_nobody_has_read_costs_at_most_one_pass_and_commits_nothing(make_engine):
    ends = {"ignore_eos": False, "logit_bias": {EOT.vocab_size - 6: 4.0}}
    requests = [asked(n, max_tokens=3 * BLOCK, sampling=ends) for n in range(6)]
    soon, late = (make_engine(EOT, async_scheduling=flag) for flag in (False, True))
    rows = [launches(engine) for engine in (soon, late)]
    stopped = 0
    for request in requests:
        counts = [len(r) for r in rows]
        (a,), (b,) = soon.generate([request]), late.generate([request])
        assert (a.token_ids, a.commits, a.num_denoising_steps) == (b.token_ids, b.commits, b.num_denoising_steps)
        extra = (len(rows[1]) - counts[1]) - (len(rows[0]) - counts[0])
        assert extra in (0, 1)
        stopped += a.finish_reason is FinishReason.STOP
    assert stopped > 2


@pytest.mark.parametrize("explain_interval_s", [0.0, 1000.0])
@pytest.mark.parametrize("is_async", [False, True])
def test_events_of_a_request_come_in_order_also_when_explanations_are_late(make_engine, is_async, explain_interval_s):
    engine = make_engine(EOT, async_scheduling=is_async, explain_interval_s=explain_interval_s)
    requests = [asked(n, attribution=AttributionParams(top_k=2) if n % 2 else None) for n in range(4)]
    for events in events_by_request(engine, requests).values():
        assert isinstance(events[0], Started) and isinstance(events[-1], Finished)
        committed = []
        for event in events[1:-1]:
            if isinstance(event, BlockStarted):
                expected, block = set(range(event.start, event.end)), event.block
            elif isinstance(event, Committed):
                assert event.block == block and {c.position for c in event.commits} <= expected
                expected -= {c.position for c in event.commits}
                committed += event.commits
            elif isinstance(event, BlockFinished):
                assert not expected, "a block finishes when all of it has been handed out"
        assert events[-1].output.commits == tuple(committed)


@pytest.mark.parametrize("num_steps", range(1, 8))
def test_an_abort_with_passes_in_flight_ends_the_request_once_and_harms_nobody(make_engine, num_steps):
    engine = make_engine(EOT, async_scheduling=True, max_lanes=2)
    (alone,) = make_engine(EOT).generate([asked(1, attribution=AttributionParams())])
    for request in (asked(0, attribution=AttributionParams()), asked(1, attribution=AttributionParams())):
        engine.add_request(request)
    events = [event for _ in range(num_steps) for event in engine.step()]
    engine.abort("r0")
    # The id is free as soon as its end has been handed out, and the lane goes to the next request.
    events += engine.step()
    engine.add_request(asked(0, num_prompt=9))
    while engine.has_work:
        events += engine.step()
        engine.check_integrity()
    finished = [event.output for event in events if isinstance(event, Finished)]
    assert [output.request_id for output in finished].count("r0") == 2
    (other,) = (output for output in finished if output.request_id == "r1")
    assert decisions(other) == decisions(alone)


def test_an_interrupt_while_the_host_waits_loses_no_commits(make_engine):
    """The pass had run: its commits were in the lane, and the host never learned of them."""
    (expected,) = make_engine(EOT).generate([asked(0)])
    engine = make_engine(EOT, async_scheduling=True)
    engine.add_request(asked(0))
    events = [event for _ in range(5) for event in engine.step()]
    in_flight = engine._in_flight[0][1]
    read = in_flight.read

    def interrupted():
        in_flight.read = read
        raise KeyboardInterrupt

    in_flight.read = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    while engine.has_work:
        events += engine.step()
    assert events[-1].output.commits == expected.commits


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_steps", [0, 1, 5, 20])
def test_a_launch_that_fails_after_the_device_has_committed_loses_nothing(make_engine, num_steps, is_async):
    """The lane had the commit, the host planned it again, and the next step ended in an assertion."""
    requests = [asked(n, attribution=AttributionParams()) for n in range(3)]
    alone = [make_engine(EOT).generate([request])[0] for request in requests]
    engine = make_engine(EOT, async_scheduling=is_async)
    for request in requests:
        engine.add_request(request)
    events = [event for _ in range(num_steps) for event in engine.step()]
    launch = engine.runner.launch

    def failing(*arguments):
        launch(*arguments)
        raise KeyboardInterrupt

    engine.runner.launch = failing
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.runner.launch = launch
    engine.check_integrity()
    while engine.has_work:
        events += engine.step()
    outputs = {event.request_id: event.output for event in events if isinstance(event, Finished)}
    assert [decisions(outputs[f"r{n}"]) for n in range(3)] == [decisions(output) for output in alone]
    assert sum(isinstance(event, Started) for event in events) == 3


def test_no_explanation_is_read_before_the_pass_it_stands_behind(make_engine):
    """Those of a block's end were read in the step that asked, so the host waited for the pass just launched."""
    engine = make_engine(EOT, async_scheduling=True)
    steps, explain = [], engine.runner.explain

    def noted(kept, top_k):
        explanation, asked_in, read = explain(kept, top_k), len(steps), None
        read = explanation.read

        def late():
            assert len(steps) > asked_in or not engine._in_flight, "it is read in the step that asked"
            return read()

        explanation.read = late
        return explanation

    engine.runner.explain = noted
    engine.add_request(asked(0, attribution=AttributionParams()))
    while engine.has_work:
        engine.step()
        steps.append(None)
    assert len(steps) > 2 * BLOCK


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("number", [1, 2, 3, 6])
@pytest.mark.parametrize("what", ["ask", "read"])
def test_an_interrupt_while_commits_are_explained_leaves_no_request_hanging(make_engine, what, number, is_async):
    """The commits, or the end behind them, waited for an explanation that nobody would bring."""
    engine = make_engine(EOT, async_scheduling=is_async, explain_interval_s=0.0 if number < 6 else 1000.0)
    (expected,) = make_engine(EOT).generate([asked(0)])
    explain, calls = engine.runner.explain, []

    def interrupt() -> None:
        calls.append(None)
        if len(calls) == min(number, 2):
            raise KeyboardInterrupt

    def interrupted(kept, top_k):
        if what == "ask":
            interrupt()
        explanation = explain(kept, top_k)
        read = explanation.read
        explanation.read = lambda: (interrupt() if what == "read" else None) or read()
        return explanation

    engine.runner.explain = interrupted
    engine.add_request(asked(0, attribution=AttributionParams()))
    events, num_interrupts = [], 0
    for _ in range(200):
        if not engine.has_work:
            break
        try:
            events += engine.step()
        except KeyboardInterrupt:
            num_interrupts += 1
        engine.check_integrity()
    assert not engine.has_work and num_interrupts == 1
    assert decisions(events[-1].output) == decisions(expected)
    unexplained = [commit for commit in events[-1].output.commits if commit.attribution is None]
    assert bool(unexplained) == (what == "ask")


@pytest.mark.parametrize("policy", ["confidence", "lossless"])
def test_an_idle_engine_has_no_work_and_a_failed_row_counts_as_a_step(make_engine, policy):
    engine = make_engine(EOT, async_scheduling=True)
    sampling = {"ignore_eos": False, "logit_bias": {EOT.vocab_size - 6: 20.0}, "policy": policy}
    engine.generate([asked(0, sampling=sampling)])
    assert not engine.has_work
    banned = dict.fromkeys(range(EOT.vocab_size), -math.inf)
    (output,) = engine.generate([asked(1, sampling={"logit_bias": banned, "policy": policy})])
    assert (output.finish_reason, output.num_denoising_steps) == (FinishReason.ERROR, 1)
