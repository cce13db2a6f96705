"""What a pass must not do on a GPU: wait for it from the host, or compile after warm-up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from engine import (
    AttributionParams,
    Engine,
    EngineConfig,
    GenerateRequest,
    Intervention,
    SamplingParams,
    SteeringParams,
    Suppression,
)

triton = pytest.importorskip("triton", reason="triton comes with torch's CUDA builds")
pytestmark = pytest.mark.gpu
DEMO = Path(__file__).resolve().parents[2] / "demo_model" / "steerling-demo"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_checkpoint(DEMO, EngineConfig(device="cuda", max_rows=12, num_pages=200))


def mixed_requests(count: int) -> list[GenerateRequest]:
    """Every kind of sampling, policy, steering, length and phase."""
    steering = SteeringParams(
        interventions=(
            Intervention(concept_ids=(3, 9), strength=2.0, schedule="hard_cutoff", cutoff_tokens=20),
            Intervention(concept_ids=(7,), strength=1.0, layer=1),
        ),
        suppress=(Suppression(concept_id=5, strength=0.5),),
    )
    kinds = [
        {},
        {"temperature": 0.0, "num_logprobs": 3},
        {"temperature": 1.1, "top_k": 40, "logit_bias": {500: -5.0}},
        {"tokens_per_step": 3, "top_p": 0.9},
        {"policy": "threshold", "threshold": 0.6},
        {"policy": "factor"},
        {"policy": "entropy_bound"},
        {"policy": "lossless", "stop_token_ids": (400, 401, 402)},
        {"cfg_scale": 1.5, "num_logprobs": 2},
        {"cfg_scale": 0.7, "temperature": 0.0, "policy": "threshold", "threshold": 0.5},
    ]
    return [
        GenerateRequest(
            prompt_token_ids=[300 + (7 * index + j) % 5000 for j in range(37 * index % 200)],
            max_tokens=20 + 31 * index % 150,
            sampling=SamplingParams(seed=index, **kinds[index % len(kinds)]),  # type: ignore[arg-type]
            steering=steering if index % 3 else None,
            attribution=AttributionParams(top_k=None if index % 5 == 0 else 4) if index % 4 else None,
        )
        for index in range(count)
    ]


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_steps_never_make_the_host_wait_but_where_they_read_results(engine: Engine) -> None:
    """A synchronisation once hid in an index_put of the sampler. Events may be waited for: that is where results are
    read, one pass late. Admission, preemption, explanation and aborts are steps too."""
    requests = mixed_requests(24)
    ids = [engine.add_request(request) for request in requests]
    finished = 0
    with no_synchronisation():
        for step in range(3000):
            finished += sum(hasattr(event, "output") for event in engine.step())
            if step == 15:
                engine.preempt(ids[1])
            if step == 30:
                engine.abort(ids[2])
            if not engine.has_work:
                break
    assert finished == len(requests)


def test_a_request_that_arrives_waits_for_no_pass(engine: Engine) -> None:
    """Its steering is resolved beside the passes in flight: here, beside a second of other work in their stream."""
    torch.cuda._sleep(2 * 10**9)  # type: ignore[no-untyped-call]
    passes = torch.cuda.Event()  # type: ignore[no-untyped-call]
    passes.record()
    request_id = engine.add_request(mixed_requests(2)[1])
    assert not passes.query(), "the host waited for the passes"
    engine.abort(request_id)
    while engine.has_work:
        engine.step()


def test_nothing_is_compiled_after_warm_up(engine: Engine) -> None:
    """Any mix of phases, lengths, steering, attribution and policies, in batches of any size."""
    compiled: list[str] = []

    def note(*, key: str, **_: object) -> None:
        compiled.append(key)

    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    previous = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = note
    try:
        for count in (1, 2, 3, 5, 8, 30):
            engine.generate(mixed_requests(count))
    finally:
        triton.knobs.runtime.jit_post_compile_hook = previous
    assert compiled == []
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("use_graphs", [False, True])
def test_results_one_pass_late_are_those_in_time(use_graphs: bool) -> None:
    """In float32, where the batch does not decide."""
    requests = mixed_requests(16)
    outputs = []
    for is_async in (False, True):
        config = EngineConfig(
            device="cuda",
            dtype="float32",
            max_rows=12,
            # Between two numbers of rows that have graphs.
            draft_row_limit=5,
            num_pages=60,
            use_graphs=use_graphs,
            async_scheduling=is_async,
        )
        outputs.append(Engine.from_checkpoint(DEMO, config).generate(requests))
    for soon, late in zip(*outputs, strict=True):
        assert [(c.position, c.token_id, c.denoising_step) for c in soon.commits] == [
            (c.position, c.token_id, c.denoising_step) for c in late.commits
        ]
        for a, b in zip(soon.commits, late.commits, strict=True):
            assert a.target_logit == pytest.approx(b.target_logit, abs=1e-3)
            assert (a.attribution is None) == (b.attribution is None)
            if a.attribution is not None and b.attribution is not None:
                assert a.attribution.epsilon == pytest.approx(b.attribution.epsilon, abs=1e-3)
