"""The loops that send requests, their check of what comes back, and the clocks."""

from dataclasses import replace

import pytest
import torch

from engine import Engine, EngineConfig, SamplingParams
from load_tests import bench_engine
from load_tests.engine_sections.bench import Bench
from load_tests.engine_sections.load import Load, WrongOutput, check
from load_tests.engine_sections.loops import closed_loop, open_loop, run_block, seal_prompts, seconds_to_canvas, step
from load_tests.engine_sections.policies import sampling_of
from load_tests.engine_sections.report import NotAvailable
from load_tests.engine_sections.timing import CompileCounter, ReplayTimer, device_seconds
from tests.checkpoints import Recipe

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = Recipe(name="tiny").write(tmp_path_factory.mktemp("tiny"))
    return Engine.from_checkpoint(folder, EngineConfig(device="cpu", max_rows=8))


@pytest.fixture(scope="module")
def load(engine):
    return Load(engine.model_config, (10, 40), (8, 24))


@pytest.fixture(scope="module")
def finished(engine, load):
    request = load.request(load.tokens(0, 20), 8, 0)
    return request, engine.generate([request])[0]


def test_a_good_output_passes(finished):
    check(finished[1], finished[0])


def test_an_output_with_a_fault_is_no_figure(finished):
    request, output = finished
    unexplained = replace(output, commits=(*output.commits[:-1], replace(output.commits[-1], attribution=None)))
    parts = replace(output.commits[0].attribution, epsilon=output.commits[0].attribution.epsilon + 1)
    unbalanced = replace(output, commits=(replace(output.commits[0], attribution=parts), *output.commits[1:]))
    short = replace(output, commits=output.commits[:-1])
    for wrong, message in (
        (unexplained, "not explained"),
        (unbalanced, "parts sum to"),
        (short, "7 commits for max_tokens 8"),
        (replace(output, error="no memory"), "no memory"),
    ):
        with pytest.raises(WrongOutput, match=message):
            check(wrong, request)
    check(unexplained, replace(request, attribution=None))


def test_the_same_arguments_draw_the_same_load(load):
    assert load.served(3, 7) == load.served(3, 7) != load.served(3, 8)
    assert load.block_request(2, 64).prompt_token_ids == load.block_request(2, 128).prompt_token_ids[:48]


def test_requests_of_a_block_begin_in_one_pass(engine, load):
    """Rows whose prompts were prefilled one after another were never all in one pass."""
    requests = [load.block_request(row, 128) for row in range(4)]
    seal_prompts(engine, requests)
    block = run_block(engine, requests, ReplayTimer(CPU))
    # 16 positions, one commit a step: the first step is not timed, and three are left out at both ends.
    assert len(block.step_s) == 16 - 1 - 2 * 3
    assert not block.has_device
    assert not engine.has_work


def test_a_closed_loop_serves_every_request_and_counts_what_clients_see(engine, load):
    requests = load.served(5, 1)
    served = closed_loop(engine, requests, 2, ReplayTimer(CPU))
    assert served.num_requests == 5
    assert served.num_tokens == sum(request.max_tokens for request in requests)
    assert len(served.first_block_s) == len(served.last_block_s) == 5
    assert 0 < served.full_s < served.seconds
    assert served.full_tokens < served.num_tokens, "the last request runs alone for a while"
    assert served.idle_share is None


def test_an_open_loop_sends_at_its_own_pace(engine, load):
    """A request that arrives while the engine is idle is waited for, not sent early."""
    slept = []
    requests = load.served(3, 2)

    def sleep(seconds):
        slept.append(seconds)

    served = open_loop(engine, requests, 20.0, ReplayTimer(CPU), sleep)
    assert served.num_requests == 3
    assert slept and all(seconds >= 0 for seconds in slept)


def test_prompts_reach_their_canvas_even_if_the_text_is_one_token(engine, load):
    """BlockStarted and Finished come with one step then, and a loop that looked for one lost the other."""
    requests = [load.request(load.tokens(500 + n, 100), 1, n) for n in range(2)]
    assert seconds_to_canvas(engine, requests) > 0
    assert not engine.has_work


def test_a_loop_ends_when_the_engine_has_nothing_left(engine):
    with pytest.raises(WrongOutput, match="nothing left to do"):
        step(engine)


def test_a_value_that_an_option_cannot_have_is_not_available(tmp_path):
    folder = Recipe(name="tiny").write(tmp_path / "tiny")
    bench = Bench(bench_engine.parse(["--device", "cpu", "--checkpoint", str(folder)]))
    with pytest.raises(NotAvailable, match="float3"):
        bench.engine_config(dtype="float3")
    bench.close()


def test_policies_are_asked_for_by_their_recorded_names():
    assert sampling_of("confidence", 0) == SamplingParams(seed=0)
    assert sampling_of("confidence-4", 0).tokens_per_step == 4
    assert sampling_of("confidence_k2", 0).tokens_per_step == 2


def test_compilations_count_unless_they_are_expected():
    counter = CompileCounter()
    before = counter.count

    def compiled(value):
        torch._dynamo.reset()
        return torch.compile(lambda x: x + value, backend="eager")(torch.ones(2))

    with counter.expected():
        compiled(1)
    assert counter.count == before
    compiled(2)
    assert counter.count > before
    counter.close()


def test_repeated_runs_are_all_timed():
    calls = []
    seconds = device_seconds(lambda: calls.append(1), CPU, repeats=4)
    assert len(seconds) == 4 and len(calls) == 5, "the first run is not timed"


@pytest.mark.gpu
def test_replays_are_timed_by_step():
    device = torch.device("cuda")
    values = torch.ones(1024, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values.mul_(1.0)
    timer = ReplayTimer(device)
    original = torch.cuda.CUDAGraph.replay
    with timer:
        for num_replays in (1, 0, 2):
            timer.next_step()
            for _ in range(num_replays):
                graph.replay()
    assert torch.cuda.CUDAGraph.replay is original
    assert len(timer.seconds()) == 2, "a step without replays has no device time"


def test_only_what_a_launch_replays_counts_as_the_pass(monkeypatch):
    """Explanations became captured graphs, and the time of a pass suddenly held them."""

    class Graph:
        num_replays = 0

        def replay(self):
            Graph.num_replays += 1

    class Mark:
        def record(self):
            """A moment that has no length."""

        def elapsed_time(self, other):
            return 1.0

    class Runner:
        def launch(self, rows, num_logprobs):
            Graph().replay()
            Graph().replay()
            return rows

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr("load_tests.engine_sections.timing._event", Mark)
    runner, plain = Runner(), Graph.replay
    for given, expected in ((runner, [0.002, 0.002]), (None, [0.003, 0.002])):
        with ReplayTimer(torch.device("cuda"), given) as timer:
            assert runner.launch("rows", 0) == "rows"
            Graph().replay()
            timer.next_step()
            runner.launch("rows", 0)
        assert timer.seconds() == pytest.approx(expected)
        assert Graph.replay is plain and "launch" not in vars(runner)
    assert Graph.num_replays == 10
