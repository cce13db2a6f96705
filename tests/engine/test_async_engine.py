"""The thread around the engine: events, cancellation, refusals, and what happens when it ends."""

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine import (
    AsyncEngine,
    AttributionParams,
    EngineStopped,
    Finished,
    FinishReason,
    GenerateRequest,
    InvalidValue,
    QueueFull,
    SamplingParams,
    Started,
)
from tests.checkpoints import EOT


def request(max_tokens=20, seed=0, **values):
    return GenerateRequest(
        prompt_token_ids=EOT.plain_ids(20, seed),
        max_tokens=max_tokens,
        sampling=SamplingParams(temperature=0.0, ignore_eos=True, seed=0),
        **values,
    )


async def collect(engine, asked):
    return [event async for events in engine.generate(asked) for event in events]


@pytest.fixture
def served(make_engine):
    """(AsyncEngine, the Engine inside it), stopped after the test."""
    inner = make_engine(EOT)
    engine = AsyncEngine(inner)
    yield engine, inner
    engine.stop()


def test_tasks_served_together_get_what_each_gets_alone(served, make_engine):
    engine, _ = served
    asked = [request(seed=s, max_tokens=10 + 3 * s) for s in range(6)]

    async def all_of_them():
        return await asyncio.gather(*(collect(engine, one) for one in asked))

    expected = make_engine(EOT).generate(asked)
    for events, output in zip(asyncio.run(all_of_them()), expected, strict=True):
        assert isinstance(events[0], Started) and isinstance(events[-1], Finished)
        assert events[-1].output.token_ids == output.token_ids
        assert len({event.request_id for event in events}) == 1


def test_a_bad_request_raises_before_the_first_event_and_harms_nobody(served):
    engine, _ = served

    async def both():
        bad = GenerateRequest(prompt_token_ids=[1000])
        return await asyncio.gather(collect(engine, bad), collect(engine, request()), return_exceptions=True)

    refused, events = asyncio.run(both())
    assert isinstance(refused, InvalidValue) and refused.param == "prompt_token_ids"
    assert len(events[-1].output.token_ids) == 20


def test_a_refusal_that_nobody_waits_for_is_not_reported_as_lost(served):
    """When callers left while a full queue refused them, asyncio logged an exception that was never retrieved."""
    engine, _ = served
    is_held = threading.Event()
    reported = []

    async def leave_early():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context["message"]))
        engine._submit(is_held.wait)
        task = asyncio.ensure_future(collect(engine, GenerateRequest(prompt_token_ids=[1000])))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        is_held.set()
        await engine.stats()
        await asyncio.sleep(0)
        del task
        gc.collect()

    asyncio.run(leave_early())
    assert reported == []


def test_a_full_queue_raises_and_those_who_wait_are_served(make_engine):
    engine = AsyncEngine(make_engine(EOT, max_lanes=1, max_waiting=1))

    async def many():
        tasks = [collect(engine, request(max_tokens=200, seed=s)) for s in range(12)]
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(many())
    engine.stop()
    assert any(isinstance(result, QueueFull) for result in results)
    served = [result for result in results if not isinstance(result, QueueFull)]
    assert served and all(len(events[-1].output.token_ids) == 200 for events in served)


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_who_stops_listening_frees_lane_and_pages(served, how):
    engine, inner = served

    async def leave_early():
        stream = engine.generate(request(max_tokens=400))
        started = asyncio.Event()

        async def listen():
            async for _ in stream:
                started.set()
                if how == "close":
                    break
            await stream.aclose()

        task = asyncio.create_task(listen())
        await started.wait()
        if how == "cancel":
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await stream.aclose()
        # The abort was asked for before this request was.
        await collect(engine, request(max_tokens=1))
        return await engine.stats()

    stats = asyncio.run(leave_early())
    assert (stats.num_running, stats.num_waiting, stats.pages_held) == (0, 0, 0)
    inner.check_integrity()


def test_abort_ends_a_stream_with_a_finished_event(served):
    engine, _ = served

    async def aborted():
        events = []
        async for batch in engine.generate(request(max_tokens=400, request_id="mine")):
            events += batch
            engine.abort("mine")
        return events

    events = asyncio.run(aborted())
    assert events[-1].output.finish_reason is FinishReason.ABORT
    assert len(events[-1].output.token_ids) < 400


def test_a_finished_stream_that_is_closed_late_leaves_the_next_request_of_its_id_alone(served):
    """Every stream once ended with an abort of its id, whoever had it by then."""
    engine, _ = served

    async def reuse_the_id():
        first = engine.generate(request(max_tokens=1, request_id="mine"))
        async for events in first:
            if isinstance(events[-1], Finished):
                break
        second = engine.generate(request(max_tokens=200, request_id="mine"))
        await anext(second)
        await first.aclose()
        return [event async for events in second for event in events]

    assert asyncio.run(reuse_the_id())[-1].output.finish_reason is FinishReason.LENGTH


