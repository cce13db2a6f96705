"""The measuring script's parts, and a small dose measured with the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from demo_model.corpus import Corpus, load_corpus
from demo_model.measure_quality import PRIMED_LENGTH, Bench, Write, dense_writer, distinct_2, engine_writer
from demo_model.sampling import Job, SamplerSettings
from engine.model.weights import load_model

CHECKPOINT = Path(__file__).parents[2] / "demo_model" / "steerling-demo"


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


@pytest.fixture(scope="module")
def write() -> Write:
    return engine_writer(CHECKPOINT, SamplerSettings(), 0, "cpu")


@pytest.fixture(scope="module")
def bench(corpus: Corpus, tokenizer: Tokenizer, write: Write) -> Bench:
    end_of_chunk = tokenizer.token_to_id("<|endofchunk|>")
    assert end_of_chunk is not None
    return Bench(corpus, tokenizer, write, end_of_chunk)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text).ids)


def test_distinct_2_counts_different_pairs_of_neighbours() -> None:
    assert distinct_2("a cat, a dog") == 1.0
    assert distinct_2("of or of or of") == 0.5
    assert distinct_2("alone") == 1.0


def test_only_ended_definitions_count(bench: Bench, tokenizer: Tokenizer) -> None:
    end = bench.end_of_chunk
    ids = [*encode(tokenizer, "a cat\n"), end, end, *encode(tokenizer, "an act\n"), end, *encode(tokenizer, "a pl")]
    assert bench.definitions(ids) == ["a cat", "an act"]


def test_the_share_of_real_definitions_is_high_for_their_topic_and_low_for_another(
    bench: Bench, corpus: Corpus
) -> None:
    plants = [item.text for item in corpus.held_out if item.topic == 20]
    assert bench.share_of(20, plants) > 0.8 > 0.1 > bench.share_of(18, plants)
    assert bench.dictionary_share(plants) == 1.0 > bench.dictionary_share(["a qqxx herb"])


def test_primed_prompts_fill_one_block_with_whole_definitions(bench: Bench, corpus: Corpus) -> None:
    texts = {item.text for item in corpus.held_out if item.topic == 5}
    for prompt in bench.primed_prompts(5, 3):
        assert len(prompt) == PRIMED_LENGTH and prompt[-1] == bench.end_of_chunk
        assert set(bench.definitions(prompt)) <= texts


def test_the_plain_sampler_writes_what_the_engine_writes(tokenizer: Tokenizer) -> None:
    """Greedy, from prompts: an empty canvas alone is a tie of all positions."""
    model = load_model(CHECKPOINT, device=torch.device("cpu"), dtype=torch.float32)
    jobs = [
        Job(prompt_token_ids=tuple(encode(tokenizer, text)), max_tokens=40, concept=5, strength=strength)
        for text, strength in (("an animal that", 0.0), ("a plant with", 4.0), ("the act of", -4.0))
    ]
    plain = dense_writer(model, SamplerSettings(temperature=1e-4), 0, torch.device("cpu"))(jobs)
    assert plain == engine_writer(CHECKPOINT, SamplerSettings(temperature=0.0), 0, "cpu")(jobs)


def test_a_strong_direction_decides_the_topic(bench: Bench, write: Write) -> None:
    topics = bench.topics[1:4]
    assert [bench.corpus.concepts[topic].name for topic in topics] == ["artifact", "person", "plant"]
    shares = {}
    for strength in (0.0, 8.0):
        texts = write([Job(max_tokens=64, concept=topic, strength=strength) for topic in topics for _ in range(4)])
        lists = [[text for ids in texts[at : at + 4] for text in bench.definitions(ids)] for at in (0, 4, 8)]
        shares[strength] = [bench.share_of(topic, flat) for topic, flat in zip(topics, lists, strict=True)]
    assert sum(shares[0.0]) / 3 < 0.3
    assert min(shares[8.0]) > 0.6
