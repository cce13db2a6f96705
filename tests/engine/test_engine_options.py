"""The options that only a GPU can keep, at the door: what is refused, and how the refusal reads."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest
import torch

from engine import Engine
from engine.config import ConceptConfig, EngineConfig, ModelConfig
from engine.errors import InvalidConfig
from engine.model.batch_invariant import check_deterministic
from engine.model.quantization import check_float8, quantize
from engine.model.steerling import SteerlingModel
from engine.runner.explaining import Explainer, KeptCommit
from tests.checkpoints import EOT

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    vocab_size=90,
    n_layers=1,
    n_head=2,
    n_embd=32,
    n_kv_heads=1,
    block_size=64,
    mlp_ratio=2,
    concept=ConceptConfig(n_concepts=8, n_discovered=9, concept_dim=32, factorize_rank=16),
    mask_token_id=89,
    eos_token_id=88,
    pad_token_id=87,
)


def test_fp8_and_deterministic_are_taken_one_at_a_time():
    assert EngineConfig(dtype="fp8").dtype == "fp8"
    assert EngineConfig(deterministic=True, dtype="bfloat16").deterministic
    with pytest.raises(InvalidConfig, match=r"deterministic is true and dtype is fp8.*use dtype bfloat16"):
        EngineConfig(dtype="fp8", deterministic=True)


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_deterministic_is_true_or_false(value):
    with pytest.raises(InvalidConfig, match="deterministic"):
        EngineConfig(deterministic=value)


def test_fp8_is_refused_on_a_cpu():
    with pytest.raises(InvalidConfig, match=r"dtype is fp8.*device is cpu.*bfloat16"):
        check_float8(CPU)


def test_without_torchao_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(InvalidConfig, match=r"torchao.*pip install 'glassblock\[fp8\]'"):
        quantize(SteerlingModel(CONFIG, vocab_multiple=64).bfloat16())


def test_deterministic_is_refused_on_a_cpu():
    """Its libraries choose the order of a sum by the number of rows too: floats differ in their last bits."""
    with pytest.raises(InvalidConfig, match=r"deterministic is true.*device is cpu"):
        check_deterministic(CONFIG, CPU, torch.float32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "fp8"}, r"dtype is fp8.*device is cpu.*bfloat16"),
        ({"deterministic": True}, r"deterministic is true.*device is cpu"),
    ],
    ids=str,
)
def test_an_engine_refuses_what_its_device_cannot_keep_with_a_checkpoint_and_with_a_model(
    make_engine, options, message
):
    """Options that no code read were taken, and ignored, where a ready model was given."""
    with pytest.raises(InvalidConfig, match=message):
        make_engine(EOT, **options)
    with pytest.raises(InvalidConfig, match=message):
        Engine(SteerlingModel(CONFIG), EngineConfig(device="cpu", **options))


def test_deterministic_is_refused_before_weights_are_read(tmp_path):
    config = {"vocab_size": 90, "mask_token_id": 89, "eos_token_id": 88, "pad_token_id": 87}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidConfig, match="deterministic"):
        Engine.from_checkpoint(tmp_path, EngineConfig(device="cpu", deterministic=True))


@pytest.mark.parametrize("num_commits", [1, 64, 65, 130])
def test_explaining_a_fixed_number_at_a_time_gives_each_commit_its_own(make_engine, num_commits):
    runner = make_engine(EOT).runner
    runner.lanes.hidden_NCD.normal_(generator=torch.Generator().manual_seed(4))
    length = runner.lanes.hidden_NCD.shape[1]
    kept = [KeptCommit(i // length, i % length, 3 + i % 50, float(i)) for i in range(num_commits)]
    top_k = [None if i % 7 == 3 else i % 5 for i in range(num_commits)]
    usual, fixed = (
        Explainer(runner.model, runner.lanes, uses_graphs=False, is_deterministic=flag).explain(kept, top_k).read()
        for flag in (False, True)
    )
    assert len(fixed) == num_commits
    for ours, theirs in zip(fixed, usual, strict=True):
        assert ours.epsilon == pytest.approx(theirs.epsilon, abs=1e-4)
        assert ours.known_total == pytest.approx(theirs.known_total, abs=1e-4)
        assert [item.concept_id for item in ours.known] == [item.concept_id for item in theirs.known]
        assert [item.concept_id for item in ours.discovered] == [item.concept_id for item in theirs.discovered]


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"norm_order": "pre"}, "no fused layers"),
        (
            {"concept": dataclasses.replace(CONFIG.concept, use_epsilon_correction=False)},
            "chooses tokens from concept features",
        ),
        ({"intermediate_size": 50}, "intermediate_size is 50"),
        ({"concept": dataclasses.replace(CONFIG.concept, factorize_rank=12)}, "factorize_rank is 12"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_deterministic_names_what_a_checkpoint_lacks(changes, names, monkeypatch):
    """Checked against a GPU's rules without one: nothing is launched."""
    monkeypatch.setattr("engine.model.batch_invariant.HAS_TRITON", True)
    monkeypatch.setattr(
        "engine.model.batch_invariant.is_multipliable", lambda width, dtype: width % 8 == 0, raising=False
    )
    with pytest.raises(InvalidConfig, match=names):
        check_deterministic(dataclasses.replace(CONFIG, **changes), torch.device("cuda"), torch.bfloat16)
