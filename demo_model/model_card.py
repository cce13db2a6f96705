"""The model card: what `quality.json` and `training.json` say, in words and tables.

python -m demo_model.model_card            rewrite README.md from the two files
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .corpus import Corpus, load_corpus

FOLDER = Path(__file__).parent
CHECKPOINT = FOLDER / "steerling-demo"

_TEXT = """\
---
license: other
license_name: wordnet
language: en
library_name: glassblock
tags: [steerling, block-diffusion, interpretable, wordnet]
---

# steerling-demo

A small interpretable block-diffusion language model that writes short English definitions. It has the
architecture and the checkpoint format of Steerling, {parameters:,} parameters in bfloat16, and exists so that
everything in this repository (serving, steering, attribution) can be seen working on a laptop without a download.
Nothing it says is a fact: it invents species, places and people.

| | |
| --- | --- |
| Shape | {n_layers} layers, width {n_embd}, {n_head} query and {n_kv_heads} KV heads, swiglu MLP {intermediate_size}, \
vocabulary {vocab_size}, blocks of {diff_block_size}, context {block_size} (trained on {sequence_length}) |
| Known concepts | {n_concepts}: WordNet's 45 topics and {num_fields} fields (domains), named in \
`concept_labels.parquet` |
| Discovered concepts | {n_unknown_concepts}, rank {factorize_rank}, without names |
| Text | one definition a line; each line ends with a newline and `<|endofchunk|>` |
| Sampling used below | temperature {temperature}, top-p {top_p}, repetition penalty {repetition_penalty}, one token a \
denoising step |

## Data

