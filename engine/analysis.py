"""What may be asked of a model beside generating, and what comes back.

Plain frozen data, picklable, without torch. Ids of concepts are local to their head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from .checks import is_list, is_number, is_whole, shown
from .errors import InvalidValue
from .limits import (
    MAX_CFG_SCALE,
    MAX_INSPECTED_CONCEPTS,
    MAX_INTEGRATION_STEPS,
    MAX_LOGPROBS,
    MAX_SAMPLES,
    MAX_SEED,
    MAX_TARGETS,
)
from .output import ConceptContribution
from .trace import Trace

EmbeddingKind = Literal["hidden", "composed", "known", "discovered"]
Pooling = Literal["mean", "last", "first"]


def _check_ids(owner: object, name: str, *, least: int = 0) -> None:
    value: Any = getattr(owner, name)
    if not (is_list(value) and all(map(is_whole, value)) and len(value) >= least):
        rule = f"a list or tuple of token ids, at least {least}"
        raise InvalidValue(f"{name} is {shown(value)}; it must be {rule}", param=name)
    object.__setattr__(owner, name, tuple(value))


def _check_whole(owner: object, name: str, low: int, high: int) -> None:
    value = getattr(owner, name)
    if not is_whole(value, low, high):
        raise InvalidValue(f"{name} is {shown(value)}; it must be a whole number from {low} to {high}", param=name)


def _check_choice(owner: object, name: str, allowed: tuple[str, ...]) -> None:
    value = getattr(owner, name)
    if value not in allowed:
        raise InvalidValue(f"{name} is {shown(value)}; it must be {' or '.join(map(repr, allowed))}", param=name)


def _check_trace(trace: object) -> None:
    if not isinstance(trace, Trace):
        raise InvalidValue(f"trace is {shown(trace)}; it must be a Trace", param="trace")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreTokens:
    """Asks how likely each token is, left to right.

    Position i is scored with itself and all later positions of its block masked, the block complete up to its full
    length also where the text ends earlier, so a score depends on nothing that follows.
    """

    token_ids: tuple[int, ...] | list[int]
    num_logprobs: int = 0
    """How many `top_logprobs` come for each position, at most 20."""

    def __post_init__(self) -> None:
        _check_ids(self, "token_ids")
        _check_whole(self, "num_logprobs", 0, MAX_LOGPROBS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """One entry a token; the first token, which nothing precedes, has None and no `top_logprobs`."""

    logprobs: tuple[float | None, ...]
    """Log-softmax of the raw logits at the token, vocabulary padding excluded."""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...]
    """(token id, logprob) of the likeliest tokens, best first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimateLikelihood:
    """Asks for the Monte-Carlo estimate of a continuation's log-likelihood under random masking."""

    prompt_token_ids: tuple[int, ...] | list[int]
    continuation_token_ids: tuple[int, ...] | list[int]
    num_samples: int = 128
    batch_size: int = 32
    """Samples whose mask counts are spread evenly over the continuation's length. The estimate is the mean of the
    batches' means."""
    seed: int = 0
    cfg_scale: float = 0.0

    def __post_init__(self) -> None:
        _check_ids(self, "prompt_token_ids")
        _check_ids(self, "continuation_token_ids", least=1)
        _check_whole(self, "num_samples", 1, MAX_SAMPLES)
        _check_whole(self, "batch_size", 1, MAX_SAMPLES)
        _check_whole(self, "seed", 0, MAX_SEED)
        if not is_number(self.cfg_scale, 0, MAX_CFG_SCALE):
            message = f"cfg_scale is {shown(self.cfg_scale)}; it must be a number from 0 to {MAX_CFG_SCALE:g}"
            raise InvalidValue(message, param="cfg_scale")


@dataclass(frozen=True, kw_only=True, slots=True)
class Likelihood:
    """A Monte-Carlo estimate, in nats."""

    log_likelihood: float
    standard_error: float | None
    """Of the mean over batches of samples. None for a single batch, which does not tell how far another would be."""
    num_samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbedTokens:
    """Asks for one vector for a text."""

    token_ids: tuple[int, ...] | list[int]
    kind: EmbeddingKind = "composed"
    """`hidden` state, `composed` of concepts and epsilon, or the features of one head alone."""
    pooling: Pooling = "mean"

    def __post_init__(self) -> None:
        _check_ids(self, "token_ids", least=1)
        _check_choice(self, "kind", get_args(EmbeddingKind))
        _check_choice(self, "pooling", get_args(Pooling))


