"""What leaves the engine: commits with their concepts, events while a request runs, and its output.

Plain frozen data, picklable, without torch.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

Schedule = Literal["fixed", "hard_cutoff"]
"""Whether an intervention acts throughout, or until `cutoff_tokens` tokens are committed."""


@dataclass(frozen=True, slots=True)
class ConceptContribution:
    """One active concept's part in one token's logit."""

    concept_id: int
    """Id local to its head."""
    weight: float
    """Sigmoid of the concept's logit, in [0, 1], or what the request's override sets it to."""
    contribution: float
    """weight * (embedding . W[token]), in logits."""


@dataclass(frozen=True, slots=True)
class TokenAttribution:
    """Which concepts drove one token; totals + epsilon = target logit.

    Totals cover all reported concepts, also those that `top_k` left out. Concepts whose weight the request sets are
    reported beside the head's own.
    """

    known: tuple[ConceptContribution, ...]
    """Largest absolute contribution first."""
    discovered: tuple[ConceptContribution, ...]
    """Largest absolute contribution first."""
    known_total: float
    discovered_total: float
    epsilon: float
    """Target logit minus both totals."""


@dataclass(frozen=True, slots=True)
class Commit:
    """The choice, for good, of one position's token."""

    position: int
    """Absolute in the sequence, prompt included."""
    token_id: int
    denoising_step: int
    """Which of the request's denoising steps committed it, from 0."""
    confidence: float
    """Probability of the likeliest token there, after penalties and bans."""
    target_logit: float
    """The token's logit before suppression, bias, penalties and bans."""
    logprob: float
    """Log-softmax of the raw logits at the token."""
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of the likeliest tokens by raw logits, best first."""
    attribution: TokenAttribution | None = None


@dataclass(frozen=True, slots=True)
class ResolvedIntervention:
    """What an intervention became on this checkpoint."""

    concept_ids: tuple[int, ...]
    weights: tuple[float, ...]
    alpha: float
    peak: float
    """Largest alignment of the unit direction with a row of lm_head."""
    layer: int
    schedule: Schedule
    cutoff_tokens: int


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    LENGTH = "length"
    STOP = "stop"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Output:
    """One finished generation."""

    request_id: str
    token_ids: tuple[int, ...]
    """Generated tokens up to, and without, the end token."""
    finish_reason: FinishReason
    commits: tuple[Commit, ...]
    """In commit order; those right of the final end are kept here and nowhere else."""
    num_forward_passes: int
    """Passes in which the request had a row: a cost, not a result."""
    num_denoising_steps: int
    num_blocks: int
    """Canvases that were begun."""
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens whose pages came from the prefix index at first admission."""
    num_preemptions: int
    seed: int
    """The seed that was used."""
    steering: tuple[ResolvedIntervention, ...] = ()
    error: str | None = None
    """What went wrong, for finish_reason `error`."""


@dataclass(frozen=True, slots=True)
class Started:
    """The request has a lane; its first pass is next. Sent once, also across preemptions."""

    request_id: str
    seed: int
    block_size: int
    num_prompt_tokens: int
    prompt_tail: int
    """Prompt tokens that share the first canvas."""
    num_cached_tokens: int
    steering: tuple[ResolvedIntervention, ...]


@dataclass(frozen=True, slots=True)
class BlockStarted:
    """A new canvas: absolute positions [start, end) are to be filled."""

    request_id: str
    block: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Committed:
    """Commits of one or more denoising steps, in commit order."""

    request_id: str
    block: int
    commits: tuple[Commit, ...]


@dataclass(frozen=True, slots=True)
class BlockFinished:
    """Every position of [start, end) that belongs to the text is committed."""

    request_id: str
    block: int
    start: int
    end: int
    """Where the text ends within the block: the end token's position if there is one."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of every request that ended, whatever the reason."""

    request_id: str
    output: Output


Event = Started | BlockStarted | Committed | BlockFinished | Finished
