"""The measuring script's parts, on the checkpoint that ships."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from demo_model.lossless import LOSSLESS_SAMPLERS, check_equal, lossless_steps, measure_lossless
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
    assert steps == steps_at_defaults(result["rows"]) | lossless_steps(result["lossless"]["rows"])
    assert [row["sampler"] for row in result["lossless"]["rows"]] == list(LOSSLESS_SAMPLERS)
    assert [(row["policy"], row["value"]) for row in result["rows"]] == [(p, v) for p in GRID for v in GRID[p]]


@pytest.mark.parametrize("sampler", LOSSLESS_SAMPLERS)
def test_each_accepted_draft_saves_a_pass(engine: Engine, sampler: str) -> None:
    prompt = torch.randint(0, 6000, (64,), generator=torch.Generator().manual_seed(2)).tolist()
    requests = [
        GenerateRequest(prompt_token_ids=ids, max_tokens=64, sampling=SamplingParams(seed=seed))
        for seed, ids in enumerate(([], prompt))
    ]
    row = measure_lossless(engine.runner.model, requests, sampler)
    assert row["passes_per_block"] < 64
    assert row["tokens_per_pass"] == pytest.approx(64 / row["passes_per_block"])
    assert 2 * (64 - row["passes_per_block"]) == pytest.approx(row["accepted_share"] * row["drafts"])
    # No text ends early here, so a draft counts whenever its position and token are right.
    assert row["accepted_share"] == pytest.approx(row["position_share"] * row["token_share"])
    told = lossless_steps([row])["lossless"]
    assert (told["value"], told["most_commits"], told["passes_per_block"]) == (None, 2, row["passes_per_block"])


def test_texts_that_differ_in_the_order_of_their_commits_are_not_equal(engine: Engine) -> None:
    request = GenerateRequest(prompt_token_ids=(), max_tokens=3, sampling=SamplingParams(seed=1))
    (output,) = engine.generate([request])
    check_equal([output], [output])
    with pytest.raises(ValueError, match="text 1"):
        check_equal([output, dataclasses.replace(output, commits=output.commits[::-1])], [output, output])
