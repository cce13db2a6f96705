"""What crosses the engine's door: requests in, events and outputs out.

Plain frozen data, picklable, without torch. Values are checked here as far as they can be
without knowing the checkpoint; `engine.admission` checks the rest.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from .errors import InvalidValue

MAX_LOGPROBS = 20
MAX_STEERING_GROUPS = 8
MAX_SEED = 2**63 - 1

Policy = Literal["confidence"]
Unit = Literal["logits", "raw"]
Schedule = Literal["fixed", "hard_cutoff"]


def _require(condition: bool, message: str, param: str) -> None:
    if not condition:
        raise InvalidValue(message, param=param)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_bias(value: object) -> bool:
    return _is_finite(value) or value == -math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How positions and tokens are chosen. The defaults equal steerling's `GenerationConfig()`."""

    policy: Policy = "confidence"
    """Which positions a denoising step commits: the `tokens_per_step` most confident."""
    tokens_per_step: int = 1
    """Commits per denoising step; 1 is the highest quality."""
    temperature: float | None = None
    """0 is greedy. None with top_p None selects entropy-adaptive sampling; otherwise 1.0."""
    top_p: float | None = None
    """Nucleus mass. None: 0.8 for entropy-adaptive sampling, otherwise 1.0 (off)."""
    top_k: int | None = None
    """Keep the k likeliest tokens. None or 0: off."""
    min_p: float | None = None
    """Keep tokens at least this fraction as likely as the likeliest. None or 0: off."""
    entropy_sampling: bool | None = None
    """The reference's entropy-adaptive temperature. None: on if neither temperature nor top_p is given."""
    repetition_penalty: float = 1.1
    """Divides positive and multiplies negative logits of tokens already in prompt or text. 1.0: off."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids before the repetition penalty; -inf bans."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the text where they stand, beside the checkpoint's end-of-turn token."""
    ignore_eos: bool = False
    """Treat the checkpoint's end-of-turn token as an ordinary token."""
    min_tokens: int = 0
    """No end token is chosen at the first `min_tokens` generated positions."""
    seed: int | None = None
    """Key of the request's random numbers. None: one is drawn and returned in the output."""
    choice_index: int = 0
    """Which of several choices with one seed this is."""
    num_logprobs: int = 0
    """How many `top_logprobs` each commit carries, at most 20."""

    def __post_init__(self) -> None:
        _require(
            self.policy == "confidence",
            f"policy is {self.policy!r}; this engine knows 'confidence'",
            "sampling.policy",
        )
        for name, low, high in (
            ("tokens_per_step", 1, None),
            ("min_tokens", 0, None),
            ("choice_index", 0, None),
            ("num_logprobs", 0, MAX_LOGPROBS),
        ):
            value = getattr(self, name)
            limit = f"at least {low}" if high is None else f"from {low} to {high}"
            _require(
                _is_int(value) and value >= low and (high is None or value <= high),
                f"{name} is {value!r}; it must be a whole number {limit}",
                f"sampling.{name}",
            )
        _require(
            self.temperature is None or (_is_finite(self.temperature) and self.temperature >= 0),
            f"temperature is {self.temperature!r}; it must be finite and at least 0 (0 is greedy)",
            "sampling.temperature",
        )
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            _require(
                value is None or (_is_finite(value) and 0 <= value <= 1),
                f"{name} is {value!r}; it must lie in [0, 1]",
                f"sampling.{name}",
            )
        _require(
            self.top_k is None or (_is_int(self.top_k) and self.top_k >= 0),
            f"top_k is {self.top_k!r}; it must be a whole number at least 0 (0 is off)",
            "sampling.top_k",
        )
        _require(
            _is_finite(self.repetition_penalty) and self.repetition_penalty > 0,
            f"repetition_penalty is {self.repetition_penalty!r}; it must be finite and above 0 (1.0 is off)",
            "sampling.repetition_penalty",
        )
        _require(
            self.seed is None or (_is_int(self.seed) and 0 <= self.seed <= MAX_SEED),
            f"seed is {self.seed!r}; it must be a whole number from 0 to {MAX_SEED}",
            "sampling.seed",
        )
        for token_id, bias in self.logit_bias.items():
            _require(
                _is_int(token_id) and _is_bias(bias),
                f"logit_bias maps {token_id!r} to {bias!r}; it must map token ids to numbers below +inf",
                "sampling.logit_bias",
            )
        _require(
            all(_is_int(token_id) for token_id in self.stop_token_ids),
            f"stop_token_ids is {self.stop_token_ids!r}; it must hold token ids",
            "sampling.stop_token_ids",
        )

    @property
    def is_greedy(self) -> bool:
        """True when the likeliest token is always taken."""
        return not self.uses_entropy and (self.temperature == 0 or self.top_p == 0)

    @property
    def uses_entropy(self) -> bool:
        """True when the reference's entropy-adaptive temperature applies."""
        if self.entropy_sampling is not None:
            return self.entropy_sampling
        return self.temperature is None and self.top_p is None

    @property
    def effective_temperature(self) -> float:
        """Temperature of plain sampling: 1.0 where none was given."""
        return 1.0 if self.temperature is None else self.temperature

    @property
    def effective_top_p(self) -> float:
        """Nucleus mass in force: where none was given, 0.8 for entropy-adaptive sampling, else 1.0."""
        if self.top_p is not None:
            return self.top_p
        return 0.8 if self.uses_entropy else 1.0

    @property
    def sampler(self) -> Literal["greedy", "entropy", "top_p"]:
        """Name of the sampler that runs."""
        if self.uses_entropy:
            return "entropy"
        return "greedy" if self.is_greedy else "top_p"


