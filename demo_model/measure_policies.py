"""Measure quality against passes: what each decoding policy saves on the demo model, and what that costs.

    python -m demo_model.measure_policies      writes policy_quality.json, policy_steps.json and docs/policies.md
    python -m demo_model.plot_policies         draws docs/policies.png from policy_quality.json (needs matplotlib)

Every setting continues the same prompts, each one block of held-out definitions of one topic, by one block, with the
same seeds and the same sampler. The measures are

- passes and tokens: denoising steps of a block, and commits of a step;
- loss: mean over all generated tokens of -log p(token) in nats, where p is the raw distribution of the model that
  unmasks one token at a time from the left: it sees the prompt and the generated tokens left of the position, and
  masks at the position and right of it to the block's end. So it asks how well a text fits together as judged by
  the same model, in an order that no policy used;
- on topic: share of the complete definitions that a classifier, trained on real ones, gives to the prompt's topic;
- distinct-2: different pairs of neighbouring words over all; a text that repeats itself has a low loss too.

Shapes: V variants of a block, C positions of a block, S positions before it, G KV heads, E head width, D width.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from engine import Engine, EngineConfig, GenerateRequest, Output, SamplingParams
from engine.model.attention import dense_block_causal_attention
from engine.model.steerling import SteerlingModel
from engine.request import DEFAULT_PARAMETERS, Policy

from .corpus import load_corpus
from .measure_quality import Bench, distinct_2
from .policy_page import write_page
from .sampling import SamplerSettings
from .train import DEFAULT_OUTPUT

GRID: dict[Policy, tuple[float, ...]] = {
    "confidence": (1, 2, 4, 8),
    "threshold": (0.9, 0.7, 0.5, 0.3, 0.2),
    "factor": (1.0, 2.0, 3.0, 4.0),
    "entropy_bound": (0.1, 1.0, 4.0, 8.0),
}
MOST_COMMITS = 16
"""Cap of the adaptive policies, which keeps a pass on a CPU short; the result says how many commits a step had."""
HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "policies.md"


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt of whole blocks, the topic of its definitions, and the seed of what follows."""

    prompt_token_ids: tuple[int, ...]
    topic: int
    seed: int


def sampling_params(policy: Policy, value: float, settings: SamplerSettings, seed: int) -> SamplingParams:
    """A point of the grid as the engine takes it."""
    chosen: dict[str, Any] = {"tokens_per_step": int(value)}
    if policy != "confidence":
        chosen = {"tokens_per_step": MOST_COMMITS, policy: value}
    return SamplingParams(policy=policy, **chosen, **asdict(settings), seed=seed)


