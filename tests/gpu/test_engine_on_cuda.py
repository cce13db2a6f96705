"""The engine on a GPU against the same engine on the CPU. Needs neither the reference package nor a download."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from engine import (
    AttributionParams,
    ConceptConfig,
    Engine,
    EngineConfig,
    GenerateRequest,
    Intervention,
    ModelConfig,
    Output,
    SamplingParams,
    SteeringParams,
    Suppression,
)
from engine.model.attention import paged_attention, paged_attention_by_row
from engine.model.steerling import SteerlingModel

pytestmark = pytest.mark.gpu

VOCAB = 211
CONFIG = ModelConfig(
    vocab_size=VOCAB,
    n_layers=3,
    n_head=4,
    n_embd=64,
    n_kv_heads=2,
    block_size=512,
    mlp_ratio=2,
    concept=ConceptConfig(
        n_concepts=50,
        n_discovered=90,
        concept_dim=64,
        topk_known=6,
        topk_known_features=6,
        factorize_rank=16,
        discovered_topk=9,
    ),
    mask_token_id=VOCAB - 1,
    eos_token_id=VOCAB - 2,
    pad_token_id=VOCAB - 3,
)


@pytest.fixture(scope="module")
def model() -> SteerlingModel:
    """Random weights wide enough that positions and tokens differ clearly."""
    torch.manual_seed(5)
    model = SteerlingModel(CONFIG, vocab_multiple=64).requires_grad_(False).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.4)
    return model


def run(
    model: SteerlingModel, device: str, dtype: torch.dtype, requests: list[GenerateRequest], **settings: object
) -> list[Output]:
    moved = copy.deepcopy(model).to(device, dtype)
    if moved.transformer.rotary is not None:
        moved.transformer.rotary.float()
    engine = Engine(moved, EngineConfig(num_pages=64, max_rows=8, **settings))  # type: ignore[arg-type]
    outputs = engine.generate(requests)
    engine.check_integrity()
    return outputs


def mixed_requests() -> list[GenerateRequest]:
    """Greedy and sampled, steered and not, prompts in every phase of a block."""
    generator = torch.Generator().manual_seed(3)
    steering = SteeringParams(
        interventions=(Intervention(concept_ids=(3, 9), strength=2.0, schedule="hard_cutoff", cutoff_tokens=20),),
        suppress=(Suppression(concept_id=5, strength=0.5),),
    )
    requests = []
    for index, prompt_length in enumerate((0, 1, 63, 64, 65, 130)):
        prompt = torch.randint(0, VOCAB - 3, (prompt_length,), generator=generator).tolist()
        requests.append(
            GenerateRequest(
                prompt_token_ids=prompt,
                max_tokens=70,
                sampling=SamplingParams(seed=index, num_logprobs=3)
                if index % 2
                else SamplingParams(temperature=0.0, seed=index),
                steering=steering if index % 3 else None,
                attribution=AttributionParams(),
            )
        )
    return requests


def test_paged_attention_equals_its_slow_twin_in_bfloat16() -> None:
    torch.manual_seed(0)
    q = torch.randn(3, 64, 8, 32, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 9, 64, 2, 32, device="cuda", dtype=torch.bfloat16)
    page_table = torch.tensor([[4, 2, 2], [0, 1, 3], [7, 7, 7]], device="cuda")
    key_length = torch.tensor([100, 192, 17], device="cuda")
    fast = paged_attention(q, k, v, page_table, key_length)
    slow = paged_attention_by_row(q, k, v, page_table, key_length)
    torch.testing.assert_close(fast, slow, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("use_graphs", [False, True])
@pytest.mark.parametrize("tokens_per_step", [1, 4])
def test_float32_gives_the_same_commits_as_on_the_cpu(
    model: SteerlingModel, use_graphs: bool, tokens_per_step: int
) -> None:
    requests = [
        dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, tokens_per_step=tokens_per_step))
        for request in mixed_requests()
    ]
    for on_cpu, on_gpu in zip(
        run(model, "cpu", torch.float32, requests),
        run(model, "cuda", torch.float32, requests, use_graphs=use_graphs),
        strict=True,
    ):
        assert on_gpu.token_ids == on_cpu.token_ids
        for ours, theirs in zip(on_gpu.commits, on_cpu.commits, strict=True):
            assert (ours.position, ours.token_id, ours.denoising_step) == (
                theirs.position,
                theirs.token_id,
                theirs.denoising_step,
            )
            assert ours.target_logit == pytest.approx(theirs.target_logit, abs=1e-3)
            assert ours.attribution is not None and theirs.attribution is not None
            assert ours.attribution.epsilon == pytest.approx(theirs.attribution.epsilon, abs=1e-3)
            ours_known = sorted(item.concept_id for item in ours.attribution.known)
            assert ours_known == sorted(item.concept_id for item in theirs.attribution.known)


def test_bfloat16_commits_every_position_once_and_attribution_sums(model: SteerlingModel) -> None:
    for output in run(model, "cuda", torch.bfloat16, mixed_requests()):
        positions = [commit.position for commit in output.commits]
        start = output.num_prompt_tokens
        assert sorted(positions) == list(range(start, start + 70))
        for commit in output.commits:
            parts = commit.attribution
            assert parts is not None
            total = parts.known_total + parts.discovered_total + parts.epsilon
            assert total == pytest.approx(commit.target_logit, abs=1e-3)
