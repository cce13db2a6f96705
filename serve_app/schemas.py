"""Requests as JSON spells them.

Top-level fields that nobody knows are tolerated, since ordinary clients send some; unknown keys inside our own objects
are errors. `null` means unset everywhere. A field that exists in the APIs we speak and would change the answer, but is
not served, is refused by name unless it holds the value that asks for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from engine import Policy

from .errors import UNSUPPORTED_FIELD

DEFAULT_MAX_TOKENS = 256
MAX_STEERED_CONCEPTS = 256
MAX_INTERVENTIONS = 64
MAX_STRENGTH = 1000.0
"""Far beyond any use, and far from where the arithmetic overflows."""
MIN_TEMPERATURE = 0.001
"""Smallest but 0, for the same reason."""
MAX_PRIORITY = 1_000_000
MAX_POLICY_PARAMETER = 1e6
"""Beyond what any block can reach."""

Head = Literal["known", "discovered"]
Prompt = str | list[int]


class _Object(BaseModel):
    """JSON types are taken as they are: no string becomes a number, and `null` is an absent key."""

    model_config = ConfigDict(strict=True, frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            raise PydanticCustomError("object_type", "must be a JSON object")
        return {key: value for key, value in data.items() if value is not None or key not in cls.model_fields}


class _StrictObject(_Object):
    """One of our own objects: an unknown key is an error."""

    model_config = ConfigDict(extra="forbid")


class _Unsupported:
    """Refuses every value except those that ask for nothing, and says so in the schema."""

    def __init__(self, *neutral: object) -> None:
        self._neutral = neutral

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [*self._neutral, None], "description": "Not supported; refused unless it asks for nothing."}

    def _check(self, value: object) -> object:
        # `True == 1` in Python, yet in JSON they ask for different things.
        if any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in self._neutral):
            return value
        raise PydanticCustomError(UNSUPPORTED_FIELD, "this field is not supported; leave it out")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_text(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PydanticCustomError(
            "prompt_text", "is not valid Unicode text: half of a surrogate pair at character {at}", {"at": error.start}
        ) from None
    return text


def _check_prompt(value: Any) -> Any:
    if isinstance(value, str):
        _check_text(value)
        return value
    if isinstance(value, list) and value:
        if all(map(_is_int, value)) or all(isinstance(item, list) and all(map(_is_int, item)) for item in value):
            return value
        if all(isinstance(item, str) for item in value):
            for text in value:
                _check_text(text)
            return value
    raise PydanticCustomError(
        "prompt_type", "must be a string, or a list (not empty) of strings, of token ids, or of lists of token ids"
    )


def _check_concept_name(value: Any) -> Any:
    if isinstance(value, str) or _is_int(value):
        return value
    raise PydanticCustomError("concept_name", "must be a concept's id (a whole number) or its label (a string)")


def _check_concept_item(value: Any) -> Any:
    if isinstance(value, Mapping | ConceptItem):
        return value
    if isinstance(value, str) or _is_int(value):
        return {"id": value}
    raise PydanticCustomError("concept_item", 'must be the id of a concept, its label, or {"id", "weight"}')


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


ConceptName = Annotated[int | str, BeforeValidator(_check_concept_name)]
"""A catalogue id or an exact label, whatever its case."""


class ConceptItem(_StrictObject):
    """One concept of an intervention."""

    id: ConceptName
    weight: float = Field(default=1.0, ge=-MAX_STRENGTH, le=MAX_STRENGTH)


Concepts = Annotated[
    list[Annotated[ConceptItem, BeforeValidator(_check_concept_item)]],
    Field(min_length=1, max_length=MAX_STEERED_CONCEPTS),
]


class InterventionSpec(_StrictObject):
    """Steers toward (or, with a negative strength, away from) the sum of some concepts."""

    concepts: Concepts
    strength: float = Field(ge=-MAX_STRENGTH, le=MAX_STRENGTH)
    """In units of `unit`."""
    unit: Literal["logits", "raw"] = "logits"
    """`logits`: the push on the best aligned token. `raw`: the amount added, as the model takes it."""
    layer: int | None = Field(default=None, ge=0)
    """First layer that is steered, counted from 1. Absent: half of the layers."""
    schedule: Literal["fixed", "hard_cutoff"] = "fixed"
    """`hard_cutoff` stops after `cutoff_tokens` tokens."""
    cutoff_tokens: int = Field(default=32, ge=1)
    group: bool = False
    """Take each concept together with the members of its public group."""


class SuppressionSpec(_StrictObject):
    """Lowers the tokens that a concept promotes."""

    concept: ConceptName
    strength: float = Field(ge=0, le=MAX_STRENGTH)


class SteeringSpec(_StrictObject):
    """Interventions, or the short form `{"concepts", "strength"}` for one; several add up."""

    concepts: Concepts | None = None
    """Short form: steer by these, from a quarter of the layers on, for the first 32 tokens."""
    strength: float | None = Field(default=None, ge=-MAX_STRENGTH, le=MAX_STRENGTH)
    """Short form: how strongly, in logits."""
    group: bool = False
    """Short form: take the concepts' public groups."""
    interventions: Annotated[list[InterventionSpec], Field(max_length=MAX_INTERVENTIONS)] = []
    suppress: Annotated[list[SuppressionSpec], Field(max_length=MAX_INTERVENTIONS)] = []
    preset: Annotated[None, _Unsupported()] = None

    @model_validator(mode="after")
    def _check_short_form(self) -> SteeringSpec:
        if (self.concepts is None) != (self.strength is None):
            field = "strength" if self.strength is None else "concepts"
            raise PydanticCustomError("missing_partner", "`concepts` and `strength` go together", {"field": field})
        return self