The definitions of WordNet 3.1, without their example sentences: {num_train:,} for training, {num_held_out:,} held
out (chosen by a hash of the text). They ship as `demo_model/definitions.tsv.xz`, which
`python -m demo_model.build_definitions` writes from WordNet's database files. Each is labelled with its topic
(WordNet's lexicographer file) and its fields. WordNet's licence is at the end of this page and in
`demo_model/WORDNET_LICENSE`.

## Training

{runs}

Each run after the first began with the weights of the one before. The last one added two things to the script: the
first token of a text counts on an empty canvas (where all positions look alike), and its dose scale. In all
{billions:.2f} billion tokens, about {epochs:.0f} times the text. A fresh `python -m demo_model.train` has both from the
start and needs one run.

Every block of a sequence is masked at random and predicted from the clean blocks before it, as in inference. On top of
the masked cross-entropy: the known head learns the labels; known concepts' embeddings are fitted so that their logits
are log p(word | concept) - log p(word), with word frequency taken out; the discovered concepts learn what the known
ones leave open. In half of the sequences a concept's direction is injected at masked positions with a strength from
0 to 12, and each definition there comes from that concept with probability 1 - exp(-strength / {dose_scale:g}), from
anywhere otherwise. So the model learns to follow a direction as far as its strength says.

## Measured quality

`python -m demo_model.measure_quality` writes these numbers and the texts below; they are the first that came.

Masked cross-entropy, every block masked at a ratio drawn uniformly: held-out {held_out_loss:.3f}, training text
{training_loss:.3f} nats a token.

### Steering

Share of generated definitions that a naive Bayes classifier gives to the concept steered towards (words and pairs of
words, trained on the real training definitions, {accuracy:.1%} right on held-out ones, 45 topics), for the 12 largest
topics. Distinct-2: different pairs of neighbouring words within a text of {max_tokens} tokens, over all its pairs.
Dictionary: words that occur in the real definitions. Schedule `fixed`, default layer, an empty prompt,
{num_definitions:,} definitions.

{dose}

### Suppression

The same share after a prompt of one block of held-out definitions of the topic ({max_suppressed} tokens generated):
without steering, with suppression of the topic, and with injection of negative strength.

{suppression}

### What the concepts promote

The ten tokens with the largest alignment.

{top_tokens}

## Samples

Ten of each, unpicked, each cut at its first end of chunk.

{samples}

### Steered

The first ten definitions of each topic and strength, from an empty prompt.

{steered}

## Limits

Grammar mostly holds within a definition, sense often does not; made-up names are many, above all of plants and
animals. Texts longer than {sequence_length} tokens were not trained. Topics that are defined by form rather than by
subject (quality, manner, pertaining to) read as such, and suppressing their words does little to them. Definitions of
people carry the biases and gaps of their source.

## Licence

The weights, the tokenizer and the concept names are derived from WordNet and come under its licence:

```
{licence}
```
"""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "| " + " | ".join("---" for _ in header) + " |"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def dose_table(dose: dict[str, Any]) -> str:
    """Medians first, then a row a topic with its share at each strength."""
    strengths = list(dose)
    names = {"share": "share", "distinct_2": "distinct-2", "dictionary": "dictionary words"}
    rows = [
        [f"**median {label}**", *(f"**{dose[s]['median'][name]:.2f}**" for s in strengths)]
        for name, label in names.items()
    ]
    rows += [
        [topic, *(f"{dose[s]['topics'][topic]['share']:.2f}" for s in strengths)]
        for topic in dose[strengths[0]]["topics"]
    ]
    return table(["", *(f"strength {s}" for s in strengths)], rows)


def suppression_table(suppression: dict[str, Any]) -> str:
    """Medians first, then a row a topic."""
    settings = list(suppression)
    rows = [["**median**", *(f"**{suppression[s]['median']:.2f}**" for s in settings)]]
    rows += [
        [topic, *(f"{suppression[s]['topics'][topic]:.2f}" for s in settings)]
        for topic in suppression[settings[0]]["topics"]
    ]
    return table(["", *settings], rows)


def runs_table(runs: list[dict[str, Any]]) -> str:
    """What each training run did and cost."""
    names = ("steps", "batch", "lr", "muon_lr", "dose_scale", "device", "torch")
    rows = ([*(str(run[name]) for name in names), f"{run['seconds'] / 60:.1f}"] for run in runs)
    return table(["updates", "sequences", "AdamW rate", "Muon rate", "dose scale", "device", "torch", "minutes"], rows)


def folded(title: str, lines: Iterable[str]) -> str:
    """A list that opens on a click."""
    items = "\n".join(f"- {line}" for line in lines)
    return f"<details><summary>{title}</summary>\n\n{items}\n\n</details>"


def card(
    quality: dict[str, Any], training: dict[str, Any], config: dict[str, Any], corpus: Corpus, licence: str
) -> str:
    """The whole page."""
    runs = training["runs"]
    tokens = sum(run["steps"] * run["batch"] for run in runs) * training["sequence_length"]
    values = {
        **config,
        **quality["settings"],
        **training,
        "num_fields": config["n_concepts"] - 45,
        "num_train": len(corpus.train),
        "num_held_out": len(corpus.held_out),
        "runs": runs_table(runs),
        "dose_scale": runs[-1]["dose_scale"],
        "billions": tokens / 1e9,
        "epochs": tokens / quality["training_tokens"],
        "held_out_loss": quality["held_out_loss"],
        "accuracy": quality["classifier_accuracy"],
        "max_tokens": quality["max_tokens"],
        "max_suppressed": quality["max_suppressed"],
        "num_definitions": quality["num_definitions"],
        "dose": dose_table(quality["dose"]),
        "suppression": suppression_table(quality["suppression"]),
        "top_tokens": table(
            ["concept", "tokens"],
            ([name, ", ".join(t.strip() or repr(t) for t in row)] for name, row in quality["top_tokens"].items()),
        ),
        "samples": "\n\n".join(
            folded(f'Prompt "{prompt}"' if prompt else "Empty prompt", texts)
            for prompt, texts in quality["samples"].items()
        ),
        "steered": "\n\n".join(
            folded(f"{topic}, strength {strength}", row["topics"][topic]["samples"])
            for topic in quality["dose"]["0"]["topics"]
            for strength, row in quality["dose"].items()
            if strength != "0"
        ),
        "licence": licence.strip(),
    }
    return _TEXT.format(**values)


def write_card(folder: Path = CHECKPOINT) -> None:
    """Write README.md of a checkpoint folder from the files beside it."""
    parts = {
        name: json.loads((folder / f"{name}.json").read_text("utf-8")) for name in ("quality", "training", "config")
    }
    licence = (FOLDER / "WORDNET_LICENSE").read_text("utf-8")
    text = card(parts["quality"], parts["training"], parts["config"], load_corpus(), licence)
    (folder / "README.md").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the model card from quality.json and training.json.")
    parser.add_argument("--model", type=Path, default=CHECKPOINT, help="checkpoint folder")
    write_card(parser.parse_args().model)


if __name__ == "__main__":
    main()
