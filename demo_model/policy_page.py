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
"""What a policy's value on the grid is called in a request."""

PAGE = """\
# Decoding policies: quality against passes

A denoising step ranks the masked positions by confidence, the probability of the likeliest token at temperature 1
after penalties and bans, and commits the first few. How many is the request's policy:

| `diffusion.policy` | commits, most confident first, at least one | parameter (default) | source |
| --- | --- | --- | --- |
| `confidence` | `tokens_per_step` | `tokens_per_step` (1) | the reference |
| `threshold` | all with confidence > threshold | `threshold` (0.9) | Fast-dLLM; SGLang |
| `factor` | the largest n with (n + 1)(1 - c) < factor, c the n-th confidence | `factor` (1.0) | Fast-dLLM |
| `entropy_bound` | the largest n whose entropies less the largest sum to at most the bound | `entropy_bound` (0.1) | \
EB-Sampler |

For the last three `tokens_per_step` is a cap; without it there is none. Each request has its own policy; they mix in
one batch and do not change each other's text. The commits of one step do not see each other: that is what is paid.

```sh
curl -s --json '{"prompt": "an animal that", "max_tokens": 48, "seed": 1,
  "diffusion": {"policy": "threshold", "threshold": 0.8}}' http://127.0.0.1:8000/v1/completions
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


def write_page(result: dict[str, Any], path: Path) -> None:
    """Write the page."""
    sampler = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in result["sampler"].items())
    method = METHOD.format(**{**result, "sampler": sampler})
    path.write_text(PAGE + table(result["rows"]) + method, encoding="utf-8")
