"""What the engine measures of requests, blocks and passes, by a clock that the tests move."""

from __future__ import annotations

import pytest

from engine import (
    AttributionParams,
    Engine,
    EngineConfig,
    GenerateRequest,
    Intervention,
    InvalidValue,
    SamplingParams,
    SteeringParams,
)
from tests.checkpoints import EOT
from tests.records import Clock, Records

BLOCK = EOT.block
PASSES = 4
"""Passes that fill a whole block in these tests."""


class Measured:
    """An engine whose passes take a second each, by its clock, and what it records."""

    def __init__(self, folder, pass_seconds: float = 1.0, **config) -> None:
        values = {"device": "cpu", "dtype": "float32", "num_pages": 64, "max_rows": 16, **config}
        self.clock, self.records = Clock(100.0), Records()
        loaded = Engine.from_checkpoint(folder, EngineConfig(**values)).runner.model
        self.engine = Engine(loaded, EngineConfig(**values), recorder=self.records, clock=self.clock)
        self.at_read = []
        """Gauges while each pass was on the device."""
        launch = self.engine.runner.launch

        def launch_slowly(rows, num_logprobs):
            in_flight = launch(rows, num_logprobs)
            read = in_flight.read

            def read_slowly():
                self.at_read.append(dict(self.records.gauges))
                self.clock.now += pass_seconds
                return read()

            in_flight.read = read_slowly
            return in_flight

        self.engine.runner.launch = launch_slowly

    def run(self) -> None:
        while self.engine.has_work:
            self.engine.step()
        self.engine.check_integrity()


@pytest.fixture
def measured(checkpoint):
    return lambda **options: Measured(checkpoint(EOT), **options)


