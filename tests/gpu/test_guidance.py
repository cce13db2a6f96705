"""Guided requests on a GPU: with graphs and kernel by kernel, beside others, against the CPU."""

from __future__ import annotations

import copy

import pytest
import torch

from engine import (
    AttributionParams,
    Engine,
    EngineConfig,
    GenerateRequest,
    Intervention,
    Output,
    SamplingParams,
    SteeringParams,
)
from engine.model.steerling import SteerlingModel
from tests.gpu.test_engine_on_cuda import VOCAB, model, run

__all__ = ["model"]

pytestmark = pytest.mark.gpu


def requests(*, with_drafts: bool = False) -> list[GenerateRequest]:
    """Guided ones of every phase of a block, steered up to a cutoff in the second canvas, and others beside them."""
    generator = torch.Generator().manual_seed(17)
    steering = SteeringParams(
        interventions=(Intervention(concept_ids=(3, 9), strength=2.0, schedule="hard_cutoff", cutoff_tokens=40),)
    )
    kinds = [
        {"cfg_scale": 1.5, "temperature": 0.0},
        {"temperature": 0.0},
        {"cfg_scale": 0.8, "num_logprobs": 3},
        {"cfg_scale": 1.2, "temperature": 0.0, "tokens_per_step": 4},
        {"policy": "lossless", "temperature": 0.0} if with_drafts else {"num_logprobs": 2},
        {"cfg_scale": 2.0, "temperature": 0.0, "policy": "threshold", "threshold": 0.5},
    ]
    return [
        GenerateRequest(
            prompt_token_ids=torch.randint(0, VOCAB - 3, (length,), generator=generator).tolist(),
            max_tokens=90,
            sampling=SamplingParams(seed=index, **kinds[index]),  # type: ignore[arg-type]
            steering=steering if index % 3 != 1 else None,
            attribution=AttributionParams() if index != 3 else None,
        )
        for index, length in enumerate((64, 130, 1, 63, 65, 20))
    ]


def assert_same(ours: list[Output], theirs: list[Output]) -> None:
    """The same decisions; numbers up to what the order of adding in float32 leaves."""
    for a, b in zip(ours, theirs, strict=True):
        assert [(c.position, c.token_id, c.denoising_step) for c in a.commits] == [
            (c.position, c.token_id, c.denoising_step) for c in b.commits
        ]
        for x, y in zip(a.commits, b.commits, strict=True):
            assert x.target_logit == pytest.approx(y.target_logit, abs=5e-3)
            assert (x.attribution is None) == (y.attribution is None)
            if x.attribution is not None and y.attribution is not None:
                assert x.attribution.epsilon == pytest.approx(y.attribution.epsilon, abs=5e-3)
                assert x.attribution.known_total == pytest.approx(y.attribution.known_total, abs=5e-3)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("use_graphs", [False, True])
def test_float32_gives_the_same_commits_as_on_the_cpu(model: SteerlingModel, use_graphs: bool, is_async: bool) -> None:
    on_cpu = run(model, "cpu", torch.float32, requests())
    on_gpu = run(model, "cuda", torch.float32, requests(), use_graphs=use_graphs, async_scheduling=is_async)
    assert_same(on_gpu, on_cpu)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_give_what_the_kernels_give_one_by_one_with_drafts_beside_guided_rows(
    model: SteerlingModel, dtype: torch.dtype
) -> None:
    """In passes of few rows drafts and guidance share a graph. One request at a time, so that batches are the same."""
    pairs = [requests(with_drafts=True)[index : index + 2] for index in (3, 4)]
    for asked in pairs:
        settings = {"draft_row_limit": 8, "async_scheduling": False}
        graphed = run(model, "cuda", dtype, asked, use_graphs=True, **settings)
        plain = run(model, "cuda", dtype, asked, use_graphs=False, **settings)
        if dtype == torch.float32:
            assert_same(graphed, plain)
        for output in graphed:
            positions = sorted(commit.position for commit in output.commits)
            assert positions == list(range(output.num_prompt_tokens, output.num_prompt_tokens + 90))
            for commit in output.commits:
                if (parts := commit.attribution) is not None:
                    total = parts.known_total + parts.discovered_total + parts.epsilon
                    assert total == pytest.approx(commit.target_logit, abs=2e-3)


def test_a_guided_request_gives_the_same_alone_and_in_company(model: SteerlingModel) -> None:
    alone = [run(model, "cuda", torch.float32, [request])[0] for request in requests()]
    assert_same(run(model, "cuda", torch.float32, requests()), alone)


def test_passes_without_guided_rows_replay_graphs_of_their_own(model: SteerlingModel) -> None:
    """What guidance takes must not ride in passes that have none of it."""
    engine = Engine(copy.deepcopy(model).to("cuda"), EngineConfig(num_pages=64, max_rows=4, draft_row_limit=2))
    graphs = engine.runner._graphs
    assert graphs is not None
    for bucket in graphs._buckets.values():
        assert {alters for _, _, alters in bucket.choices} == {False, True}
        plain = {id(graph) for (_, _, alters), (graph, _) in bucket.choices.items() if not alters}
        altered = {id(graph) for (_, _, alters), (graph, _) in bucket.choices.items() if alters}
        assert plain.isdisjoint(altered)
