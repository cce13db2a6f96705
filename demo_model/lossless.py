"""Measure what the policy `lossless` saves: its passes, its drafts, and that its commits are the right ones.

Knows the engine and requests; must not know where they come from or where the numbers go.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from engine import Engine, EngineConfig, GenerateRequest, Output
from engine.model.steerling import SteerlingModel
from engine.request import Policy

from .sampling import SamplerSettings

LOSSLESS_SAMPLERS: dict[str, dict[str, Any]] = {
    "of the table above": asdict(SamplerSettings()),
    "entropy-adaptive, the default": {},
    "greedy": {"temperature": 0.0},
}
"""Sampling parameters by the name that the page gives them; the first are the grid's."""


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """A recorder that keeps the counters of one engine."""

    amounts: Counter[str] = field(default_factory=Counter)

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        self.amounts[name] += int(amount)

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Ignore it."""

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Ignore it."""


def check_equal(ours: Sequence[Output], expected: Sequence[Output]) -> None:
    """Raise ValueError for the first text whose commits are not the expected positions and tokens in their order."""
    for number, outputs in enumerate(zip(ours, expected, strict=True)):
        own, other = ([(commit.position, commit.token_id) for commit in output.commits] for output in outputs)
        if own != other:
            raise ValueError(f"text {number} has the commits {own}; one at a time it has {other}")


def measure_lossless(model: SteerlingModel, requests: Sequence[GenerateRequest], sampler: str) -> dict[str, Any]:
    """Passes and drafts of the requests with `lossless` and a sampler of LOSSLESS_SAMPLERS; a row of the table.

    Prompts must be whole blocks and max_tokens one. Every text may have a draft in every pass. Raises ValueError if a
    text differs from what `confidence` writes one token at a time.
    """
    num_rows, settings, recorder = 2 * len(requests), LOSSLESS_SAMPLERS[sampler], DraftCounts()
    config = EngineConfig(
        device="cpu", dtype="float32", max_rows=num_rows, max_lanes=len(requests), draft_row_limit=num_rows
    )
    engine = Engine(model, config, recorder=recorder)

    def write(policy: Policy) -> list[Output]:
        return engine.generate(
            replace(request, sampling=replace(request.sampling, policy=policy, **settings)) for request in requests
        )

    expected = write("confidence")
    # The prompts' pages are there by now, so that every pass of a text is a denoising one.
    ours = write("lossless")
    check_equal(ours, expected)
    passes = [output.num_forward_passes for output in ours]
    counters = ("drafts", "drafts_position_right", "drafts_token_right", "drafts_committed")
    drafts, at_position, with_token, accepted = (recorder.amounts[counter] for counter in counters)
    return {
        "sampler": sampler,
        "settings": settings,
        "passes_per_block": statistics.fmean(passes),
        "tokens_per_pass": sum(len(output.commits) for output in ours) / sum(passes),
        "most_commits": 1 + (accepted > 0),
        "drafts": drafts,
        "position_share": at_position / max(drafts, 1),
        "token_share": with_token / max(at_position, 1),
        "accepted_share": accepted / max(drafts, 1),
    }


def lossless_steps(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Entry of policy_steps.json: passes and commits under the grid's sampler, and how often drafts are right.

    `lossless` has no parameter, so its value is None.
    """
    names = ("passes_per_block", "tokens_per_pass", "most_commits", "position_share", "token_share")
    return {"lossless": {"value": None, **{name: rows[0][name] for name in names}}}
