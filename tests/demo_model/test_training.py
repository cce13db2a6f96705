"""Training equals inference, its fast paths equal its slow ones, and a run can be resumed."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from demo_model.corpus import Corpus, load_corpus
from demo_model.objective import (
    dense_attend,
    draw_noise,
    flex_attend_factory,
    injections,
    noisy_hidden,
    two_copy_mask,
)
from demo_model.sequences import Batch, SequenceSampler, follow_probability
from demo_model.shape import Shape
from demo_model.topics import TOPICS
from demo_model.train import Trainer, run
from engine.model.steerling import SteerlingModel
from engine.model.weights import load_model

CHECKPOINT = Path(__file__).parents[2] / "demo_model" / "steerling-demo"
LENGTH, BLOCK = 256, 64
CPU = torch.device("cpu")
TINY = Shape(vocab_size=600, n_layers=2, n_embd=32, n_head=2, n_kv_heads=1, intermediate_size=32)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


@pytest.fixture(scope="module")
def model() -> SteerlingModel:
    return load_model(CHECKPOINT, device=CPU, dtype=torch.float32)


@pytest.fixture(scope="module")
def data(corpus: Corpus, tokenizer: Tokenizer) -> SequenceSampler:
    return SequenceSampler(corpus, corpus.train[::8], tokenizer, LENGTH, BLOCK, CPU)


def test_a_noisy_block_sees_exactly_what_a_canvas_sees_in_inference(
    model: SteerlingModel, data: SequenceSampler
) -> None:
    generator = torch.Generator().manual_seed(0)
    batch = data.draw(5, generator)
    noise = draw_noise(5, LENGTH, BLOCK, generator)
    cut_B = torch.tensor([64, 23, 64, 40, 64])
    is_inside_BS = torch.arange(LENGTH) % BLOCK < cut_B[:, None]
    noise = noise._replace(cut_B=cut_B, is_masked_BS=noise.is_masked_BS & is_inside_BS)
    mask_id = model.config.mask_token_id
    trained_BSD = noisy_hidden(model, batch, noise, dense_attend(LENGTH, BLOCK, noise.cut_B))
    assert (batch.strength_B != 0).any()
    for index in range(5):
        for block in range(LENGTH // BLOCK):
            start, end = block * BLOCK, block * BLOCK + int(noise.cut_B[index])
            ids_1S = batch.token_ids_BS[index : index + 1, :end].clone()
            ids_1S[0, start:] = torch.where(noise.is_masked_BS[index, start:end], mask_id, ids_1S[0, start:])
            injection_1D = injections(model, batch.concept_B[index : index + 1], batch.strength_B[index : index + 1])
            is_steered = block >= int(batch.steered_from_B[index])
            injection_1SD = (ids_1S == mask_id)[:, :, None] * injection_1D[:, None] if is_steered else None
            served_SD = model.hidden_dense(ids_1S, injection_1SD)[0, start:]
            torch.testing.assert_close(trained_BSD[index, start:end], served_SD, atol=2e-4, rtol=0)


def test_the_two_copy_mask_hides_the_noisy_copy_from_other_blocks() -> None:
    mask_TT = two_copy_mask(4, 2, torch.tensor([2]))[0, 0]
    clean, noisy = slice(0, 4), slice(4, 8)
    assert mask_TT[clean, clean].tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    assert not mask_TT[clean, noisy].any()
    assert mask_TT[noisy, clean].tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]]
    assert mask_TT[noisy, noisy].tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_equals_dense_attention(model: SteerlingModel, data: SequenceSampler) -> None:
    generator = torch.Generator().manual_seed(1)
    batch = data.draw(3, generator)
    noise = draw_noise(3, LENGTH, BLOCK, generator)._replace(cut_B=torch.tensor([64, 9, 40]))
    slow_BSD = noisy_hidden(model, batch, noise, dense_attend(LENGTH, BLOCK, noise.cut_B))
    fast_BSD = noisy_hidden(model, batch, noise, flex_attend_factory(LENGTH, BLOCK, CPU)(noise.cut_B))
    exists_BS = torch.arange(LENGTH) % BLOCK < noise.cut_B[:, None]
    torch.testing.assert_close(fast_BSD[exists_BS], slow_BSD[exists_BS], atol=2e-4, rtol=0)


def test_positions_carry_the_labels_of_their_definition(
    corpus: Corpus, tokenizer: Tokenizer, data: SequenceSampler
) -> None:
    batch = data.draw(4, torch.Generator().manual_seed(2))
    labels = {item.text: set(ids) for item, ids in zip(corpus.train, corpus.labels(corpus.train), strict=True)}
    end = tokenizer.token_to_id("<|endofchunk|>")
    for tokens, ids_SL in zip(batch.token_ids_BS.tolist(), batch.labels_BSL, strict=True):
        start = 0
        while end in tokens[start:]:
            stop = tokens.index(end, start)
            text = tokenizer.decode(tokens[start:stop])
            assert text.endswith("\n")
            found = {int(label) for label in ids_SL[start : stop + 1].flatten() if label >= 0}
            assert found == labels[text[:-1]] or len([item for item in corpus.train if item.text == text[:-1]]) > 1
            start = stop + 1
        assert start > 0


def steered_share(data: SequenceSampler, batch: Batch, low: float, high: float) -> float:
    """How often a definition in the steered part carries the injected concept, strengths in [low, high)."""
    is_end = batch.token_ids_BS == data.flat[data.length_N[0] - 1]
    block_S = torch.arange(LENGTH) // BLOCK
    # Definitions that begin before the steered part may end in it: leave its first block out.
    is_counted = is_end & (block_S > batch.steered_from_B[:, None])
    # A field with few definitions runs out of them.
    is_topic_B = batch.concept_B < len(TOPICS)
    is_counted &= (is_topic_B & (batch.strength_B >= low) & (batch.strength_B < high))[:, None]
    carries = (batch.labels_BSL == batch.concept_B[:, None, None]).any(-1)
    return carries[is_counted].float().mean().item()


@pytest.mark.parametrize("strength", [1.0, 2.0, 4.0, 8.0])
def test_steered_definitions_follow_their_concept_as_often_as_the_strength_says(
    data: SequenceSampler, strength: float
) -> None:
    batch = data.draw(6000, torch.Generator().manual_seed(3))
    expected = follow_probability(torch.tensor(strength)).item()
    # Definitions from anywhere carry the concept too, by chance.
    assert expected - 0.06 < steered_share(data, batch, strength - 0.5, strength + 0.5) < expected + 0.12


def test_sequences_steered_away_leave_their_topic(data: SequenceSampler) -> None:
    batch = data.draw(12000, torch.Generator().manual_seed(4))
    assert steered_share(data, batch, -12, -8) < 0.15 < 0.3 < steered_share(data, batch, -2, -0.001)


def arguments(folder: Path, steps: int) -> argparse.Namespace:
    values: dict[str, Any] = {
        "steps": steps, "minutes": None, "out": folder, "device": "cpu", "seed": 0, "batch": 2, "lr": 3e-3,
        "muon_lr": 0.02, "dropout": 0.0, "save_every": 60.0, "compile": False, "dense_attention": True, "quiet": True,
    }  # fmt: skip
    return argparse.Namespace(**values)


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(corpus: Corpus, tmp_path: Path) -> None:
    small = Corpus(train=corpus.train[::100], held_out=corpus.held_out[::20], concepts=corpus.concepts)
    whole = Trainer(arguments(tmp_path / "whole", 4), TINY, small)
    run(whole, whole.args)

    first = Trainer(arguments(tmp_path / "halves", 4), TINY, small)
    for step in range(2):
        first.step(step / 4)
    state = tmp_path / "halves" / "training_state.pt"
    first.save_state(state)
    second = Trainer(arguments(tmp_path / "halves", 4), TINY, small)
    second.load_state(state)
    run(second, second.args)

    assert second.step_index == whole.step_index == 4
    for ours, theirs in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_training_lowers_the_loss_and_exports_a_checkpoint_that_loads(corpus: Corpus, tmp_path: Path) -> None:
    small = Corpus(train=corpus.train[::100], held_out=corpus.held_out[::20], concepts=corpus.concepts)
    trainer = Trainer(arguments(tmp_path, 30), TINY, small)
    before = trainer.masked_loss(trainer.data, 2)
    run(trainer, trainer.args)
    assert trainer.masked_loss(trainer.data, 2) < before - 0.3
    trainer.export(tmp_path)
    loaded = load_model(tmp_path, device=CPU, dtype=torch.float32)
    assert loaded.config.concept.n_concepts == len(corpus.concepts)
