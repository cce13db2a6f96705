"""The measuring script's parts, on the checkpoint that ships."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from demo_model.measure_policies import (
    GRID,
    MOST_COMMITS,
    PolicyBench,
    commits_per_step,
    left_to_right_losses,
    sampling_params,
    steps_at_defaults,
)
from demo_model.policy_page import NAMES, table, write_page
from demo_model.sampling import SamplerSettings
from engine import Engine, EngineConfig, GenerateRequest, SamplingParams
from engine.request import DEFAULT_PARAMETERS

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "demo_model" / "steerling-demo"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_checkpoint(CHECKPOINT, EngineConfig(device="cpu", dtype="float32"))


@torch.no_grad()
def plain_losses(engine: Engine, prefix: list[int], block: list[int]) -> list[float]:
    """The same by one complete dense pass a token."""
    model, losses = engine.runner.model, []
    for place, token in enumerate(block):
        ids = [*prefix, *block[:place], *[model.config.mask_token_id] * (len(block) - place)]
        hidden = model.hidden_dense(torch.tensor([ids]))[0, len(prefix) + place]
        losses.append(-float(model.transformer.logits(hidden).float().log_softmax(dim=-1)[token]))
    return losses


@pytest.mark.parametrize(("num_prefix", "size"), [(0, 64), (64, 64), (128, 5)])
def test_losses_from_one_pass_equal_a_dense_pass_a_token(engine: Engine, num_prefix: int, size: int) -> None:
    ids = torch.randint(0, 6000, (num_prefix + size,), generator=torch.Generator().manual_seed(1)).tolist()
    prefix, block = ids[:num_prefix], ids[num_prefix:]
    assert left_to_right_losses(engine.runner.model, prefix, block) == pytest.approx(
        plain_losses(engine, prefix, block), abs=1e-4
    )


def test_a_text_of_the_model_fits_better_than_the_same_tokens_shuffled(engine: Engine) -> None:
    sampling = SamplingParams(seed=1, temperature=0.6, top_p=0.9)
    (output,) = engine.generate([GenerateRequest(prompt_token_ids=(), max_tokens=64, sampling=sampling)])
    shuffled = sorted(output.token_ids)
    own, other = (left_to_right_losses(engine.runner.model, [], ids) for ids in (output.token_ids, shuffled))
    assert sum(own) < sum(other) - 64


def test_commits_are_counted_step_by_step(engine: Engine) -> None:
    sampling = SamplingParams(seed=1, temperature=0.0, tokens_per_step=5)
    (output,) = engine.generate([GenerateRequest(prompt_token_ids=(), max_tokens=16, sampling=sampling)])
    assert commits_per_step(output) == [5, 5, 5, 1]


def test_a_row_of_the_table_is_about_what_was_written() -> None:
    bench = PolicyBench(CHECKPOINT, 1, seed=3)
    bench.texts = bench.texts[:2]
    careful, quick = (bench.measure("confidence", k, SamplerSettings()) for k in (8, 32))
    assert (careful["passes_per_block"], careful["tokens_per_pass"], careful["most_commits"]) == (8, 8, 8)
    assert quick["passes_per_block"] == 2
    assert 0 < careful["loss"] < quick["loss"]
    assert 0 <= careful["on_topic"] <= 1
    assert {line.count("|") for line in table([careful, quick]).splitlines()} == {9}


def test_the_defaults_are_on_the_grid_and_their_steps_are_told() -> None:
    rows = [
        {"policy": policy, "value": value, "passes_per_block": 9.0, "tokens_per_pass": 7.0, "most_commits": 8}
        for policy, values in GRID.items()
        for value in values
    ]
    told = steps_at_defaults(rows)
    assert {policy: step["value"] for policy, step in told.items()} == {"confidence": 1.0, **DEFAULT_PARAMETERS}
    assert set(NAMES) == set(GRID) == set(told)
    capped = sampling_params("factor", 2.0, SamplerSettings(), seed=1)
    assert (capped.factor, capped.tokens_per_step) == (2.0, MOST_COMMITS)


def test_the_page_and_the_steps_that_ship_are_those_of_the_numbers_that_ship(tmp_path: Path) -> None:
    result = json.loads((ROOT / "demo_model" / "policy_quality.json").read_text())
    write_page(result, tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text() == (ROOT / "docs" / "policies.md").read_text()
    steps = json.loads((ROOT / "demo_model" / "policy_steps.json").read_text())
    assert steps == steps_at_defaults(result["rows"])
    assert [(row["policy"], row["value"]) for row in result["rows"]] == [(p, v) for p in GRID for v in GRID[p]]
