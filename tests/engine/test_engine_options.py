"""The options that only a GPU can keep, at the door: what is refused, and how the refusal reads."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch

from engine.config import ConceptConfig, EngineConfig, ModelConfig
from engine.errors import InvalidConfig
from engine.model.batch_invariant import check_deterministic
from engine.model.quantization import check_float8, quantize
from engine.model.steerling import SteerlingModel

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
    with pytest.raises(InvalidConfig, match=r"deterministic is true.*device is cpu"):
        check_deterministic(CONFIG, CPU, torch.float32)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"norm_order": "pre"}, "no fused layers"),
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