class AttributionSpec(_StrictObject):
    """Asks which concepts are behind the text."""

    level: Literal["off", "token", "chunk", "both"] = "off"
    """A chunk is the text between two end-of-chunk tokens."""
    top_k: int = Field(default=8, ge=0)
    """Concepts returned for each token and head, and for each chunk. Totals cover all active ones."""
    heads: Annotated[list[Head], Field(min_length=1)] = ["known", "discovered"]


class DiffusionSpec(_StrictObject):
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
    cfg_scale: Annotated[float | None, _Unsupported(0)] = None


class StreamOptions(_StrictObject):
    """What a stream holds beside text."""

    include_usage: bool = False
    """One chunk with the usage before the end; `usage` is null in every other."""
    continuous_usage_stats: bool = False
    """With `include_usage`: the usage so far in every chunk."""
    include_diffusion: Literal["off", "blocks", "steps"] = "off"
    """Events of the generation: none, blocks begun and sealed, or every denoising step too."""
    include_obfuscation: Annotated[bool, _Unsupported(False)] = False


class CompletionRequest(_Object):
    """Body of POST /v1/completions."""

    model: str | None = None
    """One of /v1/models; absent means the only one."""
    prompt: Annotated[str | list[str] | list[int] | list[list[int]], BeforeValidator(_check_prompt)]
    """Text or token ids; a list of either gives one choice each. Text is never searched for special tokens."""
    max_tokens: int = Field(default=DEFAULT_MAX_TOKENS, ge=1)
    """Exact number of tokens at most."""
    seed: int | None = Field(default=None, ge=0)
    temperature: Annotated[float, AfterValidator(_check_temperature)] | None = Field(default=None, ge=0, le=100)
    """0 is greedy. Absent, together with `top_p`: entropy-adaptive sampling."""
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    """0 or -1: off."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    """Absent: 1.1 with entropy-adaptive sampling, otherwise 1.0 (off)."""
    logit_bias: Annotated[dict[int, float], BeforeValidator(_check_logit_bias)] = {}
    stop_token_ids: list[int] = []
    """Tokens that end the text where they stand; they are not part of it."""
    min_tokens: int = Field(default=0, ge=0)
    priority: int = Field(default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    """Smaller is served first."""
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    steering: SteeringSpec | None = None
    attribution: AttributionSpec = AttributionSpec()
    diffusion: DiffusionSpec = DiffusionSpec()

    n: Annotated[int, _Unsupported(1)] = 1
    best_of: Annotated[int, _Unsupported(1)] = 1
    echo: Annotated[bool, _Unsupported(False)] = False
    logprobs: Annotated[bool | None, _Unsupported(False)] = None
    top_logprobs: Annotated[None, _Unsupported()] = None
    prompt_logprobs: Annotated[None, _Unsupported()] = None
    stop: Annotated[list[str], _Unsupported([])] = []
    include_stop_str_in_output: Annotated[bool, _Unsupported(False)] = False
    suffix: Annotated[str, _Unsupported("")] = ""
    presence_penalty: Annotated[float, _Unsupported(0)] = 0
    frequency_penalty: Annotated[float, _Unsupported(0)] = 0
    length_penalty: Annotated[float, _Unsupported(1)] = 1
    use_beam_search: Annotated[bool, _Unsupported(False)] = False
    bad_words: Annotated[list[str], _Unsupported([])] = []
    allowed_token_ids: Annotated[None, _Unsupported()] = None
    truncate_prompt_tokens: Annotated[None, _Unsupported()] = None
    return_token_ids: Annotated[bool, _Unsupported(False)] = False
    messages: Annotated[None, _Unsupported()] = None
    tools: Annotated[list[Any], _Unsupported([])] = []
    tool_choice: Annotated[str | None, _Unsupported("none", "auto")] = None
    functions: Annotated[list[Any], _Unsupported([])] = []
    function_call: Annotated[str | None, _Unsupported("none", "auto")] = None
    response_format: Annotated[dict[str, Any] | None, _Unsupported({"type": "text"})] = None
    structured_outputs: Annotated[None, _Unsupported()] = None
    guided_json: Annotated[None, _Unsupported()] = None
    guided_regex: Annotated[None, _Unsupported()] = None
    guided_choice: Annotated[None, _Unsupported()] = None
    guided_grammar: Annotated[None, _Unsupported()] = None

    @field_validator("stream_options")
    @classmethod
    def _check_stream_options(cls, options: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if options is not None and not info.data.get("stream", False):
            raise PydanticCustomError("needs_stream", "only allowed with `stream: true`")
        return options

    @property
    def prompts(self) -> list[Prompt]:
        """One entry a choice."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        items: list[Any] = self.prompt
        return [items] if _is_int(items[0]) else items


check_text, is_int, check_prompt = _check_text, _is_int, _check_prompt


class Object(_Object):
    """For now."""
