"""The folder that ships: size, files, tokenizer, labels, weights, card, measured quality."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from steerling.configs import CausalDiffusionConfig, ConceptConfig
from steerling.models.interpretable import InterpretableCausalDiffusionLM
from transformers import AutoTokenizer

from demo_model.corpus import Corpus, load_corpus
from demo_model.measure_quality import NUM_TOPICS
from demo_model.tokenizer import SPECIAL_ID_NAMES, SPECIAL_TOKENS
from engine import ModelConfig
from engine.model.weights import load_model

DEMO = Path(__file__).parents[2] / "demo_model"
CHECKPOINT = DEMO / "steerling-demo"
PUBLIC_COLUMNS = [
    "concept_id",
    "concept_name",
    "concept_description",
    "head",
    "public_group_id",
    "group_name",
    "is_steerable",
    "is_tone",
    "is_alignment",
    "is_demographic",
]


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return ModelConfig.from_json(CHECKPOINT)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(CHECKPOINT, local_files_only=True)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


@pytest.fixture(scope="module")
def quality() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((CHECKPOINT / "quality.json").read_text("utf-8"))
    return content


def test_everything_together_is_at_most_12_mb() -> None:
    files = [file for file in DEMO.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert sum(file.stat().st_size for file in files) <= 12_000_000


def test_the_config_is_the_flat_layout_and_names_every_special_id(config: ModelConfig, tokenizer: Any) -> None:
    raw = json.loads((CHECKPOINT / "config.json").read_text("utf-8"))
    assert raw["model_type"] == "steerling" and "concept" not in raw
    assert [tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS] == [raw[n] for n in SPECIAL_ID_NAMES]
    assert config.diff_block_size == 64 and config.norm_order == "post" and config.use_qk_norm
    assert config.concept.use_epsilon_correction and config.concept.factorize_discovered and config.weight_sharing


def test_weights_are_stored_in_bfloat16_and_load_as_float32() -> None:
    with safe_open(CHECKPOINT / "model.safetensors", framework="pt") as stored:
        assert {stored.get_slice(name).get_dtype() for name in stored.keys()} == {"BF16"}  # noqa: SIM118
    model = load_model(CHECKPOINT, device=torch.device("cpu"), dtype=torch.float32)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert 4_000_000 < sum(parameter.numel() for parameter in model.parameters()) < 5_000_000


def test_the_reference_package_loads_it_and_gives_the_same_logits(config: ModelConfig) -> None:
    raw = json.loads((CHECKPOINT / "config.json").read_text("utf-8"))
    concept = {name: raw[name] for name in ConceptConfig.model_fields if name in raw and name != "block_size"}
    shape = {name: raw[name] for name in CausalDiffusionConfig.model_fields if name in raw and name != "model_type"}
    reference = InterpretableCausalDiffusionLM(
        CausalDiffusionConfig(**shape),
        ConceptConfig(**concept, block_size=raw["concept_block_size"]),
        vocab_size=raw["vocab_size"],
    ).float()
    missing, unexpected = reference.load_state_dict(load_file(CHECKPOINT / "model.safetensors"), strict=False)
    assert not unexpected and set(missing) <= {"transformer.lm_head.weight"}
    reference.transformer._restore_weight_tying()
    model = load_model(CHECKPOINT, device=torch.device("cpu"), dtype=torch.float32)
    token_ids = torch.randint(config.vocab_size, (2, 150), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits, outputs = reference(token_ids)
        hidden = model.hidden_dense(token_ids)
    torch.testing.assert_close(model.transformer.logits(hidden), logits, atol=1e-3, rtol=0)
    torch.testing.assert_close(model.known_features(hidden.flatten(0, 1)), outputs.known_features.flatten(0, 1))


def test_the_tokenizer_covers_the_models_vocabulary(config: ModelConfig, tokenizer: Any) -> None:
    assert len(tokenizer) == config.vocab_size


@pytest.mark.parametrize(
    "text",
    [
        "an animal that",
        "  two  spaces\n\ttabs",
        "caf\u00e9 \u65e5\u672c\u8a9e \U0001f600",
        "a <|mask|> b<|endofchunk|>",
        "",
    ],
)
def test_any_text_comes_back_from_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)))


def test_special_tokens_can_be_parsed_and_skipped(tokenizer: Any) -> None:
    ids = tokenizer.encode("a plant\n<|endofchunk|>an act", add_special_tokens=False)
    assert ids.count(tokenizer.convert_tokens_to_ids("<|endofchunk|>")) == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a plant\nan act"


def test_common_words_are_one_token(tokenizer: Any) -> None:
    words = " a small animal of North America that has a long tail and lives in trees"
    assert len(tokenizer.encode(words, add_special_tokens=False)) == len(words.split())


def test_concept_labels_have_the_public_columns_and_a_row_for_every_concept(
    config: ModelConfig, corpus: Corpus
) -> None:
    table = pq.read_table(CHECKPOINT / "concept_labels.parquet")
    assert table.column_names == PUBLIC_COLUMNS
    rows = table.to_pylist()
    num_known = config.concept.n_concepts
    assert [row["concept_id"] for row in rows] == list(range(num_known + config.concept.n_discovered))
    assert [row["head"] for row in rows] == ["known"] * num_known + ["unknown"] * config.concept.n_discovered
    assert [row["concept_name"] for row in rows[:num_known]] == [concept.name for concept in corpus.concepts]
    assert all(row["concept_description"] and row["group_name"] and row["is_steerable"] for row in rows[:num_known])
    assert not any(row["is_steerable"] or row["concept_name"] for row in rows[num_known:])


def test_the_licence_goes_with_the_data_and_with_the_weights() -> None:
    licence = (DEMO / "WORDNET_LICENSE").read_text("utf-8")
    assert "WordNet 3.1 Copyright 2011 by Princeton University" in licence
    assert licence.strip().endswith("agrees to preserve same.")
    assert licence.strip() in (CHECKPOINT / "README.md").read_text("utf-8")


def test_the_card_shows_the_measured_numbers(quality: dict[str, Any]) -> None:
    card = (CHECKPOINT / "README.md").read_text("utf-8")
    assert f"{quality['held_out_loss']:.3f}" in card and f"{quality['classifier_accuracy']:.1%}" in card
    for prompt, texts in quality["samples"].items():
        assert len(texts) == 10 and all(text in card and text.startswith(prompt) for text in texts)
    for strength in ("2", "4", "8"):
        for row in quality["dose"][strength]["topics"].values():
            assert len(row["samples"]) == 10 and all(text in card for text in row["samples"])


def test_the_measured_dose_rises_over_the_whole_range(quality: dict[str, Any]) -> None:
    medians = [quality["dose"][strength]["median"] for strength in ("0", "2", "4", "8")]
    shares = [median["share"] for median in medians]
    assert len(quality["dose"]["8"]["topics"]) == NUM_TOPICS
    assert all(later - earlier >= 0.05 for earlier, later in zip(shares, shares[1:], strict=False))
    assert shares[1] <= 0.6 and shares[3] >= 0.8
    for name in ("distinct_2", "dictionary"):
        assert all(median[name] >= 0.8 * medians[0][name] for median in medians)
    assert medians[0]["dictionary"] > 0.9


def test_suppression_lowers_the_topic_of_a_prompt(quality: dict[str, Any]) -> None:
    unsteered = quality["suppression"]["suppress 0"]["median"]
    assert unsteered > 0.6
    assert quality["suppression"]["suppress 4"]["median"] < 0.5 * unsteered
    assert quality["suppression"]["inject -8"]["median"] < 0.5 * unsteered


def test_top_tokens_of_a_topic_are_words_of_its_definitions(quality: dict[str, Any], corpus: Corpus) -> None:
    """Among definitions that hold a top token, the concept is at least three times as frequent as elsewhere."""
    labels = corpus.labels(corpus.train)
    words = [set(item.text.split()) for item in corpus.train]
    for concept in [*corpus.largest_topics(NUM_TOPICS), *range(45, len(corpus.concepts))]:
        tokens = {token.strip() for token in quality["top_tokens"][corpus.concepts[concept].name]}
        holds = [concept in ids for ids, spelled in zip(labels, words, strict=True) if spelled & tokens]
        prior = corpus.concepts[concept].num_definitions / len(labels)
        assert sum(holds) / len(holds) >= min(3 * prior, 0.3), corpus.concepts[concept].name
