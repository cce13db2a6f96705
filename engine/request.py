"""What enters the engine: requests and their parameters.

Plain frozen data, picklable, without torch. Values are checked here as far as they can be
without knowing the checkpoint; `engine.admission` checks the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, get_args

from .checks import LARGEST, is_list, is_number, is_whole, shown
from .errors import InvalidValue
from .limits import (
    MAX_CFG_SCALE,
    MAX_CONCEPTS,
    MAX_INTERVENTIONS,
    MAX_LOGPROBS,
    MAX_OVERRIDES,
    MAX_PRIORITY,
    MAX_SEED,
    MAX_SUPPRESSIONS,
)
from .output import Schedule

_PENALTY_RANGE = (1e-6, 1e6)

Policy = Literal["confidence", "threshold", "factor", "entropy_bound", "lossless"]
Unit = Literal["logits", "raw"]
Head = Literal["known", "discovered"]
OverrideMode = Literal["delta", "reference"]

DEFAULT_PARAMETERS: Mapping[str, float] = MappingProxyType({"threshold": 0.9, "factor": 1.0, "entropy_bound": 0.1})
"""The adaptive policies, each with a parameter of its own name, and what it is where none is given."""
_PARAMETER_RANGES = {"threshold": (1e-6, 1.0), "factor": (0.0, LARGEST), "entropy_bound": (0.0, LARGEST)}


def _refusal(value: object, param: str, rule: str) -> InvalidValue:
    name = param.rpartition(".")[2]
    return InvalidValue(f"{name} is {shown(value)}; it must be {rule}", param=param)


def _whole(value: object, param: str, low: int, high: int | None = None, *, note: str = "") -> None:
    if not is_whole(value, low, high):
        limit = f"at least {low}" if high is None else f"from {low} to {high}"
        raise _refusal(value, param, f"a whole number {limit}{note}")


def _number(value: object, param: str, low: float = -LARGEST, high: float = LARGEST, *, note: str = "") -> float:
    """The value as a plain float: torch takes neither numpy's bools, which its floats compare to, nor huge ints."""
    if not is_number(value, low, high):
        raise _refusal(value, param, f"a number from {low:g} to {high:g}{note}")
    return float(value)


def _flag(value: object, param: str) -> None:
    if not isinstance(value, bool):
        raise _refusal(value, param, "True or False")


def _one_of(value: object, param: str, allowed: tuple[str, ...]) -> None:
    if not (isinstance(value, str) and value in allowed):
        raise _refusal(value, param, " or ".join(map(repr, allowed)))


def _text(value: object, param: str) -> None:
    if not (isinstance(value, str) and value):
        raise _refusal(value, param, "a string that is not empty")


def _instance(value: object, param: str, kind: type) -> None:
    if not isinstance(value, kind):
        raise _refusal(value, param, f"a {kind.__name__}")


def _ids(value: object, param: str, what: str) -> tuple[int, ...]:
    """The ids as a tuple of the request's own: the caller may go on to change a list."""
    if not (is_list(value) and all(map(is_whole, value))):
        raise _refusal(value, param, f"a list or tuple of {what} ids")
    return tuple(value)  # type: ignore[arg-type]


def _items(value: object, param: str, kind: type, most: int) -> tuple[Any, ...]:
    if not (is_list(value) and all(isinstance(item, kind) for item in value)):
        raise _refusal(value, param, f"a list or tuple of {kind.__name__}")
    if len(value) > most:
        raise InvalidValue(f"{param} has {len(value)} entries; at most {most}", param=param)
    return tuple(value)


