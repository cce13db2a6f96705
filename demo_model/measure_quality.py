"""Measure the demo model: held-out loss, texts, dose of steering, suppression, top tokens of concepts.

    python -m demo_model.measure_quality                     writes quality.json and README.md, the model card
    python -m demo_model.measure_quality --backend dense     the same with the plain sampler instead of the engine

Numbers are shares of complete definitions (the text between two end-of-chunk tokens) that a naive Bayes
classifier gives to a topic. The classifier learns from the real training definitions.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from engine import (
    Engine,
    EngineConfig,
    GenerateRequest,
    Intervention,
    SamplingParams,
    SteeringParams,
    Suppression,
)
from engine.model.steerling import SteerlingModel
from engine.model.weights import load_model

from .classifier import TopicClassifier, words
from .corpus import Corpus, load_corpus
from .model_card import write_card
from .objective import mean_masked_loss
from .sampling import Job, SamplerSettings, sample
from .sequences import SequenceSampler, encode_lines
from .train import DEFAULT_OUTPUT, LENGTH

STRENGTHS = (0.0, 2.0, 4.0, 8.0)
NUM_TOPICS = 12
PROMPTS = ("", "an animal that", "a plant with", "the act of")
SAMPLES = 10
PRIMED_LENGTH = 64
"""Tokens of a prompt that is about a topic: one block."""
MAX_TOKENS = 128
SUPPRESSIONS = (0.0, 1.0, 4.0)
NEGATIVE_STRENGTHS = (-8.0,)
MAX_SUPPRESSED_TOKENS = 64

Write = Callable[[Sequence[Job]], list[list[int]]]
"""Jobs to new token ids, in order."""


def dense_writer(model: SteerlingModel, settings: SamplerSettings, seed: int, device: torch.device) -> Write:
    """Writes with the plain sampler, all jobs of one prompt length at once."""
    generator = torch.Generator(device).manual_seed(seed)

    def write(jobs: Sequence[Job]) -> list[list[int]]:
        texts: list[list[int]] = [[] for _ in jobs]
        for length in sorted({len(job.prompt_token_ids) for job in jobs}):
            chosen = [index for index, job in enumerate(jobs) if len(job.prompt_token_ids) == length]
            for index, text in zip(chosen, sample(model, [jobs[i] for i in chosen], settings, generator), strict=True):
                texts[index] = text
        return texts

    return write


def engine_writer(folder: Path, settings: SamplerSettings, seed: int, device: str) -> Write:
    """Writes with the serving engine, each job under its own seed."""
    engine = Engine.from_checkpoint(folder, EngineConfig(device=device, dtype="float32"))
    seeds = itertools.count(seed)

    def request(job: Job) -> GenerateRequest:
        inject = (Intervention(concept_ids=(job.concept,), strength=job.strength),) if job.strength else ()
        suppress = (Suppression(concept_id=job.concept, strength=job.suppression),) if job.suppression else ()
        return GenerateRequest(
            prompt_token_ids=job.prompt_token_ids,
            max_tokens=job.max_tokens,
            sampling=SamplingParams(**asdict(settings), seed=next(seeds)),
            steering=SteeringParams(interventions=inject, suppress=suppress),
        )

    def write(jobs: Sequence[Job]) -> list[list[int]]:
        return [list(output.token_ids) for output in engine.generate([request(job) for job in jobs])]

    return write


def distinct_2(text: str) -> float:
    """Different pairs of neighbouring words over all of them; 1.0 for a text without a pair."""
    tokens = words(text)
    pairs = list(zip(tokens, tokens[1:], strict=False))
    return len(set(pairs)) / len(pairs) if pairs else 1.0


class Bench:
    """One model with what is needed to read its texts."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, write: Write, end_of_chunk: int) -> None:
        self.corpus, self.tokenizer, self.write, self.end_of_chunk = corpus, tokenizer, write, end_of_chunk
        self.classifier = TopicClassifier(corpus.train)
        self.dictionary = {
            word for part in (corpus.train, corpus.held_out) for item in part for word in words(item.text)
        }
        self.topics = corpus.largest_topics(NUM_TOPICS)

    def definitions(self, token_ids: Sequence[int]) -> list[str]:
        """The complete definitions of a text; the last one counts only if it was ended."""
        parts: list[list[int]] = [[]]
        for token in token_ids:
            if token == self.end_of_chunk:
                parts.append([])
            else:
                parts[-1].append(token)
        return [text for text in (self.tokenizer.decode(part).strip() for part in parts[:-1]) if text]

    def share_of(self, topic: int, definitions: Sequence[str]) -> float:
        """Share of definitions that the classifier gives to the topic."""
        return statistics.fmean(self.classifier.topic(text) == topic for text in definitions) if definitions else 0.0

    def dictionary_share(self, definitions: Sequence[str]) -> float:
        """Share of words that occur in the real definitions."""
        hits = [word in self.dictionary for text in definitions for word in words(text)]
        return statistics.fmean(hits) if hits else 0.0

    def dose(self, num_texts: int, strengths: Sequence[float], max_tokens: int = MAX_TOKENS) -> dict[str, Any]:
        """Topic share, distinct-2 and dictionary share at each strength, per topic and their medians."""
        rows: dict[str, Any] = {}
        for strength in strengths:
            # Unsteered texts are the same for every topic: four times as many serve all.
            per_set = num_texts if strength else 4 * num_texts
            topics = self.topics if strength else self.topics[:1]
            jobs = [
                Job(concept=topic, strength=strength, max_tokens=max_tokens) for topic in topics for _ in range(per_set)
            ]
            texts = self.write(jobs)
            per_topic: dict[str, dict[str, Any]] = {}
            for place, topic in enumerate(self.topics):
                chosen = texts[place * per_set : (place + 1) * per_set] if strength else texts
                per_topic[self.corpus.concepts[topic].name] = self.describe(chosen, topic)
            medians = {
                name: statistics.median(values[name] for values in per_topic.values())
                for name in ("share", "distinct_2", "dictionary")
            }
            rows[f"{strength:g}"] = {"median": medians, "topics": per_topic}
            print_dose({f"{strength:g}": rows[f"{strength:g}"]})
        return rows

    def describe(self, texts: Sequence[Sequence[int]], topic: int) -> dict[str, Any]:
        """What texts steered towards a topic look like."""
        lists = [self.definitions(text) for text in texts]
        flat = [definition for definitions in lists for definition in definitions]
        return {
            "share": self.share_of(topic, flat),
            "distinct_2": statistics.fmean(distinct_2(" ".join(definitions)) for definitions in lists),
            "dictionary": self.dictionary_share(flat),
            "definitions": len(flat),
            "samples": flat[:SAMPLES],
        }

    def suppression(self, num_texts: int) -> dict[str, Any]:
        """Topic share after held-out definitions of the topic, without and with suppression."""
        settings = [("suppress", value) for value in SUPPRESSIONS] + [("inject", value) for value in NEGATIVE_STRENGTHS]
        prompts = {topic: self.primed_prompts(topic, num_texts) for topic in self.topics}
        rows: dict[str, Any] = {}
        for kind, value in settings:
            jobs = [
                Job(
                    prompt_token_ids=prompt,
                    max_tokens=MAX_SUPPRESSED_TOKENS,
                    concept=topic,
                    strength=value if kind == "inject" else 0.0,
                    suppression=value if kind == "suppress" else 0.0,
                )
                for topic in self.topics
                for prompt in prompts[topic]
            ]
            texts = self.write(jobs)
            shares = {}
            for place, topic in enumerate(self.topics):
                chosen = texts[place * num_texts : (place + 1) * num_texts]
                flat = [definition for text in chosen for definition in self.definitions(text)]
                shares[self.corpus.concepts[topic].name] = self.share_of(topic, flat)
            rows[f"{kind} {value:g}"] = {"median": statistics.median(shares.values()), "topics": shares}
        return rows

    def primed_prompts(self, topic: int, count: int) -> list[tuple[int, ...]]:
        """Prompts of held-out definitions of a topic that fill PRIMED_LENGTH tokens exactly."""
        own = [item.text for item in self.corpus.held_out if item.topic == topic]
        lines = [[*self.tokenizer.encode(f"{text}\n").ids, self.end_of_chunk] for text in own]
        chooser = random.Random(topic)
        prompts: list[tuple[int, ...]] = []
        while len(prompts) < count:
            ids: list[int] = []
            while len(ids) < PRIMED_LENGTH:
                ids += chooser.choice(lines)
            if len(ids) == PRIMED_LENGTH:
                prompts.append(tuple(ids))
        return prompts

    def samples(self, max_tokens: int = 48) -> dict[str, list[str]]:
        """Ten texts of each prompt, as they come."""
        result = {}
        for prompt in PROMPTS:
            ids = tuple(self.tokenizer.encode(prompt).ids)
            texts = self.write([Job(prompt_token_ids=ids, max_tokens=max_tokens)] * SAMPLES)
            first = [text[: text.index(self.end_of_chunk)] if self.end_of_chunk in text else text for text in texts]
            result[prompt] = [self.tokenizer.decode([*ids, *text]).strip() for text in first]
        return result


