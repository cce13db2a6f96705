"""How the ways to steer compare on the demo model: strengths, layers, schedules.

    python -m demo_model.measure_steering            prints the tables of docs/steering.md

The yardstick is the model card's: the share of complete definitions that a naive Bayes classifier gives to the topic
steered towards, and how the text holds up meanwhile (distinct-2, words that occur in the real definitions).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from engine import Engine, EngineConfig, GenerateRequest, Intervention, ModelConfig, SamplingParams, SteeringParams

from .corpus import load_corpus
from .measure_quality import Bench
from .train import DEFAULT_OUTPUT

TOPICS = 6
TEXTS = 12
MAX_TOKENS = 128
SAMPLING = SamplingParams(temperature=0.6, top_p=0.9, repetition_penalty=1.1)
STRENGTHS = (-8.0, 0.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0)
LAYER_STRENGTH = 4.0

Variant = Mapping[str, Any]
"""Fields of an Intervention beside its concept."""


class SteeringBench:
    """Writes texts under a variant of steering and describes them."""

    def __init__(self, folder: Path, device: str, num_texts: int) -> None:
        self.config = ModelConfig.from_json(folder)
        self.num_texts = num_texts
        corpus, tokenizer = load_corpus(), Tokenizer.from_file(str(folder / "tokenizer.json"))
        end_of_chunk = tokenizer.token_to_id("<|endofchunk|>")
        assert end_of_chunk is not None, "the demo's vocabulary has an end of chunk"
        self._engine = Engine.from_checkpoint(folder, EngineConfig(device=device, dtype="float32"))
        self._bench = Bench(corpus, tokenizer, lambda jobs: [], end_of_chunk)
        self.topics = corpus.largest_topics(TOPICS)

    def describe(self, variant: Variant) -> tuple[float, float, float]:
        """Medians over topics: share of the topic, distinct-2, share of words in the dictionary."""
        requests = [self._request(topic, number, variant) for topic in self.topics for number in range(self.num_texts)]
        texts = [list(output.token_ids) for output in self._engine.generate(requests)]
        found = [
            self._bench.describe(texts[place * self.num_texts : (place + 1) * self.num_texts], topic)
            for place, topic in enumerate(self.topics)
        ]
        share, distinct, dictionary = (
            statistics.median(item[name] for item in found) for name in ("share", "distinct_2", "dictionary")
        )
        return share, distinct, dictionary

    def _request(self, topic: int, number: int, variant: Variant) -> GenerateRequest:
        return GenerateRequest(
            prompt_token_ids=(),
            max_tokens=MAX_TOKENS,
            sampling=SamplingParams(
                temperature=SAMPLING.temperature,
                top_p=SAMPLING.top_p,
                repetition_penalty=SAMPLING.repetition_penalty,
                # Each topic and text under a seed of its own, the same for every variant.
                seed=1000 * topic + number,
            ),
            steering=SteeringParams(interventions=(Intervention(concept_ids=(topic,), **variant),)),
        )


def variants(num_layers: int) -> dict[str, dict[str, Variant]]:
    """Table -> name of a line -> what to steer with."""
    return {
        "strength": {f"{strength:g}": {"strength": strength} for strength in STRENGTHS},
        f"first layer, strength {LAYER_STRENGTH:g}": {
            str(layer): {"strength": LAYER_STRENGTH, "layer": layer} for layer in range(1, num_layers + 1)
        },
        f"schedule, strength {LAYER_STRENGTH:g}": {
            "fixed": {"strength": LAYER_STRENGTH},
            **{
                f"hard_cutoff {cutoff}": {
                    "strength": LAYER_STRENGTH,
                    "schedule": "hard_cutoff",
                    "cutoff_tokens": cutoff,
                }
                for cutoff in (8, 32, 64)
            },
        },
    }


def table(title: str, rows: Mapping[str, Sequence[float]]) -> str:
    """One Markdown table."""
    lines = [f"| {title} | topic | distinct-2 | dictionary |", "| --- | --- | --- | --- |"]
    lines += [f"| {name} | " + " | ".join(f"{value:.2f}" for value in values) + " |" for name, values in rows.items()]
    return "\n".join(lines)


def main() -> None:
    """Print every table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=DEFAULT_OUTPUT, help="checkpoint folder")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--texts", type=int, default=TEXTS, help=f"texts a topic and line ({TEXTS})")
    options = parser.parse_args()
    bench = SteeringBench(options.model, options.device, options.texts)
    for title, lines in variants(bench.config.n_layers).items():
        print(table(title, {name: bench.describe(variant) for name, variant in lines.items()}), flush=True)
        print(flush=True)


if __name__ == "__main__":
    main()
