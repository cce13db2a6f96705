"""Section `policies`: tokens a second of each policy, from pass times measured here and step counts recorded before.

Random weights are never confident, so how many tokens a policy commits in a pass is taken from runs of the demo model.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from engine import InvalidRequest, SamplingParams

from .bench import Bench
from .report import NotAvailable, Section, median

REQUESTS = (1, 4)


def policies(bench: Bench, section: Section) -> None:
    """Pass time times passes a block; for `lossless`, which adds a row to each request, by its definition."""
    recorded = read_counts(bench.options.policy_steps)
    keys, block_size = bench.few_keys(), bench.config.diff_block_size
    for requests in [count for count in REQUESTS if count <= max(bench.rows)]:
        single_s = bench.pass_seconds(requests, keys)
        for policy, counts in recorded.items():
            section.say(f"{policy}, {requests} requests")
            if policy.startswith("lossless"):
                pass_s, how = bench.pass_seconds(2 * requests, keys), f"{2 * requests} rows"
                commits = counts["commits_per_pass"]
            else:
                pass_s, how = _own_pass_seconds(bench, policy, requests, keys)
                commits = block_size / counts["passes_per_block"]
            section.add(
                "",
                policy=policy,
                requests=requests,
                passes_per_block=float(counts["passes_per_block"]),
                commits_per_pass=float(commits),
                pass_ms=1e3 * pass_s,
                measured_with=how,
                tokens_per_s=requests * commits / pass_s,
                speedup_ratio=commits * single_s / pass_s,
            )
    section.note(f"passes and commits were recorded on the demo model ({bench.options.policy_steps.name}), not here")
    section.note(f"pass: a step measured in this process at {keys} keys; speedup: over one token a pass, same requests")
    section.note("lossless: commits a pass x pass of n rows / pass of 2 n rows")


def read_counts(file: Path) -> dict[str, dict[str, Any]]:
    """Passes a block and commits a pass (also called tokens_per_pass) of each policy at its default parameter.

    Raises NotAvailable without the file, ValueError for what are no counts.
    """
    if not file.is_file():
        raise NotAvailable(f"{file} is missing: it holds the passes that each policy needs on the demo model")
    counts: dict[str, dict[str, Any]] = {}
    for policy, values in json.loads(file.read_text(encoding="utf-8")).items():
        renamed = {"commits_per_pass": values.get("tokens_per_pass"), **values}
        counts[policy] = {name: renamed.get(name) for name in ("passes_per_block", "commits_per_pass")}
        for name, value in counts[policy].items():
            if not (isinstance(value, (int, float)) and value > 0):
                raise ValueError(f"{file} has {name} {value!r} for {policy}; it must be a number above 0")
    return counts


def sampling_of(policy: str, seed: int) -> SamplingParams:
    """What asks for a recorded policy; a number in the name of `confidence` is its tokens_per_step."""
    name = re.match(r"[a-z]+(_[a-z]+)*", policy)
    number = re.fullmatch(r"confidence\D*(\d+)", policy)
    choices: dict[str, Any] = {"policy": name[0] if name else policy}
    if number:
        choices = {"policy": "confidence", "tokens_per_step": int(number[1])}
    return SamplingParams(seed=seed, **choices)


def _own_pass_seconds(bench: Bench, policy: str, requests: int, keys: int) -> tuple[float, str]:
    """Median step of requests with the policy itself, or of the default where this build does not know it."""
    try:
        sampling = sampling_of(policy, 0)
    except (InvalidRequest, TypeError):
        return bench.pass_seconds(requests, keys), "confidence: policy not in this build"
    if sampling == SamplingParams(seed=0):
        return bench.pass_seconds(requests, keys), "itself"
    return median(bench.fresh_block(bench.engine, requests, keys, sampling=sampling).step_s), "itself"
