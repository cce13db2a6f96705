"""What a request may say of concepts: which to steer by, what to override, what to explain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, WithJsonSchema, model_validator
from pydantic_core import CoreSchema, PydanticCustomError

from engine import Head, limits

from .base import StrictObject, is_int

MAX_STEERED_CONCEPTS = 256
MAX_INTERVENTIONS = 64
"""Of one body, and as many suppressions; the engine itself takes `limits.MAX_INTERVENTIONS`."""
MAX_STRENGTH = 1000.0
"""Far beyond any use, and far from where the arithmetic overflows."""


def _check_concept_id(value: Any) -> Any:
    if isinstance(value, str) or is_int(value):
        return value
    raise PydanticCustomError("concept_name", "must be a concept's id (a whole number) or its label (a string)")


def _check_concept_name(value: Any) -> Any:
    if isinstance(value, Mapping) and "id" in value and value.keys() <= {"id", "name"}:
        # As answers and presets tell a concept, so that what they say can be sent again.
        if not isinstance(value.get("name"), str | None):
            raise PydanticCustomError("concept_name", "has a `name` that is no string; the id decides, leave it out")
        return _check_concept_id(value["id"])
    return _check_concept_id(value)


def _check_concept_item(value: Any) -> Any:
    if isinstance(value, Mapping | ConceptItem):
        return value
    if isinstance(value, str) or is_int(value):
        return {"id": value}
    raise PydanticCustomError("concept_item", 'must be the id of a concept, its label, or {"id", "weight"}')


_ID = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
_NAME = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_NAMED = {
    "type": "object",
    "properties": {"id": _ID, "name": _NAME},
    "required": ["id"],
    "additionalProperties": False,
}
ConceptName = Annotated[
    int | str, BeforeValidator(_check_concept_name), WithJsonSchema({"anyOf": [*_ID["anyOf"], _NAMED]})
]
"""A catalogue id or an exact label, whatever its case; or an object that has one as its `id`."""


class ConceptItem(StrictObject):
    """One concept of an intervention."""

    id: Annotated[int | str, BeforeValidator(_check_concept_id)]
    """A catalogue id or an exact label, whatever its case."""
    name: str | None = None
    """As presets tell it. Not read: the id decides."""
    weight: float = Field(default=1.0, ge=-MAX_STRENGTH, le=MAX_STRENGTH)
    """Its share of the sum."""


class _ShortForms:
    """Says in the schema that an id or a label may stand for the whole object."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "integer"}, {"type": "string"}, handler(schema)]}


Concepts = Annotated[
    list[Annotated[ConceptItem, BeforeValidator(_check_concept_item), _ShortForms()]],
    Field(min_length=1, max_length=MAX_STEERED_CONCEPTS),
]


class InterventionSpec(StrictObject):
    """Steers toward (or, with a negative strength, away from) the sum of some concepts."""

    concepts: Concepts
    """Ids, labels, or objects with a weight."""
    strength: float = Field(ge=-MAX_STRENGTH, le=MAX_STRENGTH)
    """In units of `unit`."""
    unit: Literal["logits", "raw"] = "logits"
    """`logits`: the push on the best aligned token. `raw`: the amount added, as the model takes it."""
    layer: int | None = Field(default=None, ge=0)
    """First layer that is steered, counted from 1. Absent: half of the layers."""
    schedule: Literal["fixed", "hard_cutoff"] = "fixed"
    """`hard_cutoff` stops after `cutoff_tokens` tokens."""
    cutoff_tokens: int = Field(default=32, ge=1)
    """Of `hard_cutoff`: how many tokens are steered."""
    group: bool = False
    """Take each concept together with the members of its public group."""

    @model_validator(mode="after")
    def _check_cutoff(self) -> InterventionSpec:
        # With a schedule beside it, it is what an answer has told, sent again.
        if "cutoff_tokens" in self.model_fields_set and "schedule" not in self.model_fields_set:
            raise PydanticCustomError(
                "no_effect", 'only with `schedule: "hard_cutoff"`; send that too', {"field": "cutoff_tokens"}
            )
        return self


class SuppressionSpec(StrictObject):
    """Lowers the tokens that a concept promotes."""

    concept: ConceptName
    """A catalogue id or an exact label, whatever its case."""
    strength: float = Field(ge=0, le=MAX_STRENGTH)
    """Logits taken off for each unit of alignment."""


class OverrideSpec(StrictObject):
    """Sets a concept's weight, of either head, in place of what the model finds."""

    concept: ConceptName
    """A catalogue id or an exact label, whatever its case; it need not be steerable."""
    weight: float = Field(ge=-MAX_STRENGTH, le=MAX_STRENGTH)
    """The weight from now on; the model's own lie between 0 and 1."""


class SteeringSpec(StrictObject):
    """Interventions, or the short form `{"concepts", "strength"}` for one; several add up."""

    concepts: Concepts | None = None
    """Short form: steer by these, from a quarter of the layers on, for the first 32 tokens."""
    strength: float | None = Field(default=None, ge=-MAX_STRENGTH, le=MAX_STRENGTH)
    """Short form: how strongly, in logits."""
    group: bool = False
    """Short form: take the concepts' public groups."""
    interventions: Annotated[list[InterventionSpec], Field(max_length=MAX_INTERVENTIONS)] = []
    """What is added to the model's hidden states."""
    suppress: Annotated[list[SuppressionSpec], Field(max_length=MAX_INTERVENTIONS)] = []
    """What is taken off the logits."""
    overrides: Annotated[list[OverrideSpec], Field(max_length=limits.MAX_OVERRIDES)] = []
    """Weights that are set, each concept's once."""
    override_mode: Literal["delta", "reference"] = "delta"
    """`delta` moves the hidden state by the change of the weight alone. `reference` composes it anew, as the public
    package does: one known concept then drops the remainder that no concept explains, at every position."""
    preset: str | None = None
    """`name` or `name@version` of a kept preset, which everything else adds to."""

    @model_validator(mode="after")
    def _check_short_form(self) -> SteeringSpec:
        if (self.concepts is None) != (self.strength is None):
            field = "strength" if self.strength is None else "concepts"
            raise PydanticCustomError("missing_partner", "`concepts` and `strength` go together", {"field": field})
        if self.group and self.concepts is None:
            raise PydanticCustomError(
                "no_effect", "only with `concepts` beside it; an intervention has its own", {"field": "group"}
            )
        if self.override_mode != "delta" and not self.overrides and self.preset is None:
            raise PydanticCustomError("no_effect", "only with `overrides`", {"field": "override_mode"})
        return self


class AttributionSpec(StrictObject):
    """Asks which concepts are behind the text."""

    level: Literal["off", "token", "chunk", "both"] = "token"
    """A chunk is the text between two end-of-chunk tokens. A request without `attribution` has none."""
    top_k: int = Field(default=8, ge=0)
    """Concepts returned for each token and head, and for each chunk. Totals cover all active ones."""
    heads: Annotated[list[Head], Field(min_length=1)] = ["known", "discovered"]
    """Which heads' concepts are listed."""