def _logit_bias(value: object, param: str) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise _refusal(value, param, "a mapping of token ids to numbers")
    for token_id, bias in value.items():
        if not (is_whole(token_id, 0) and (is_number(bias) or (isinstance(bias, float) and bias == -math.inf))):
            raise InvalidValue(
                f"logit_bias maps {shown(token_id)} to {shown(bias)}; it must map token ids to numbers "
                f"from {-LARGEST:g} to {LARGEST:g}, or to -inf",
                param=param,
            )
    return {token_id: float(bias) for token_id, bias in value.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How positions and tokens are chosen. The defaults equal steerling's `GenerationConfig()`."""

    policy: Policy = "confidence"
    """Which positions a denoising step commits: `confidence`, the `tokens_per_step` most confident. `lossless` gives
    the commits of `confidence` one at a time in fewer passes: a second row tries the commit that is likely to follow.
    The others take from the most confident on as many as their parameter allows, at least one: see
    `engine.decoding.policies`."""
    tokens_per_step: int | None = None
    """Most commits of a denoising step. None: 1 for `confidence`, which is the highest quality, and always 1 for
    `lossless`; no limit for others."""
    threshold: float | None = None
    """Of `threshold`: positions more confident than this. 1.0 is one at a time. None: 0.9."""
    factor: float | None = None
    """Of `factor`: n positions while (n + 1) * (1 - the least of their confidences) is below. None: 1.0."""
    entropy_bound: float | None = None
    """Of `entropy_bound`, in nats: positions whose entropies sum to at most this beside the largest. None: 0.1."""
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
    cfg_scale: float = 0.0
    """Guidance: logits become uncond + (cfg_scale + 1) * (cond - uncond), where uncond has seen masks for a prompt.
    0: off."""
    seed: int | None = None
    """Key of the request's random numbers. None: one is drawn and returned in the output."""
    choice_index: int = 0
    """Which of several choices with one seed this is."""
    num_logprobs: int = 0
    """How many `top_logprobs` each commit carries, at most 20."""

    def __post_init__(self) -> None:
        _one_of(self.policy, "sampling.policy", get_args(Policy))
        if self.tokens_per_step is not None:
            _whole(self.tokens_per_step, "sampling.tokens_per_step", 1)
            if self.has_drafts and self.tokens_per_step != 1:
                raise InvalidValue(
                    f"tokens_per_step is {self.tokens_per_step}, but lossless commits one token a step; leave it out",
                    param="sampling.tokens_per_step",
                )
        for name, limits in _PARAMETER_RANGES.items():
            self._check_parameter(name, *limits)
        _whole(self.min_tokens, "sampling.min_tokens", 0)
        self._set("cfg_scale", _number(self.cfg_scale, "sampling.cfg_scale", 0, MAX_CFG_SCALE, note=" (0 is off)"))
        _whole(self.choice_index, "sampling.choice_index", 0, MAX_SEED)
        _whole(self.num_logprobs, "sampling.num_logprobs", 0, MAX_LOGPROBS)
        if self.top_k is not None:
            _whole(self.top_k, "sampling.top_k", 0, note=" (0 is off)")
        if self.seed is not None:
            _whole(self.seed, "sampling.seed", 0, MAX_SEED)
        _flag(self.ignore_eos, "sampling.ignore_eos")
        if self.entropy_sampling is not None:
            _flag(self.entropy_sampling, "sampling.entropy_sampling")
        if self.temperature is not None:
            self._set("temperature", _number(self.temperature, "sampling.temperature", 0, note=" (0 is greedy)"))
        for name in ("top_p", "min_p"):
            if getattr(self, name) is not None:
                self._set(name, _number(getattr(self, name), f"sampling.{name}", 0, 1))
        penalty = _number(self.repetition_penalty, "sampling.repetition_penalty", *_PENALTY_RANGE, note=" (1 is off)")
        self._set("repetition_penalty", penalty)
        self._set("logit_bias", _logit_bias(self.logit_bias, "sampling.logit_bias"))
        self._set("stop_token_ids", _ids(self.stop_token_ids, "sampling.stop_token_ids", "token"))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_parameter(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if value is None:
            return
        self._set(name, _number(value, f"sampling.{name}", low, high))
        if self.policy != name:
            raise InvalidValue(
                f"{name} is {shown(value)}, but the policy is {self.policy!r}; it belongs to policy {name!r}: "
                "choose that, or leave it out",
                param=f"sampling.{name}",
            )

    @property
    def policy_parameter(self) -> float | None:
        """The parameter that the policy runs with; None for `confidence` and `lossless`, which have none."""
        default = DEFAULT_PARAMETERS.get(self.policy)
        given: float | None = None if default is None else getattr(self, self.policy)
        return default if given is None else given

    def max_commits(self, block_size: int) -> int:
        """Most commits of a denoising step, for blocks of `block_size` positions."""
        if self.tokens_per_step is not None:
            return self.tokens_per_step
        return block_size if self.policy in DEFAULT_PARAMETERS else 1

    @property
    def has_drafts(self) -> bool:
        """True when a second row may add a commit to a pass's one."""
        return self.policy == "lossless"

    @property
    def is_adaptive(self) -> bool:
        """True when the number of a pass's commits is known only from its results."""
        return self.has_drafts or self.policy in DEFAULT_PARAMETERS

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

    @property
    def cutoff(self) -> int | None:
        """Commits after which it stops; None: never."""
        return self.cutoff_tokens if self.schedule == "hard_cutoff" else None

    def first_layer(self, n_layers: int) -> int:
        """Where it begins in a model of so many layers."""
        return n_layers // 2 if self.layer is None else self.layer

    def __post_init__(self) -> None:
        path = "steering.interventions"
        concept_ids = _ids(self.concept_ids, f"{path}.concept_ids", "concept")
        if not 1 <= len(concept_ids) <= MAX_CONCEPTS:
            raise InvalidValue(
                f"concept_ids holds {len(concept_ids)} ids; it must hold 1 to {MAX_CONCEPTS}",
                param=f"{path}.concept_ids",
            )
        object.__setattr__(self, "concept_ids", concept_ids)
        if self.weights is not None:
            weights = self.weights
            if not (is_list(weights) and len(weights) == len(concept_ids) and all(map(is_number, weights))):
                rule = f"a list or tuple with one number for each of {len(concept_ids)} concepts"
                raise _refusal(weights, f"{path}.weights", rule)
            object.__setattr__(self, "weights", tuple(map(float, weights)))
        object.__setattr__(self, "strength", _number(self.strength, f"{path}.strength"))
        _one_of(self.unit, f"{path}.unit", get_args(Unit))
        if self.layer is not None:
            _whole(self.layer, f"{path}.layer", 0)
        _one_of(self.schedule, f"{path}.schedule", get_args(Schedule))
        _whole(self.cutoff_tokens, f"{path}.cutoff_tokens", 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Suppression:
    """Subtracts `strength * relu(embedding . W)` from the logits of every token."""

    concept_id: int
    """A known concept, id local to the known head."""
    strength: float
    """How strongly; at least 0."""

    def __post_init__(self) -> None:
        if not is_whole(self.concept_id):
            raise _refusal(self.concept_id, "steering.suppress.concept_id", "a concept id")
        object.__setattr__(self, "strength", _number(self.strength, "steering.suppress.strength", 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightOverride:
    """Sets a concept's weight at masked positions, in place of what its head finds there."""

    concept_id: int
    """Local to `head`."""
    head: Head = "known"
    weight: float
    """The concept's weight from now on; a head's own lie in (0, 1)."""

    def __post_init__(self) -> None:
        if not is_whole(self.concept_id, 0):
            raise _refusal(self.concept_id, "steering.overrides.concept_id", "a concept id")
        _one_of(self.head, "steering.overrides.head", get_args(Head))
        object.__setattr__(self, "weight", _number(self.weight, "steering.overrides.weight"))


@dataclass(frozen=True, kw_only=True, slots=True)
class SteeringParams:
    """Interventions, suppressions and overrides of one request; the first two kinds each add up."""

    interventions: tuple[Intervention, ...] = ()
    suppress: tuple[Suppression, ...] = ()
    overrides: tuple[WeightOverride, ...] = ()
    """Each concept at most once."""
    override_mode: OverrideMode = "delta"
    """`delta` adds (new - current weight) * embedding to the hidden state and keeps the epsilon, so setting the current
    weight changes nothing. `reference` is what the public package does: the heads' features are summed anew, and one
    known id drops the epsilon at every position. See `engine.decoding.overrides`."""

    def __post_init__(self) -> None:
        interventions = _items(self.interventions, "steering.interventions", Intervention, MAX_INTERVENTIONS)
        object.__setattr__(self, "interventions", interventions)
        suppress = _items(self.suppress, "steering.suppress", Suppression, MAX_SUPPRESSIONS)
        object.__setattr__(self, "suppress", suppress)
        overrides = _items(self.overrides, "steering.overrides", WeightOverride, MAX_OVERRIDES)
        named = [(item.head, item.concept_id) for item in overrides]
        twice = next((pair for index, pair in enumerate(named) if pair in named[:index]), None)
        if twice is not None:
            raise InvalidValue(
                f"overrides names {twice[0]} concept {twice[1]} twice; set each once", param="steering.overrides"
            )
        object.__setattr__(self, "overrides", overrides)
        _one_of(self.override_mode, "steering.override_mode", get_args(OverrideMode))


@dataclass(frozen=True, kw_only=True, slots=True)
class AttributionParams:
    """Asks for the concepts behind every committed token."""

    top_k: int | None = None
    """Concepts returned per head, largest absolute contribution first. None: all the heads report."""

    def __post_init__(self) -> None:
        if self.top_k is not None:
            _whole(self.top_k, "attribution.top_k", 0)


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
        if not is_list(self.prompt_token_ids):
            raise _refusal(self.prompt_token_ids, "prompt_token_ids", "a list or tuple of token ids")
        object.__setattr__(self, "prompt_token_ids", tuple(self.prompt_token_ids))
        _whole(self.max_tokens, "max_tokens", 1)
        _instance(self.sampling, "sampling", SamplingParams)
        if self.steering is not None:
            _instance(self.steering, "steering", SteeringParams)
        if self.attribution is not None:
            _instance(self.attribution, "attribution", AttributionParams)
        _whole(self.priority, "priority", -MAX_PRIORITY, MAX_PRIORITY)
        if self.request_id is not None:
            _text(self.request_id, "request_id")

    @property
    def is_guided(self) -> bool:
        """True if an unconditional copy runs beside it; without a prompt that copy would be the same."""
        return self.sampling.cfg_scale > 0 and len(self.prompt_token_ids) > 0

    @property
    def num_lanes(self) -> int:
        """Lanes that it takes, each with rows and pages of its own: two for a guided request."""
        return 2 if self.is_guided else 1
