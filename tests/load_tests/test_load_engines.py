"""The engine that only keeps time, and the descriptions that it is served with."""

from __future__ import annotations

import asyncio

import pytest
import torch

from engine import (
    BlockFinished,
    BlockStarted,
    Committed,
    EmbedTokens,
    EngineConfig,
    Finished,
    GenerateRequest,
    InvalidRequest,
    ModelConfig,
    SamplingParams,
    Started,
)
from load_tests.serving_sections.description import NUM_BYTES, NUM_NUMBERS, SHAPES, number_token, write_description
from load_tests.serving_sections.engines import PacedEngine, paced_engine, random_engine
from serve_app.checkpoint import describe


class Clock:
    def __init__(self) -> None:
        self.now, self.slept = 50.0, []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_description(tmp_path_factory.mktemp("tiny"), "tiny")


def request(num_prompt: int, max_tokens: int) -> GenerateRequest:
    return GenerateRequest(prompt_token_ids=[300] * num_prompt, max_tokens=max_tokens, request_id=f"r{num_prompt}")


def test_each_step_takes_its_time_and_commits_one_token_of_every_request(tiny):
    clock = Clock()
    engine = PacedEngine(ModelConfig.from_json(tiny), step_s=0.01, clock=lambda: clock.now, sleep=clock.sleep)
    engine.add_request(request(60, 6))
    engine.add_request(request(5, 3))
    events = [engine.step() for _ in range(6)]
    assert not engine.has_work
    assert clock.slept == pytest.approx([0.01] * 5)
    kinds = [type(event) for batch in events for event in batch if event.request_id == "r60"]
    # Four positions are left in the prompt's block, two come after it.
    filled = [BlockStarted, *[Committed] * 4, BlockFinished, BlockStarted, *[Committed] * 2, BlockFinished]
    assert kinds == [Started, *filled, Finished]
    last = events[-1][-1]
    assert isinstance(last, Finished)
    assert [commit.position for commit in last.output.commits] == list(range(60, 66))
    assert last.output.num_blocks == 2
    made = [token_id - NUM_BYTES for token_id in last.output.token_ids]
    assert made == [50_000, 50_010, 50_020, 50_030, 50_040, 50_050]


def test_it_tells_its_load_as_an_engine_does(tiny):
    engine = PacedEngine(ModelConfig.from_json(tiny), step_s=0.0)
    engine.add_request(request(60, 80))
    engine.step()
    load = engine.load(with_all_prefixes=True)
    (running,) = load.running
    assert (running.num_steps_left, running.num_blocks_left) == (3, 2)
    assert load.num_lanes_free == load.num_lanes - 1 and load.prefixes.is_everything
    assert load.pass_seconds[0][1] > 0


def test_a_late_step_does_not_shorten_those_after_it(tiny):
    clock = Clock()
    engine = PacedEngine(ModelConfig.from_json(tiny), step_s=0.01, clock=lambda: clock.now, sleep=clock.sleep)
    engine.add_request(request(1, 4))
    engine.step()
    clock.now += 1.0
    engine.step()
    engine.step()
    assert clock.slept == pytest.approx([0.01])


def test_it_serves_through_the_real_async_engine_and_refuses_what_that_refuses(tiny):
    engine = paced_engine(0.0, tiny)

    async def serve(item):
        return [event async for events in engine.generate(item) for event in events]

    try:
        events = asyncio.run(serve(request(3, 5)))
        assert isinstance(events[0], Started) and isinstance(events[-1], Finished)
        assert len(events[-1].output.token_ids) == 5
        with pytest.raises(InvalidRequest):
            asyncio.run(serve(request(3, 5000)))
        assert asyncio.run(engine.concept_top_tokens(0)) == asyncio.run(engine.concept_neighbors(0)) == []
        with pytest.raises(InvalidRequest, match="EmbedTokens"):
            asyncio.run(engine.analyze(EmbedTokens(token_ids=(1,))))
    finally:
        engine.stop()


@pytest.mark.parametrize("shape", list(SHAPES))
def test_the_ingress_reads_a_description_and_numbers_come_back_as_text(tmp_path, shape):
    checkpoint = describe(write_description(tmp_path / shape, shape), "described")
    tokenizer = checkpoint.tokenizer
    assert tokenizer.decode([number_token(7), number_token(1234)]) == "7 1234 "
    assert tokenizer.decode(tokenizer.encode("a \u00e9 1")) == "a \u00e9 1"
    assert tokenizer.text_bytes(checkpoint.config.mask_token_id) == b""
    if shape == "8b":
        assert tokenizer.decode([number_token(NUM_NUMBERS - 1), number_token(NUM_NUMBERS)]) == f"{NUM_NUMBERS - 1} 0 "


def test_random_weights_serve_a_request(tiny):
    grads = torch.is_grad_enabled()
    engine = random_engine(tiny, EngineConfig(device="cpu", num_pages=8, max_rows=2))

    async def serve():
        sampling = SamplingParams(seed=0, ignore_eos=True)
        item = GenerateRequest(prompt_token_ids=[300, 301], max_tokens=3, sampling=sampling)
        return [event async for events in engine.generate(item) for event in events]

    try:
        last = asyncio.run(serve())[-1]
        assert isinstance(last, Finished) and len(last.output.token_ids) == 3
    finally:
        engine.stop()
        torch.set_grad_enabled(grads)
