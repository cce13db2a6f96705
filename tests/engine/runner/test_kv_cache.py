"""What memory is planned for before the first request comes."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from engine import ConceptConfig, Engine, EngineConfig, GenerateRequest, InvalidConfig, ModelConfig, SamplingParams
from engine.model.steerling import SteerlingModel
from engine.runner.kv_cache import page_bytes, pass_bytes, plan_num_pages

ROWS = 4
CPU = torch.device("cpu")


def config(*, use_epsilon_correction=True, **values):
    concept = ConceptConfig(
        n_concepts=200, n_discovered=200, concept_dim=64, use_epsilon_correction=use_epsilon_correction
    )
    shape = {"vocab_size": 300, "n_layers": 2, "n_head": 4, "n_kv_heads": 2, "n_embd": 64, "block_size": 256}
    ids = {"eos_token_id": 0, "pad_token_id": 1, "mask_token_id": 2}
    return ModelConfig(**{**shape, **ids, **values}, concept=concept)


def measured_peak(model_config, tokens_per_step):
    """Most bytes that passes of ROWS denoise rows up to the full context have allocated at once."""
    torch.manual_seed(0)
    model = SteerlingModel(model_config).requires_grad_(False).eval()
    engine = Engine(model, EngineConfig(device="cpu", num_pages=80, max_rows=ROWS))
    asked = GenerateRequest(
        prompt_token_ids=[3] * (model_config.block_size - 64),
        max_tokens=64,
        sampling=SamplingParams(tokens_per_step=tokens_per_step),
    )
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        engine.generate([asked] * ROWS)
    in_use, peak = 0, 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            in_use += event.nbytes()
            peak = max(peak, in_use)
    return peak


@pytest.mark.parametrize(
    ("values", "tokens_per_step"),
    [
        ({"vocab_size": 20_000}, 16),
        ({"vocab_size": 20_000}, 64),
        ({"vocab_size": 20_000, "use_epsilon_correction": False}, 16),
        ({"use_epsilon_correction": False}, 32),
        ({"intermediate_size": 4096}, 32),
        ({"block_size": 1024, "n_kv_heads": 4}, 32),
    ],
    ids=str,
)
def test_a_pass_takes_no_more_than_is_planned_for_it(values, tokens_per_step):
    """Nothing was: with a large vocabulary, the first full pass could find the memory given to pages."""
    planned = pass_bytes(config(**values), ROWS, torch.float32)
    peak = measured_peak(config(**values), tokens_per_step)
    assert peak <= planned <= 5 * peak


def test_pages_without_a_gpu_hold_every_lane_s_context():
    model = config(block_size=300)
    assert plan_num_pages(model, EngineConfig(max_lanes=3), CPU, torch.float32) == 15
    assert plan_num_pages(model, EngineConfig(max_lanes=3, num_pages=7), CPU, torch.float32) == 7


def test_memory_for_less_than_one_context_is_an_error():
    model = config(block_size=2**24, n_kv_heads=4)
    assert page_bytes(model, torch.float32) * 2**18 > 2 * 1024**3
    with pytest.raises(InvalidConfig, match=r"needs 262144; .*max_rows"):
        plan_num_pages(model, EngineConfig(), CPU, torch.float32)