@dataclass(frozen=True, kw_only=True, slots=True)
class Intervention:
    """Adds `alpha * direction` to the residual stream at masked positions from `layer` on."""

    concept_ids: tuple[int, ...]
    """Known concepts, ids local to the known head. Their embeddings are summed and normalised."""
    weights: tuple[float, ...] | None = None
    """One weight a concept; None: equal weights."""
    strength: float
    """In units of `unit`. Negative steers away."""
    unit: Unit = "logits"
    """`logits`: alpha = strength / peak alignment with lm_head. `raw`: alpha = strength."""
    layer: int | None = None
    """First layer after which the direction is added, counted from 1. None: n_layers // 2."""
    schedule: Schedule = "fixed"
    """`hard_cutoff` stops once `cutoff_tokens` tokens are committed."""
    cutoff_tokens: int = 32
    """For `hard_cutoff`: commits at full alpha."""

    def __post_init__(self) -> None:
        path = "steering.interventions"
        _require(
            len(self.concept_ids) > 0 and all(_is_int(c) for c in self.concept_ids),
            f"concept_ids is {self.concept_ids!r}; it must hold at least one concept id",
            f"{path}.concept_ids",
        )
        _require(
            self.weights is None
            or (len(self.weights) == len(self.concept_ids) and all(_is_finite(w) for w in self.weights)),
            f"weights is {self.weights!r}; it must hold one finite number for each of {len(self.concept_ids)} concepts",
            f"{path}.weights",
        )
        _require(_is_finite(self.strength), f"strength is {self.strength!r}; it must be finite", f"{path}.strength")
        _require(self.unit in ("logits", "raw"), f"unit is {self.unit!r}; it must be 'logits' or 'raw'", f"{path}.unit")
        _require(
            self.layer is None or (_is_int(self.layer) and self.layer >= 0),
            f"layer is {self.layer!r}; it must be a whole number at least 0",
            f"{path}.layer",
        )
        _require(
            self.schedule in ("fixed", "hard_cutoff"),
            f"schedule is {self.schedule!r}; it must be 'fixed' or 'hard_cutoff'",
            f"{path}.schedule",
        )
        _require(
            _is_int(self.cutoff_tokens) and self.cutoff_tokens >= 1,
            f"cutoff_tokens is {self.cutoff_tokens!r}; it must be a whole number at least 1",
            f"{path}.cutoff_tokens",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Suppression:
    """Subtracts `strength * relu(embedding . W)` from the logits of every token."""

    concept_id: int
    """A known concept, id local to the known head."""
    strength: float
    """How strongly; at least 0."""

    def __post_init__(self) -> None:
        _require(_is_int(self.concept_id), f"concept_id is {self.concept_id!r}; it must be an id", "steering.suppress")
        _require(
            _is_finite(self.strength) and self.strength >= 0,
            f"strength is {self.strength!r}; it must be finite and at least 0",
            "steering.suppress.strength",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SteeringParams:
    """Interventions and suppressions of one request; each kind adds up."""

    interventions: tuple[Intervention, ...] = ()
    suppress: tuple[Suppression, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class AttributionParams:
    """Asks for the concepts behind every committed token."""

    top_k: int | None = None
    """Concepts returned per head, largest absolute contribution first. None: all the heads report."""

    def __post_init__(self) -> None:
        _require(
            self.top_k is None or (_is_int(self.top_k) and self.top_k >= 0),
            f"top_k is {self.top_k!r}; it must be a whole number at least 0",
            "attribution.top_k",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One generation: token ids in."""

    prompt_token_ids: tuple[int, ...] | list[int]
    """May be empty: generation from nothing."""
    max_tokens: int = 256
    """Exact number of positions that exist beyond the prompt."""
    sampling: SamplingParams = SamplingParams()
    steering: SteeringParams | None = None
    attribution: AttributionParams | None = None
    """None computes no attribution."""
    priority: int = 0
    """Smaller is served first and preempted last."""
    request_id: str | None = None
    """None: the engine makes one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_token_ids", tuple(self.prompt_token_ids))
        _require(
            _is_int(self.max_tokens) and self.max_tokens >= 1,
            f"max_tokens is {self.max_tokens!r}; it must be a whole number at least 1",
            "max_tokens",
        )
        _require(_is_int(self.priority), f"priority is {self.priority!r}; it must be a whole number", "priority")


@dataclass(frozen=True, slots=True)
class ConceptContribution:
    """One active concept's part in one token's logit."""

    concept_id: int
    """Id local to its head."""
    weight: float
    """Sigmoid of the concept's logit, in [0, 1]."""
    contribution: float
    """weight * (embedding . W[token]), in logits."""


@dataclass(frozen=True, slots=True)
class TokenAttribution:
    """Which concepts drove one token; totals + epsilon = target logit. Totals cover all reported concepts, also those
    that `top_k` left out."""

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