def test_a_request_whose_event_loop_was_closed_under_it_is_ended(served):
    """Nobody closed its stream, so it ran to its end for nobody."""
    engine, inner = served
    loop = asyncio.new_event_loop()
    stream = engine.generate(request(max_tokens=400))
    loop.run_until_complete(anext(stream))
    loop.close()

    async def wait_until_idle():
        await collect(engine, request(max_tokens=1))
        return await engine.stats()

    stats = asyncio.run(wait_until_idle())
    assert (stats.num_running, stats.num_waiting, stats.pages_held) == (0, 0, 0)
    inner.check_integrity()


def test_requests_that_are_cancelled_at_any_moment_leave_nothing(served):
    engine, inner = served

    async def cancel_after(num_turns, n):
        task = asyncio.create_task(collect(engine, request(max_tokens=60, seed=n, attribution=AttributionParams())))
        for _ in range(num_turns):
            await asyncio.sleep(0.0005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def many():
        await asyncio.gather(*(cancel_after(n % 20, n) for n in range(60)))
        events = await collect(engine, request(max_tokens=5))
        return events, await engine.stats()

    events, stats = asyncio.run(many())
    assert len(events[-1].output.token_ids) == 5
    assert (stats.num_running, stats.num_waiting, stats.pages_held) == (0, 0, 0)
    inner.check_integrity()
    assert not inner.has_work


def test_two_event_loops_in_two_threads_share_an_engine(served, make_engine):
    engine, _ = served
    asked = [request(seed=s) for s in range(4)]

    async def all_of_them():
        return [events[-1].output for events in await asyncio.gather(*(collect(engine, one) for one in asked))]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: asyncio.run(all_of_them()), range(2))
    expected = [output.token_ids for output in make_engine(EOT).generate(asked)]
    assert [o.token_ids for o in first] == [o.token_ids for o in second] == expected


def test_after_stop_everybody_is_told(served):
    engine, _ = served

    async def stop_in_the_middle():
        running = asyncio.create_task(collect(engine, request(max_tokens=400)))
        await engine.stats()
        engine.stop()
        return await asyncio.gather(running, collect(engine, request()), return_exceptions=True)

    assert all(isinstance(result, EngineStopped) for result in asyncio.run(stop_in_the_middle()))
    with pytest.raises(EngineStopped):
        engine.check_health()


def test_an_error_in_a_pass_reaches_everybody_who_waits_and_the_health_check(served):
    engine, inner = served

    def broken():
        raise RuntimeError("the device fell off")

    inner.step = broken
    engine.check_health()

    async def both():
        return await asyncio.gather(*(collect(engine, request(seed=s)) for s in range(2)), return_exceptions=True)

    results = asyncio.run(both())
    assert all(isinstance(r, EngineStopped) and "the device fell off" in str(r) for r in results)
    with pytest.raises(EngineStopped, match="the device fell off"):
        engine.check_health()


def test_a_pass_that_hangs_fails_the_health_check(make_engine):
    inner = make_engine(EOT)
    entered, leave, step = threading.Event(), threading.Event(), inner.step

    def slow():
        entered.set()
        leave.wait()
        return step()

    inner.step = slow
    engine = AsyncEngine(inner, hang_timeout_s=0.0)
    engine.check_health()

    async def hang():
        task = asyncio.create_task(collect(engine, request(max_tokens=1)))
        await asyncio.to_thread(entered.wait)
        with pytest.raises(EngineStopped, match="has run for more than"):
            engine.check_health()
        leave.set()
        return await task

    assert isinstance(asyncio.run(hang())[-1], Finished)
    engine.check_health()
    engine.stop()


def test_top_tokens_of_a_concept_come_through_the_thread(served, make_engine):
    engine, _ = served
    assert asyncio.run(engine.concept_top_tokens(3, 4)) == make_engine(EOT).concept_top_tokens(3, 4)


def test_a_watcher_hears_of_every_block_and_of_the_rest_after_the_last(served):
    engine, inner = served
    loads = []
    engine.watch_load(loads.append, interval_s=0)
    asyncio.run(collect(engine, request(max_tokens=40, request_id="r")))
    asyncio.run(engine.stats())  # The thread has told what the last step brought.
    assert not loads[0].running and loads[0].prefixes.is_everything
    assert not loads[-1].running and loads[-1].num_lanes_free == inner.config.num_lanes
    blocks_left = [block.num_blocks_left for load in loads for block in load.running]
    # 20 tokens of prompt and 40 more lie in blocks of sixteen: three of them are written.
    assert sorted(set(blocks_left), reverse=True) == [2, 1, 0]
    rows = [rows for rows, seconds in loads[-1].pass_seconds if seconds > 0]
    assert rows and min(rows) >= 1


def test_between_two_tellings_lies_an_interval_but_the_last_state_is_told(served):
    engine, inner = served
    loads = []
    engine.watch_load(loads.append, interval_s=3600)
    asyncio.run(collect(engine, request(max_tokens=200)))
    asyncio.run(engine.stats())
    # At first, and when the engine comes to rest.
    assert len(loads) == 2
    assert loads[-1].num_lanes_free == inner.config.num_lanes
    engine.ask_load(with_all_prefixes=True)
    assert asyncio.run(engine.load()).prefixes.added == ()
    assert len(loads) == 3 and loads[-1].prefixes.is_everything and loads[-1].prefixes.added
