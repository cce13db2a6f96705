"""The fields that every request for text has in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from engine import Policy, limits

from ..errors import UNSUPPORTED_FIELD
from .base import Object, StrictObject, Unsupported, check_text
from .steering import AttributionSpec, SteeringSpec

DEFAULT_MAX_TOKENS = 256
MIN_TEMPERATURE = 0.001
"""Smallest but 0: below it the arithmetic overflows."""
MAX_PRIORITY = 1_000_000
"""Either way; the engine itself takes any that 64 bits hold."""
MAX_POLICY_PARAMETER = 1e6
"""Beyond what any block can reach."""
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1000
"""Characters. Each choice searches for each of them, with a table as long as the string."""
MAX_CHOICES = 128


class DiffusionSpec(StrictObject):
    """How blocks are filled."""

    policy: Policy = "confidence"
    """Which positions a denoising step commits. `confidence`: the `tokens_per_step` most confident. `lossless`: what
    `confidence` commits one at a time, in fewer forward passes where few requests run. The others commit, most
    confident first, as many as their own parameter allows, at least one."""
    tokens_per_step: int | None = Field(default=None, ge=1)
    """Most tokens committed in a denoising step. Absent: 1 for `confidence`, the best quality; always 1 for `lossless`;
    no limit for others."""
    threshold: float | None = Field(default=None, gt=0, le=1)
    """Of `threshold`: commit what is more confident than this. Absent: 0.9."""
    factor: float | None = Field(default=None, ge=0, le=MAX_POLICY_PARAMETER)
    """Of `factor`: commit n while (n + 1) * (1 - the least of their confidences) is below this. Absent: 1."""
    entropy_bound: float | None = Field(default=None, ge=0, le=MAX_POLICY_PARAMETER)
    """Of `entropy_bound`: commit while the entropies, in nats, sum to at most this beside the largest. Absent: 0.1."""
    entropy_sampling: bool | None = None
    """Entropy-adaptive temperature. Absent: used when neither `temperature` nor `top_p` is given."""
    cfg_scale: float | None = Field(default=None, ge=0, le=limits.MAX_CFG_SCALE)
    """Classifier-free guidance: how far logits are moved away from those without a prompt. Absent or 0: off."""


class StreamOptions(StrictObject):
    """What a stream holds beside text."""

    include_usage: bool = False
    """One chunk with the usage before the end; `usage` is null in every other."""
    continuous_usage_stats: bool = False
    """With `include_usage`: the usage so far in every chunk."""
    include_diffusion: Literal["off", "blocks", "steps"] = "off"
    """Events of the generation: none, blocks begun and sealed, or every denoising step too."""
    include_obfuscation: Annotated[bool, Unsupported(False)] = False


def _check_logit_bias(value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise PydanticCustomError("logit_bias", "must be an object that maps token ids to numbers")
    # `int` would take more: spaces, underscores, digits of other scripts.
    wrong = [key for key in value if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 18)]
    if wrong:
        raise PydanticCustomError("logit_bias", "has the key {key}, which is not a token id", {"key": repr(wrong[0])})
    for key, bias in value.items():
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise PydanticCustomError(
                "logit_bias",
                "maps token {key} to {bias}; it must be a number from -100 to 100",
                {"key": key, "bias": repr(bias)[:80]},
            )
    return {int(key): float(bias) for key, bias in value.items()}


def _check_temperature(value: float) -> float:
    if 0 < value < MIN_TEMPERATURE:
        raise PydanticCustomError("temperature", "must be 0 (greedy) or at least {least}", {"least": MIN_TEMPERATURE})
    return value


def _check_stop(value: Any) -> Any:
    """One string or several -> a list."""
    strings = [value] if isinstance(value, str) else value
    if not (isinstance(strings, list) and all(isinstance(item, str) and item for item in strings)):
        raise PydanticCustomError("stop", "must be a string or a list of strings, none of them empty")
    if len(strings) > MAX_STOP_STRINGS:
        raise PydanticCustomError(
            "stop", "has {count} strings; at most {most}", {"count": len(strings), "most": MAX_STOP_STRINGS}
        )
    longest = max(map(len, strings), default=0)
    if longest > MAX_STOP_LENGTH:
        raise PydanticCustomError(
            "stop", "has a string of {length} characters; at most {most}", {"length": longest, "most": MAX_STOP_LENGTH}
        )
    return [check_text(item) for item in strings]


_STRING = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
_STOP_SCHEMA = {"anyOf": [_STRING, {"type": "array", "items": _STRING, "maxItems": MAX_STOP_STRINGS}]}


MISPLACED = {
    **dict.fromkeys(("policy", "tokens_per_step", "threshold", "factor", "entropy_bound"), "diffusion"),
    **dict.fromkeys(("entropy_sampling", "cfg_scale"), "diffusion"),
    **dict.fromkeys(("concepts", "strength", "interventions", "suppress", "overrides", "preset"), "steering"),
    **dict.fromkeys(("include_usage", "include_diffusion"), "stream_options"),
}
"""Fields of our own objects, which at the top level would be ignored as any unknown field is."""
RENAMED = {"max_new_tokens": "max_tokens", "stop_tokens": "stop_token_ids", "steer": "steering"}
"""What the reference package and hasty hands call fields of ours."""


class GenerateFields(Object):
    """What /v1/completions and /v1/chat/completions both take."""

    model: str | None = None
    """One of /v1/models; absent means the only one."""
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    """Choices for each prompt. They share its cached pages, and choice i draws other random numbers from one seed."""
    best_of: int | None = None
    """Only as large as `n`: every choice is returned."""
    seed: int | None = Field(default=None, ge=0, le=limits.MAX_SEED)
    """Key of the random numbers; one is drawn where it is absent. The answer tells it in `diffusion.seed`."""
    temperature: Annotated[float, AfterValidator(_check_temperature)] | None = Field(default=None, ge=0, le=100)
    """0 is greedy. Absent, together with `top_p`: entropy-adaptive sampling."""
    top_p: float | None = Field(default=None, ge=0, le=1)
    """Probability mass of the likeliest tokens that are drawn from."""
    top_k: int | None = Field(default=None, ge=-1)
    """Draw from the k likeliest tokens. 0 or -1: off."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Draw from tokens at least this fraction as likely as the likeliest."""
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    """Absent: 1.1 with entropy-adaptive sampling, otherwise 1.0 (off)."""
    logit_bias: Annotated[dict[int, float], BeforeValidator(_check_logit_bias)] = {}
    """Token id -> what is added to its logit, from -100 to 100."""
    stop: Annotated[list[str], BeforeValidator(_check_stop), WithJsonSchema(_STOP_SCHEMA)] = []
    """A string or up to 16, of at most 1000 characters: the text ends before the first that it spells, and generation
    with it."""
    include_stop_str_in_output: bool = False
    """Let the text end after the stop string."""
    stop_token_ids: list[int] = []
    """Tokens that end the text where they stand; they are not part of it."""
    min_tokens: int = Field(default=0, ge=0)
    """No end token and no stop string ends the text within this many tokens."""
    ignore_eos: bool = False
    """Take the end of a turn for an ordinary token."""
    priority: int = Field(default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    """Smaller is served first."""
    return_token_ids: bool = False
    """Return `token_ids` with each choice, and the prompt's."""
    stream: bool = False
    """Send the answer as server-sent events while it is made."""
    stream_options: StreamOptions | None = None
    """Only with `stream: true`."""
    steering: SteeringSpec | None = None
    """Which concepts to steer by."""
    attribution: AttributionSpec = AttributionSpec(level="off")
    """Which concepts to return with the text."""
    diffusion: DiffusionSpec = DiffusionSpec()
    """How the blocks of the text are filled, and how their tokens are drawn."""

    prompt_logprobs: Annotated[None, Unsupported()] = None
    presence_penalty: Annotated[float, Unsupported(0)] = 0
    frequency_penalty: Annotated[float, Unsupported(0)] = 0
    length_penalty: Annotated[float, Unsupported(1)] = 1
    use_beam_search: Annotated[bool, Unsupported(False)] = False
    bad_words: Annotated[list[str], Unsupported([])] = []
    allowed_token_ids: Annotated[None, Unsupported()] = None
    truncate_prompt_tokens: Annotated[None, Unsupported()] = None
    prompt_embeds: Annotated[None, Unsupported()] = None
    skip_special_tokens: Annotated[bool, Unsupported(True)] = True
    spaces_between_special_tokens: Annotated[bool, Unsupported(True)] = True
    return_tokens_as_token_ids: Annotated[bool, Unsupported(False, instead="send `return_token_ids`")] = False
    cache_salt: Annotated[None, Unsupported()] = None
    logits_processors: Annotated[None, Unsupported()] = None
    tools: Annotated[list[Any], Unsupported([])] = []
    tool_choice: Annotated[str | None, Unsupported("none", "auto")] = None
    functions: Annotated[list[Any], Unsupported([])] = []
    function_call: Annotated[str | None, Unsupported("none", "auto")] = None
    response_format: Annotated[dict[str, Any] | None, Unsupported({"type": "text"})] = None
    structured_outputs: Annotated[None, Unsupported()] = None
    guided_json: Annotated[None, Unsupported()] = None
    guided_regex: Annotated[None, Unsupported()] = None
    guided_choice: Annotated[None, Unsupported()] = None
    guided_grammar: Annotated[None, Unsupported()] = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_misplaced(cls, data: Any) -> Any:
        for key in data if isinstance(data, Mapping) else ():
            if data[key] is None or not isinstance(key, str):
                continue
            if key in MISPLACED:
                place = f"{MISPLACED[key]}.{key}"
                raise PydanticCustomError("misplaced", "belongs into {place}", {"field": key, "place": repr(place)})
            if key in RENAMED:
                raise PydanticCustomError("misplaced", "is {name} here", {"field": key, "name": repr(RENAMED[key])})
        return data

    @field_validator("best_of")
    @classmethod
    def _check_best_of(cls, best_of: int | None, info: ValidationInfo) -> int | None:
        if best_of is not None and best_of != info.data.get("n", best_of):
            raise PydanticCustomError(
                UNSUPPORTED_FIELD,
                "is {best_of} and n is {n}; only equal ones are supported, so leave it out",
                {"best_of": best_of, "n": info.data["n"]},
            )
        return best_of

    @field_validator("stream_options")
    @classmethod
    def _check_stream_options(cls, options: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if options is not None and not info.data.get("stream", False):
            raise PydanticCustomError("needs_stream", "only allowed with `stream: true`")
        return options

    @property
    def token_limit(self) -> int:
        """Most tokens to generate."""
        raise NotImplementedError

    @property
    def token_limit_field(self) -> str | None:
        """The field that says so; None where none does, so that the default is meant."""
        return next((name for name in ("max_completion_tokens", "max_tokens") if name in self.model_fields_set), None)

    @property
    def why_plain(self) -> str | None:
        """Why steering would change nothing of the answer; None where it would."""
        return None

    @property
    def num_logprobs(self) -> int | None:
        """How many likely alternatives come with each token; None: no logprobs at all."""
        raise NotImplementedError

    @property
    def is_scoring(self) -> bool:
        """True when prompt and text are scored from left to right, in place of the logprobs of the generation."""
        return False

    @property
    def has_echo(self) -> bool:
        """True when the text begins with the prompt."""
        return False
