"""Writes docs/policies.md from the numbers of `measure_policies`. Needs neither torch nor the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

NAMES = {
    "confidence": "tokens_per_step",
    "threshold": "threshold",
    "factor": "factor",
    "entropy_bound": "entropy_bound",
}
"""What a policy's value on the grid is called in a request. `lossless` has none and is not on the grid."""

PAGE = """\
# Decoding policies: quality against passes

A denoising step ranks the masked positions by confidence, the probability of the likeliest token at temperature 1
after penalties and bans, and commits the first few. How many is the request's policy:

| `diffusion.policy` | commits, most confident first, at least one | parameter (default) | source |
| --- | --- | --- | --- |
| `confidence` | `tokens_per_step` | `tokens_per_step` (1) | the reference |
| `lossless` | one, and the next one too where it was guessed | none | [below](#lossless) |
| `threshold` | all with confidence > threshold | `threshold` (0.9) | Fast-dLLM; SGLang |
| `factor` | the largest n with (n + 1)(1 - c) < factor, c the n-th confidence | `factor` (1.0) | Fast-dLLM |
| `entropy_bound` | the largest n whose entropies less the largest sum to at most the bound | `entropy_bound` (0.1) | \
EB-Sampler |

For the last three `tokens_per_step` is a cap; without it there is none. `lossless` takes no `tokens_per_step` but 1.
Each request has its own policy; they mix in one batch and do not change each other's text. The commits of one step do
not see each other: that is what is paid, by all but `lossless`.

```sh
curl -s --json '{"prompt": "an animal that", "max_tokens": 48, "seed": 1,
  "diffusion": {"policy": "threshold", "threshold": 0.8}}' http://127.0.0.1:8000/v1/completions
```

```
{...,"diffusion":{"blocks":1,"denoising_steps":47,"forward_passes":47,"policy":"threshold","threshold":0.8,...}}
```

## Measured on the demo model

"""

METHOD = """
`{command}` on {date}, CPU, float32, one core. {texts} texts of one 64-token block ({tokens} tokens a row)
after one block of held-out definitions of one topic; the same prompts, seeds and sampler in each row
({sampler}).
Adaptive policies were capped at {cap} commits a step; *most* is what a step had at most.

- **loss**: mean of -log p of the generated tokens, in nats, with its standard error over texts; p is the raw
  distribution of the same model unmasking one token at a time from the left, which sees the prompt and the
  generated tokens left of the position and masks from there to the block's end. No policy fills blocks in that
  order. Lower is better only as long as distinct-2 holds: a text that repeats itself is easy.
- **on topic**: share of the complete definitions that the naive Bayes classifier of the model card gives to the
  prompt's topic; with about 110 definitions a row its standard error is 0.04.

![loss against passes per block](policies.png)

How to read it: two tokens committed together do not know of each other, so the loss rises as passes fall; the
question is who pays least for a pass saved. A model this small is seldom sure of a token, so careful parameters
change little. A factor f always commits the first n with n + 1 <= f, however unsure they are, as long as no
confidence is zero: from 3 on it is a count with a bonus. Parameters of a large model have to be found on that model.

The picture is drawn by `python -m demo_model.plot_policies`. The passes at the defaults are in
[`policy_steps.json`](../demo_model/policy_steps.json), which benchmarks may read.

## Lossless

`lossless` writes what `confidence` writes one token at a time: the same commits in the same order. Only the passes are
fewer. Beside its commit, a step notes the second most confident position, and the token that would be drawn there, as
a guess for the next one. The next pass then has two rows for the request: the ordinary one, and a *draft*, a copy of
the canvas with the guess already in it. If the ordinary row commits exactly the guess, the draft is the pass that would
have come next, and its commit counts as well; if not, the draft is forgotten. So a wrong guess costs a row and never
changes the text, and a pass has two commits at most.

| sampler | passes a block | tokens a pass | right position | and token | draft's commit counts |
| --- | --- | --- | --- | --- | --- |
"""

LOSSLESS_METHOD = """
`{command}` on {date}, CPU, float32; the same {texts}
prompts and seeds, each text with a draft in every pass but a block's first and one that has a single mask left. The run
stops if one commit differs from `confidence`'s. *Right position* and *draft's commit counts* are shares of all drafts,
*and token* is the share of those at the right position.

A row more is nearly free only while a pass is bound by reading the weights, so drafts ride only in passes that have no
more than `engine.draft_row_limit` rows (4) with them. In fuller ones `lossless` is `confidence`. The engine counts
`drafts`, `drafts_position_right`, `drafts_token_right` and `drafts_committed`, so their worth on another model can be
read from its metrics.

Equal means equal up to rounding: on a GPU one row more can change the last bits of a sum, as all company in a batch
can, and tip a choice between two that are almost level. `engine.deterministic` rules that out.
"""


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as markdown."""
    lines = [
        "| policy | parameter | passes a block | tokens a pass | most | loss | on topic | distinct-2 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| `{row['policy']}` | `{NAMES[row['policy']]}` {row['value']:g} | {row['passes_per_block']:.1f} "
        f"| {row['tokens_per_pass']:.2f} | {row['most_commits']} | {row['loss']:.2f} +- {row['loss_error']:.2f} "
        f"| {row['on_topic']:.2f} | {row['distinct_2']:.2f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def lossless_table(rows: list[dict[str, Any]]) -> str:
    """The rows of `lossless` as markdown, without their heading."""
    return "".join(
        f"| {row['sampler']} | {row['passes_per_block']:.1f} | {row['tokens_per_pass']:.2f} "
        f"| {row['position_share']:.2f} | {row['token_share']:.2f} | {row['accepted_share']:.2f} |\n"
        for row in rows
    )


def write_page(result: dict[str, Any], path: Path) -> None:
    """Write the page."""
    sampler = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in result["sampler"].items())
    method = METHOD.format(**{**result, "sampler": sampler})
    lossless = result["lossless"]
    parts = (table(result["rows"]), method, lossless_table(lossless["rows"]), LOSSLESS_METHOD.format(**lossless))
    path.write_text(PAGE + "".join(parts), encoding="utf-8")
