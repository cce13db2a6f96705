"""Train the demo model from `definitions.tsv.xz` and write its checkpoint folder.

    python -m demo_model.train --steps 17780            one GPU, a few minutes
    python -m demo_model.train --steps 17780 --resume   go on after an interruption
    python -m demo_model.train --help

A run keeps `training_state.pt` in the output folder until it is complete. Equal arguments and an equal
device give equal data and equal initial weights; GPU kernels may differ in the last bits.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from engine.config import ModelConfig
from engine.model.steerling import SteerlingModel
from engine.model.weights import load_model, save_checkpoint

from .association import content_words, word_association
from .catalogue import write_concept_labels
from .corpus import Corpus, load_corpus
from .objective import (
    ALIGNMENT_WEIGHT,
    COMPOSED_WEIGHT,
    KNOWN_WEIGHT,
    Noise,
    alignment_loss,
    concept_losses,
    dense_attend,
    draw_noise,
    flex_attend_factory,
    masked_cross_entropy,
    mean_masked_loss,
    noisy_hidden,
)
from .optimizer import learning_rate_factor, make_optimizers
from .sampling import SamplerSettings
from .sequences import DOSE_SCALE, Batch, SequenceSampler, encode_lines
from .shape import Shape, config_json, initialise
from .tokenizer import save_tokenizer, train_tokenizer

DEFAULT_OUTPUT = Path(__file__).parent / "steerling-demo"
STATE_FILE = "training_state.pt"
LENGTH = 512
"""Tokens of a training sequence."""
EVALUATE_EVERY = 2000


class Trainer:
    """Model, data, optimisers and their random numbers: everything that a resumed run restores."""

    def __init__(self, args: argparse.Namespace, shape: Shape, corpus: Corpus) -> None:
        self.args, self.corpus = args, corpus
        self.device = torch.device(args.device)
        self.tokenizer = train_tokenizer((item.text for item in corpus.train), shape.vocab_size)
        self.config_json = config_json(shape, self.tokenizer, len(corpus.concepts))
        self.config = ModelConfig.from_dict(self.config_json)
        self.model = SteerlingModel(self.config)
        initialise(self.model, args.seed)
        self.model.to(self.device)
        block = self.config.diff_block_size
        self.data = SequenceSampler(corpus, corpus.train, self.tokenizer, LENGTH, block, self.device)
        self.held_out = SequenceSampler(corpus, corpus.held_out, self.tokenizer, LENGTH, block, self.device)
        rows = encode_lines(corpus.train, self.tokenizer)
        texts = [self.tokenizer.decode([token], skip_special_tokens=False) for token in range(shape.vocab_size)]
        self.association_CV = word_association(
            rows, corpus.labels(corpus.train), len(corpus.concepts), content_words(rows, texts)
        ).to(self.device)
        self.optimizers = make_optimizers(self.model, lr=args.lr, muon_lr=args.muon_lr)
        self.peak_rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        self.generator = torch.Generator(self.device).manual_seed(args.seed)
        self.step_index, self.seconds = 0, 0.0
        self.log: list[dict[str, float]] = []
        self.earlier: list[dict[str, Any]] = []
        self.flex = None if args.dense_attention else flex_attend_factory(LENGTH, block, self.device)
        self.language_loss = torch.compile(self._language_loss) if args.compile else self._language_loss

    def _language_loss(self, batch: Batch, noise: Noise) -> tuple[Tensor, Tensor, Tensor]:
        """(hidden_BSD of the noisy copy, weighted loss, plain mean over masked positions)."""
        block = self.config.diff_block_size
        attend = self.flex(noise.cut_B) if self.flex else dense_attend(LENGTH, block, noise.cut_B)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            hidden_BSD = noisy_hidden(self.model, batch, noise, attend, dropout=self.args.dropout)
            weighted, plain = masked_cross_entropy(self.model, hidden_BSD, batch, noise, block)
        return hidden_BSD, weighted, plain

    def step(self, progress: float) -> Tensor:
        """One update; returns the loss's parts, still on the device."""
        for optimizer, rates in zip(self.optimizers, self.peak_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * learning_rate_factor(progress)
        batch = self.data.draw(self.args.batch, self.generator)
        noise = draw_noise(self.args.batch, LENGTH, self.config.diff_block_size, self.generator)
        hidden_BSD, masked, plain = self.language_loss(batch, noise)
        composed, known = concept_losses(self.model, hidden_BSD, batch, noise)
        alignment = alignment_loss(self.model, self.association_CV)
        loss = masked + COMPOSED_WEIGHT * composed + KNOWN_WEIGHT * known + ALIGNMENT_WEIGHT * alignment
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step_index += 1
        return torch.stack((plain, composed, known, alignment)).detach()

    def masked_loss(self, data: SequenceSampler, batches: int = 16) -> float:
        """`mean_masked_loss` of this model."""
        return mean_masked_loss(self.model, data, batches)

    def save_state(self, path: Path) -> None:
        """Everything a resumed run needs, replaced at once."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "generator": self.generator.get_state(),
            "step": self.step_index,
            "seconds": self.seconds,
            "log": self.log,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)

    def load_state(self, path: Path) -> None:
        """Continue where `save_state` left off."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.generator.set_state(state["generator"].cpu())
        self.step_index, self.seconds, self.log = state["step"], state["seconds"], state["log"]

    def start_from(self, folder: Path) -> None:
        """Begin with the weights of a checkpoint of equal shape."""
        loaded = dict(load_model(folder, device=self.device, dtype=torch.float32).named_parameters())
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(loaded[name][: parameter.shape[0]])
        log = folder / "training.json"
        self.earlier = json.loads(log.read_text("utf-8"))["runs"] if log.is_file() else []

    def export(self, folder: Path) -> None:
        """Write the checkpoint folder: weights, config, tokenizer, sampling defaults, concept labels."""
        save_checkpoint(self.model, self.config_json, folder)
        (folder / "model.safetensors").chmod(0o644)
        save_tokenizer(self.tokenizer, folder, self.config.block_size)
        (folder / "generation_config.json").write_text(
            json.dumps(asdict(SamplerSettings()), indent=2) + "\n", encoding="utf-8"
        )
        write_concept_labels(self.corpus.concepts, self.config.concept.n_discovered, folder / "concept_labels.parquet")


def run(trainer: Trainer, args: argparse.Namespace) -> None:
    """Steps until the budget is spent, with a progress bar, a log and states to resume from."""
    state_path = args.out / STATE_FILE
    limit = args.minutes * 60 if args.minutes else None
    began, seconds_before, last_save = time.monotonic(), trainer.seconds, time.monotonic()
    bar = tqdm(total=args.steps, initial=trainer.step_index, unit="step", mininterval=2.0, disable=args.quiet)
    while True:
        progress = trainer.seconds / limit if limit else trainer.step_index / args.steps
        if progress >= 1:
            break
        parts = trainer.step(progress)
        # Reading a result waits for the device, so do it rarely.
        if trainer.step_index % 20 == 0:
            masked, composed, known, alignment = parts.tolist()
            trainer.seconds = seconds_before + time.monotonic() - began
            bar.set_postfix(masked=f"{masked:.3f}", composed=f"{composed:.2f}", align=f"{alignment:.3f}")
            if trainer.step_index % EVALUATE_EVERY == 0:
                entry = {
                    "step": trainer.step_index,
                    "seconds": round(trainer.seconds),
                    "masked": masked,
                    "composed": composed,
                    "known": known,
                    "alignment": alignment,
                    "held_out": trainer.masked_loss(trainer.held_out, 8),
                }
                trainer.log.append(entry)
                print(json.dumps({key: round(value, 4) for key, value in entry.items()}), flush=True)
            if time.monotonic() - last_save > 60 * args.save_every:
                trainer.save_state(state_path)
                last_save = time.monotonic()
        bar.update()
    bar.close()
    trainer.seconds = seconds_before + time.monotonic() - began
    trainer.save_state(state_path)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo model and write its checkpoint folder.")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--steps", type=int, default=17780, help="updates in all")
    budget.add_argument("--minutes", type=float, help="train for so long instead of for so many updates")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUTPUT, help="checkpoint folder")
    parser.add_argument("--start-from", type=Path, help="checkpoint folder whose weights to begin with")
    parser.add_argument("--resume", action="store_true", help="go on from the folder's training_state.pt")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=64, help="sequences in an update")
    parser.add_argument("--lr", type=float, default=3e-3, help="AdamW's peak rate")
    parser.add_argument("--muon-lr", type=float, default=0.02, help="Muon's peak rate")
    parser.add_argument("--dropout", type=float, default=0.0, help="of the residual stream, in training")
    parser.add_argument("--save-every", type=float, default=2.0, help="minutes between training states")
    parser.add_argument("--dense-attention", action="store_true", help="a plain mask instead of flex attention")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="run without torch.compile")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    for name, value in asdict(Shape()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    args = parser.parse_args()
    if not args.device.startswith("cuda"):
        args.compile, args.dense_attention = False, True
    return args


def main() -> None:
    args = parse_args()
    torch.set_float32_matmul_precision("high")
    shape = Shape(**{name: getattr(args, name) for name in asdict(Shape())})
    trainer = Trainer(args, shape, load_corpus())
    state_path = args.out / STATE_FILE
    if args.start_from:
        trainer.start_from(args.start_from)
    if args.resume:
        if not state_path.is_file():
            raise SystemExit(f"no {state_path} to resume from; start without --resume")
        trainer.load_state(state_path)
    num_parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    print(f"{num_parameters} parameters, {len(trainer.corpus.train)} definitions, device {trainer.device}", flush=True)
    run(trainer, args)
    trainer.export(args.out)
    summary = {
        "parameters": num_parameters,
        "sequence_length": LENGTH,
        "training_loss": trainer.masked_loss(trainer.data),
        "held_out_loss": trainer.masked_loss(trainer.held_out),
        "runs": [*trainer.earlier, describe_run(trainer)],
    }
    (args.out / "training.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    state_path.unlink()
    print(json.dumps({key: value for key, value in summary.items() if key != "runs"}), flush=True)


def describe_run(trainer: Trainer) -> dict[str, Any]:
    """What a run cost and how its losses went, for `training.json`."""
    names = ("seed", "batch", "lr", "muon_lr", "dropout")
    return {
        "steps": trainer.step_index,
        "seconds": round(trainer.seconds, 1),
        "device": torch.cuda.get_device_name() if trainer.device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        **{name: getattr(trainer.args, name) for name in names},
        "dose_scale": DOSE_SCALE,
        "log": [{key: round(value, 4) for key, value in entry.items()} for entry in trainer.log],
    }


if __name__ == "__main__":
    main()
