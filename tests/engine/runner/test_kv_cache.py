"""What memory is planned for before the first request comes."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from engine import (
    AttributeInputs,
    ConceptConfig,
    Engine,
    EngineConfig,
    GenerateRequest,
    InvalidConfig,
    ModelConfig,
    ReplayTrace,
    SamplingParams,
    Trace,
    TracedCommit,
    plan_memory,
)
from engine.model.steerling import SteerlingModel
from engine.runner.kv_cache import page_bytes, pass_bytes, plan_num_pages, replay_bytes

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
    return peak_bytes(lambda: engine.generate([asked] * ROWS))


def peak_bytes(work):
    """Most bytes that some work has allocated at once, beside what was there."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
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


@pytest.mark.parametrize(
    "values",
    [
        {"n_layers": 12, "block_size": 512},
        {"n_layers": 2, "block_size": 512},
        {"intermediate_size": 4096, "block_size": 512},
        {"vocab_size": 20_000, "block_size": 512},
        {"block_size": 1024},
        {"block_size": 512, "use_epsilon_correction": False},
    ],
    ids=str,
)
def test_a_slice_of_input_attribution_takes_no_more_than_is_planned_for_it(values):
    """Also with more points of a path than one, and however many layers there are."""
    model_config = config(**values)
    planned = replay_bytes(model_config, model_config.block_size, torch.float32)
    torch.manual_seed(0)
    model = SteerlingModel(model_config).requires_grad_(False).eval()
    engine = Engine(model, EngineConfig(device="cpu", num_pages=80, max_rows=ROWS))
    length = model_config.block_size

    def peak_of(num_prompt, ask):
        commits = [TracedCommit(num_prompt + offset, 7, 0) for offset in range(64)]
        analysis = ask(Trace(prompt_token_ids=[3] * num_prompt, max_tokens=64, commits=commits))
        return peak_bytes(lambda: engine.analyze(analysis))

    peaks = [peak_of(num_prompt, lambda trace: ReplayTrace(trace=trace)) for num_prompt in (64, length - 64)]
    if not model_config.needs_heads_for_tokens:
        peaks += [
            peak_of(
                num_prompt,
                lambda trace: AttributeInputs(trace=trace, targets=(len(trace.prompt_token_ids),), num_steps=3),
            )
            for num_prompt in (64, length - 64)
        ]
    assert max(peaks) <= planned <= 4 * max(peaks)


def test_memory_for_traces_is_taken_from_pages_and_may_be_given_back():
    model, total = config(block_size=1024, vocab_size=2000), 2**30
    plans = {
        context: plan_memory(
            model, EngineConfig(input_attribution_context=context, gpu_memory_fraction=1.0), total=total
        )
        for context in (None, 512, 0)
    }
    reserves = {context: plan.replay_reserve for context, plan in plans.items()}
    assert reserves[None] == replay_bytes(model, 1024, torch.bfloat16) > reserves[512] > reserves[0] == 0
    for context in (None, 512):
        given_up = (plans[0].num_pages - plans[context].num_pages) * plans[0].page
        assert abs(given_up - reserves[context]) <= plans[0].page
    table = plans[None].table().splitlines()
    assert [line.split()[0] for line in table] == ["weights", "lanes", "pages", "passes", "traces", "unused"]
    assert "inputs" in table[4] and "0.00 GiB" in plans[0].table().splitlines()[4]


def test_pages_without_a_gpu_hold_every_lane_s_context():
    model = config(block_size=300)
    assert plan_num_pages(model, EngineConfig(max_lanes=3), CPU, torch.float32) == 15
    assert plan_num_pages(model, EngineConfig(max_lanes=3, num_pages=7), CPU, torch.float32) == 7


def test_memory_for_less_than_one_context_is_an_error():
    model = config(block_size=2**24, n_kv_heads=4)
    assert page_bytes(model, torch.float32) * 2**18 > 2 * 1024**3
    with pytest.raises(InvalidConfig, match=r"needs 262144; .*max_rows"):
        plan_num_pages(model, EngineConfig(), CPU, torch.float32)