def top_tokens(model: SteerlingModel, corpus: Corpus, tokenizer: Tokenizer, count: int = 10) -> dict[str, list[str]]:
    """The tokens each concept promotes most."""
    ids = torch.arange(len(corpus.concepts), device=model.transformer.token_vectors_VD.device)
    aligned_CV = model.known_head.embedding(ids).float() @ model.transformer.token_vectors_VD.float().T
    rows = aligned_CV.topk(count, dim=-1).indices.tolist()
    return {
        concept.name: [tokenizer.decode([token]) for token in row]
        for concept, row in zip(corpus.concepts, rows, strict=True)
    }


def print_dose(dose: dict[str, Any]) -> None:
    """The dose table, a line a strength."""
    for strength, row in dose.items():
        median = row["median"]
        shares = " ".join(f"{name}={values['share']:.2f}" for name, values in row["topics"].items())
        print(
            f"strength {strength:>4}: share {median['share']:.3f}  distinct-2 {median['distinct_2']:.3f}  "
            f"dictionary {median['dictionary']:.3f}  | {shares}",
            flush=True,
        )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the demo model and write its card.")
    parser.add_argument("--model", type=Path, default=DEFAULT_OUTPUT, help="checkpoint folder")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", choices=("engine", "dense"), default="engine", help="what writes the texts")
    parser.add_argument("--texts", type=int, default=16, help="texts a topic and strength")
    parser.add_argument("--seed", type=int, default=0)
    for name, value in asdict(SamplerSettings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=value)
    parser.add_argument("--strengths", type=float, nargs="+", default=list(STRENGTHS))
    parser.add_argument("--output", type=Path, help="where quality.json goes; default: the checkpoint folder")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_float32_matmul_precision("high")
    device = torch.device(args.device)
    corpus = load_corpus()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    model = load_model(args.model, device=device, dtype=torch.float32)
    settings = SamplerSettings(args.temperature, args.top_p, args.repetition_penalty)
    end_of_chunk = model.config.endofchunk_token_id
    assert end_of_chunk is not None
    if args.backend == "engine":
        write = engine_writer(args.model, settings, args.seed, args.device)
    else:
        write = dense_writer(model, settings, args.seed, device)
    bench = Bench(corpus, tokenizer, write, end_of_chunk)
    data = SequenceSampler(corpus, corpus.held_out, tokenizer, LENGTH, model.config.diff_block_size, device)
    quality: dict[str, Any] = {
        "settings": asdict(settings),
        "backend": args.backend,
        "texts": args.texts,
        "seed": args.seed,
        "max_tokens": MAX_TOKENS,
        "max_suppressed": MAX_SUPPRESSED_TOKENS,
        "training_tokens": sum(len(line) + 1 for line in encode_lines(corpus.train, tokenizer)),
        "classifier_accuracy": bench.classifier.accuracy(corpus.held_out),
        "held_out_loss": mean_masked_loss(model, data),
        "top_tokens": top_tokens(model, corpus, tokenizer),
    }
    print(f"held-out loss {quality['held_out_loss']:.4f}, classifier {quality['classifier_accuracy']:.4f}", flush=True)
    quality["samples"] = bench.samples()
    for prompt, texts in quality["samples"].items():
        print(f"[{prompt}]", *texts, sep="\n    ", flush=True)
    quality["dose"] = bench.dose(args.texts, args.strengths)
    quality["num_definitions"] = sum(count_definitions(strength, row) for strength, row in quality["dose"].items())
    quality["suppression"] = bench.suppression(args.texts)
    print("suppression:", {name: round(row["median"], 3) for name, row in quality["suppression"].items()})
    (args.output or args.model / "quality.json").write_text(json.dumps(quality, indent=1) + "\n", encoding="utf-8")
    if args.output is None:
        write_card(args.model)


def count_definitions(strength: str, row: dict[str, Any]) -> int:
    """Definitions behind a row of the dose table; the unsteered ones are common to all topics."""
    counts = [values["definitions"] for values in row["topics"].values()]
    return counts[0] if strength == "0" else sum(counts)


if __name__ == "__main__":
    main()