def prefix_keys(model: SteerlingModel, token_ids: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Keys and values (1, S, G, E) of each layer for complete blocks of tokens."""
    kept: list[tuple[Tensor, Tensor]] = []
    block_size = model.config.diff_block_size

    def attend(layer: int, q_RSHE: Tensor, k_RSGE: Tensor, v_RSGE: Tensor) -> Tensor:
        kept.append((k_RSGE, v_RSGE))
        return dense_block_causal_attention(q_RSHE, k_RSGE, v_RSGE, block_size)

    if token_ids:
        ids_1S = torch.tensor([list(token_ids)])
        model.transformer(ids_1S, torch.arange(len(token_ids))[None], attend, lambda layer, x: x)
    return kept


@torch.no_grad()
def left_to_right_losses(model: SteerlingModel, prefix: Sequence[int], block: Sequence[int]) -> list[float]:
    """-log p of each token of a block: tokens left of it are seen, it and those right of it are masked.

    `prefix` holds complete blocks. One forward pass over as many variants of the block as it has tokens.
    """
    size = len(block)
    assert len(prefix) % model.config.diff_block_size == 0 and size <= model.config.diff_block_size
    keys = prefix_keys(model, prefix)
    ids_C = torch.tensor(list(block))
    is_seen_VC = torch.ones(size, size, dtype=torch.bool).tril(-1)
    ids_VC = torch.where(is_seen_VC, ids_C, model.config.mask_token_id)
    positions_VC = torch.arange(len(prefix), len(prefix) + size).expand(size, -1)

    def attend(layer: int, q_VCHE: Tensor, k_VCGE: Tensor, v_VCGE: Tensor) -> Tensor:
        if keys:
            before_k, before_v = (part.expand(size, -1, -1, -1) for part in keys[layer])
            k_VCGE, v_VCGE = torch.cat((before_k, k_VCGE), dim=1), torch.cat((before_v, v_VCGE), dim=1)
        y_VHCE = torch.nn.functional.scaled_dot_product_attention(
            q_VCHE.transpose(1, 2), k_VCGE.transpose(1, 2), v_VCGE.transpose(1, 2), enable_gqa=True
        )
        return y_VHCE.transpose(1, 2)

    hidden_VCD = model.transformer(ids_VC, positions_VC, attend, lambda layer, x: x)
    own = torch.arange(size)
    logits = model.transformer.logits(model.compose(hidden_VCD[own, own])).float()
    loss: list[float] = (-logits.log_softmax(dim=-1)[own, ids_C]).tolist()
    return loss


def commits_per_step(output: Output) -> list[int]:
    """Commits of each denoising step, in order."""
    counts = [0] * output.num_denoising_steps
    for commit in output.commits:
        counts[commit.denoising_step] += 1
    return counts


class PolicyBench:
    """One engine and the texts that every setting writes."""

    def __init__(self, folder: Path, num_texts: int, seed: int) -> None:
        self.engine = Engine.from_checkpoint(
            folder, EngineConfig(device="cpu", dtype="float32", max_rows=32, max_lanes=32)
        )
        self.model = self.engine.runner.model
        self.block_size = self.model.config.diff_block_size
        end_of_chunk = self.model.config.endofchunk_token_id
        assert end_of_chunk is not None
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.bench = Bench(load_corpus(), tokenizer, lambda jobs: [], end_of_chunk)
        prompts = [(topic, p) for topic in self.bench.topics for p in self.bench.primed_prompts(topic, num_texts)]
        self.texts = [Text(prompt, topic, seed + i) for i, (topic, prompt) in enumerate(prompts)]

    def measure(self, policy: Policy, value: float, settings: SamplerSettings) -> dict[str, Any]:
        """One row of the table."""
        requests = [
            GenerateRequest(
                prompt_token_ids=text.prompt_token_ids,
                max_tokens=self.block_size,
                sampling=sampling_params(policy, value, settings, text.seed),
            )
            for text in self.texts
        ]
        outputs = self.engine.generate(requests)
        steps = [count for output in outputs for count in commits_per_step(output)]
        return {
            "policy": policy,
            "value": value,
            "passes_per_block": statistics.fmean(output.num_denoising_steps for output in outputs),
            "tokens_per_pass": statistics.fmean(steps),
            "most_commits": max(steps),
            **self.quality([output.token_ids for output in outputs]),
        }

    def quality(self, token_ids: Sequence[Sequence[int]]) -> dict[str, float]:
        """Loss, with its standard error over texts, and what the classifier and the words say."""
        losses = [
            statistics.fmean(left_to_right_losses(self.model, text.prompt_token_ids, ids))
            for text, ids in zip(self.texts, token_ids, strict=True)
        ]
        lists = [self.bench.definitions(ids) for ids in token_ids]
        hits = [
            self.bench.classifier.topic(definition) == text.topic
            for text, definitions in zip(self.texts, lists, strict=True)
            for definition in definitions
        ]
        return {
            "loss": statistics.fmean(losses),
            "loss_error": statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else 0.0,
            "on_topic": statistics.fmean(hits) if hits else 0.0,
            "definitions": len(hits),
            "distinct_2": statistics.fmean(distinct_2(" ".join(definitions)) for definitions in lists),
        }


def steps_at_defaults(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Passes of a block and commits of a pass for each policy as it runs when only its name is given."""
    defaults = {"confidence": 1.0, **DEFAULT_PARAMETERS}
    return {
        row["policy"]: {name: row[name] for name in ("value", "passes_per_block", "tokens_per_pass", "most_commits")}
        for row in rows
        if row["value"] == defaults[row["policy"]]
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure quality against passes for each decoding policy.")
    parser.add_argument("--model", type=Path, default=DEFAULT_OUTPUT, help="checkpoint folder")
    parser.add_argument("--texts", type=int, default=2, help="texts a topic")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, help="folder for all three files; default: their places in the tree")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    started, settings = time.monotonic(), SamplerSettings()
    bench = PolicyBench(args.model, args.texts, args.seed)
    rows = []
    for policy, values in GRID.items():
        for value in values:
            rows.append(bench.measure(policy, value, settings))
            shown = {name: round(item, 3) for name, item in rows[-1].items() if not isinstance(item, str)}
            print(f"{time.monotonic() - started:5.0f} s  {policy} {shown}", flush=True)
    result = {
        "date": date.today().isoformat(),
        "command": "python -m demo_model.measure_policies",
        "texts": len(bench.texts),
        "tokens": len(bench.texts) * bench.block_size,
        "cap": MOST_COMMITS,
        "sampler": asdict(settings),
        "rows": rows,
    }
    folder = args.output or HERE
    for name, content in (("policy_quality.json", result), ("policy_steps.json", steps_at_defaults(rows))):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    write_page(result, args.output / PAGE.name if args.output else PAGE)


if __name__ == "__main__":
    main()