def asked(num_prompt: int = 0, max_tokens: int = 2 * BLOCK, index: int = 0, **values) -> GenerateRequest:
    sampling = {"ignore_eos": True, "seed": index, "tokens_per_step": BLOCK // PASSES, **values.pop("sampling", {})}
    return GenerateRequest(
        prompt_token_ids=EOT.plain_ids(num_prompt, seed=index),
        max_tokens=max_tokens,
        sampling=SamplingParams(**sampling),
        **values,
    )


def test_each_time_of_a_request_is_measured_once_and_exactly(measured):
    run = measured()
    run.engine.add_request(asked())
    run.clock.now += 7
    run.run()
    observed = run.records.observed
    # It waits for 7 s, and then every pass takes one.
    assert observed["request_queue_seconds"] == [7]
    assert observed["request_first_token_seconds"] == [8]
    assert observed["request_first_block_seconds"] == [7 + PASSES]
    assert observed["block_seconds", "confidence"] == [PASSES, PASSES]
    assert observed["block_interval_seconds"] == [PASSES]
    assert observed["block_passes", "confidence"] == [PASSES, PASSES]
    assert observed["request_seconds"] == [7 + 2 * PASSES]
    assert run.records.counts["requests_finished", "length"] == 1


def test_who_waits_for_a_lane_queues_until_it_has_one(measured):
    run = measured(max_lanes=1)
    for index in range(2):
        run.engine.add_request(asked(index=index, max_tokens=BLOCK))
    run.run()
    assert run.records.observed["request_queue_seconds"] == [0, PASSES]
    assert run.records.observed["request_seconds"] == [PASSES, 2 * PASSES]
    assert run.records.gauges["lanes_capacity"] == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_a_preempted_request_keeps_its_clocks_and_its_counts(measured, is_async):
    run = measured(async_scheduling=is_async)
    request_id = run.engine.add_request(asked())
    while len(run.at_read) < 2:
        run.engine.step()
    committed = run.records.counts["engine_commits"]
    assert committed == 2 * BLOCK // PASSES
    assert run.engine.preempt(request_id)
    run.clock.now += 50
    run.run()
    observed = run.records.observed
    assert observed["request_queue_seconds"] == [0]
    assert len(observed["request_first_token_seconds"]) == 1
    # A pass in flight when its lane was lost was for nothing: its second counts, its commits are made again.
    void = 1 if is_async else 0
    assert observed["block_passes", "confidence"] == [PASSES, PASSES]
    assert observed["request_first_block_seconds"] == [50 + PASSES + void]
    assert observed["block_seconds", "confidence"][0] == 50 + PASSES + void
    assert observed["request_seconds"] == [50 + 2 * PASSES + void]
    assert run.records.counts["engine_commits"] == 2 * BLOCK
    assert run.records.counts["requests", "confidence"] == 1
    assert run.records.counts["prompt_tokens", "computed"] == 0


def test_planning_ahead_of_results_records_what_planning_behind_them_does(measured):
    def totals(is_async: bool) -> dict:
        run = measured(async_scheduling=is_async, num_pages=5)
        policies = ("confidence", "threshold", "lossless", "entropy_bound")
        for index, policy in enumerate(policies):
            sampling = {"policy": policy, "tokens_per_step": 1 if policy == "lossless" else 4}
            attribution = AttributionParams(top_k=1) if index % 2 else None
            request = asked(5, BLOCK + 9, index, sampling=sampling, attribution=attribution)
            run.engine.add_request(request)
        run.run()
        observed = {key: values for key, values in run.records.observed.items() if key[0] == "block_passes"}
        once = ("request_queue_seconds", "request_first_token_seconds", "request_first_block_seconds")
        assert all(len(run.records.observed[name]) == len(policies) for name in (*once, "request_seconds"))
        assert len(run.records.observed["block_interval_seconds"]) == len(policies)
        names = ("requests", "requests_finished", "requests_attributed", "prompt_tokens", "engine_commits")
        counts = {k: v for k, v in run.records.counts.items() if (k if isinstance(k, str) else k[0]) in names}
        assert counts["engine_commits"] == len(policies) * (BLOCK + 9)
        return {**{key: sorted(values) for key, values in observed.items()}, **counts}

    soon, late = totals(False), totals(True)
    # How many passes a draft saves depends on the passes that it may ride in.
    for found in (soon, late):
        assert found.pop(("block_passes", "lossless"))
    assert soon == late


def test_drafts_are_neither_blocks_nor_passes(measured):
    run = measured()
    run.engine.add_request(asked(sampling={"policy": "lossless", "tokens_per_step": 1}))
    run.run()
    counts, observed = run.records.counts, run.records.observed
    assert counts["drafts_committed"] > 0
    assert counts["rows_run", "draft"] == counts["drafts"]
    assert len(observed["block_seconds", "lossless"]) == 2
    # Each pass that counted filled one position, or two where its draft was right.
    assert sum(observed["block_passes", "lossless"]) == 2 * BLOCK - counts["drafts_committed"]
    assert sum(observed["engine_pass_commits"]) == counts["engine_commits"] == 2 * BLOCK


def test_an_attributed_token_is_handed_out_when_it_is_explained(measured):
    run = measured(explain_interval_s=1000.0)
    run.engine.add_request(asked(attribution=AttributionParams()))
    run.run()
    assert run.records.observed["request_first_token_seconds"] == [PASSES]
    assert run.records.observed["block_seconds", "confidence"] == [PASSES, PASSES]
    assert run.records.counts["requests_attributed"] == 1


def test_a_cancelled_request_has_an_end_and_no_duration(measured):
    run = measured()
    request_id = run.engine.add_request(asked())
    run.engine.step()
    run.engine.abort(request_id)
    run.run()
    assert run.records.counts["requests_finished", "abort"] == run.records.counts["aborts"] == 1
    assert not run.records.observed["request_seconds"]
    assert not run.records.observed["block_seconds", "confidence"]


def test_a_refused_request_is_not_counted(measured):
    run = measured()
    run.engine.add_request(asked(request_id="once"))
    with pytest.raises(InvalidValue):
        run.engine.add_request(asked(request_id="once"))
    assert run.records.counts["requests", "confidence"] == 1


def test_requests_are_counted_by_policy_steering_and_attribution(measured):
    run = measured()
    steering = SteeringParams(interventions=(Intervention(concept_ids=(3,), strength=2.0),))
    run.engine.generate([
        asked(steering=steering),
        asked(steering=SteeringParams()),
        asked(sampling={"policy": "threshold"}, attribution=AttributionParams()),
    ])  # fmt: skip
    counts = run.records.counts
    assert (counts["requests", "confidence"], counts["requests", "threshold"]) == (2, 1)
    assert (counts["requests_steered"], counts["requests_attributed"]) == (1, 1)


def test_prompt_tokens_are_told_apart_by_where_their_pages_came_from(measured):
    run = measured()
    for _ in range(2):
        run.engine.generate([asked(2 * BLOCK + 3, 4)])
    counts = run.records.counts
    assert counts["prompt_tokens", "computed"] == (2 * BLOCK + 3) + 3
    assert counts["prompt_tokens", "cached"] == 2 * BLOCK
    assert counts["prefix_hits"] == 1
    assert counts["rows_run", "prefill"] == 2


def test_rows_are_counted_by_kind_and_times_by_bucket(measured):
    run = measured()
    run.engine.generate([asked(index=index) for index in range(5)])
    counts, observed = run.records.counts, run.records.observed
    # Five rows ride in the graph for six; the last block is not sealed, and a seal row rides with a denoise row.
    assert len(observed["engine_pass_seconds", "6"]) == 2 * PASSES - 1
    assert len(observed["engine_pass_seconds", "12"]) == 1
    assert counts["rows_run", "denoise"] == 5 * 2 * PASSES
    assert counts["rows_run", "seal"] == 5
    assert sum(observed["engine_rows"]) == counts["rows_run", "denoise"] + counts["rows_run", "seal"]
    assert counts["engine_passes"] == len(observed["engine_rows"]) == 2 * PASSES
    assert counts["engine_busy_seconds"] > 0


def test_a_pass_that_hangs_is_seen_with_its_lanes_and_an_idle_engine_is_seen_idle(measured):
    """Gauges were set when a step was over, so that an engine which hung in its first pass looked idle."""
    run = measured(max_lanes=8)
    assert {run.records.gauges[name] for name in ("lanes_in_use", "rows_in_use", "pages_held")} == {0}
    run.engine.add_request(asked(BLOCK, BLOCK))
    run.run()
    first = run.at_read[0]
    assert (first["lanes_in_use"], first["requests_waiting"], first["pages_held"]) == (1, 0, 2)
    assert first["rows_in_use"] >= 1
    gauges = run.records.gauges
    assert {gauges[name] for name in ("lanes_in_use", "rows_in_use", "pages_held", "requests_waiting")} == {0}
    assert (gauges["rows_capacity"], gauges["lanes_capacity"], gauges["pages_capacity"]) == (16, 8, 64)
    assert gauges["pages_free"] + gauges["pages_cached"] == 64