@dataclass(frozen=True, kw_only=True, slots=True)
class Embedding:
    """Float32, as wide as the model."""

    vector: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectTokens:
    """Asks which concepts are active at each token of a text."""

    token_ids: tuple[int, ...] | list[int]
    top_k: int = 8
    """Concepts of each head, largest weight first, by their logits; ties go to the lowest id."""

    def __post_init__(self) -> None:
        _check_ids(self, "token_ids", least=1)
        _check_whole(self, "top_k", 0, MAX_INSPECTED_CONCEPTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenConcepts:
    """Concepts at one position; contributions are to the logit of the token that stands there."""

    known: tuple[ConceptContribution, ...]
    discovered: tuple[ConceptContribution, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """One entry a token."""

    tokens: tuple[TokenConcepts, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttributeInputs:
    """Asks which input tokens drove each generated one: integrated gradients over the replayed trace."""

    trace: Trace
    targets: tuple[int, ...] | None = None
    """Positions of the generated tokens to explain, absolute; at most MAX_TARGETS. None: all that the trace commits."""
    num_steps: int = 32
    """Points of the path from masks to the text (right Riemann sum)."""

    def __post_init__(self) -> None:
        _check_trace(self.trace)
        if self.targets is not None:
            _check_ids(self, "targets", least=1)
            committed = {commit.position for commit in self.trace.commits}
            foreign = next((position for position in self.targets if position not in committed), None)
            if foreign is not None:
                raise InvalidValue(
                    f"targets names position {foreign}, which the trace does not commit", param="targets"
                )
            object.__setattr__(self, "targets", tuple(sorted(set(self.targets))))
        num_targets = len(self.trace.commits if self.targets is None else self.targets)
        if num_targets > MAX_TARGETS:
            asked = "all that the trace commits" if self.targets is None else "that targets names"
            raise InvalidValue(
                f"{num_targets} tokens are to be explained, {asked}; at most {MAX_TARGETS} at once: "
                "name fewer targets and ask again for the others",
                param="targets",
            )
        _check_whole(self, "num_steps", 1, MAX_INTEGRATION_STEPS)


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetAttribution:
    """What drove one generated token."""

    position: int
    token_id: int
    target_logit: float
    """The logit that the replay gives the token."""
    baseline_logit: float
    """The same with every input embedding replaced by the mask's."""
    contributions: tuple[float, ...]
    """One an input position, prompt and max_tokens, in logits; 0 where the model saw a mask or did not look. They sum
    to target - baseline up to the error of the sum over steps."""

    @property
    def completeness_error(self) -> float:
        """How far the contributions are from summing to target - baseline; smaller with more steps."""
        return sum(self.contributions) - (self.target_logit - self.baseline_logit)


@dataclass(frozen=True, kw_only=True, slots=True)
class InputAttribution:
    """One entry a target, in the order of their positions."""

    targets: tuple[TargetAttribution, ...]
    num_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayTrace:
    """Asks what this model makes of a trace's commits, each in the step that made it.

    Holds a trace against another machine, another dtype or another checkpoint.
    """

    trace: Trace

    def __post_init__(self) -> None:
        _check_trace(self.trace)


@dataclass(frozen=True, slots=True)
class ReplayedCommit:
    """One commit as the replay sees it, before suppression, bias and penalties."""

    position: int
    token_id: int
    denoising_step: int
    target_logit: float
    logprob: float
    """Log-softmax of the raw logits at the token, vocabulary padding excluded."""
    rank: int
    """Tokens that could have been chosen there and have a larger logit; 0 for the likeliest."""
    recorded_logit: float | None
    """What the trace says of `target_logit`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """One entry a commit, in the trace's order."""

    commits: tuple[ReplayedCommit, ...]

    @property
    def largest_difference(self) -> float | None:
        """Between a replayed and a recorded logit; None if the trace records none."""
        pairs = [(c.target_logit, c.recorded_logit) for c in self.commits if c.recorded_logit is not None]
        return max((abs(replayed - recorded) for replayed, recorded in pairs), default=None)


Analysis = ScoreTokens | EstimateLikelihood | EmbedTokens | InspectTokens | AttributeInputs | ReplayTrace
AnalysisResult = Scores | Likelihood | Embedding | Inspection | InputAttribution | Replay
