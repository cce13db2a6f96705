"""What all requests share: objects that take JSON types as they are, and fields that are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from ..errors import UNSUPPORTED_FIELD


class Object(BaseModel):
    """JSON types are taken as they are: no string becomes a number, and `null` is an absent key."""

    model_config = ConfigDict(strict=True, frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            raise PydanticCustomError("object_type", "must be a JSON object")
        return {key: value for key, value in data.items() if value is not None or key not in cls.model_fields}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Say of every field that may be absent that it may be null."""
        reference = handler(schema)
        described = handler.resolve_ref_schema(reference)
        required = described.get("required", ())
        described["properties"] = {
            name: field if name in required else _or_null(field) for name, field in described["properties"].items()
        }
        return reference


_OUTER = ("title", "description", "default")
"""What stays with a field however it is typed."""


def _or_null(field: dict[str, Any]) -> dict[str, Any]:
    if None in field.get("enum", ()) or {"type": "null"} in field.get("anyOf", ()):
        return field
    outer = {key: value for key, value in field.items() if key in _OUTER}
    inner = {key: value for key, value in field.items() if key not in _OUTER}
    return {"anyOf": [inner, {"type": "null"}], **outer}


class StrictObject(Object):
    """One of our own objects: an unknown key is an error."""

    model_config = ConfigDict(extra="forbid")


class Unsupported:
    """Refuses every value except those that ask for nothing, and says so in the schema."""

    def __init__(self, *neutral: object, instead: str = "leave it out") -> None:
        """`instead` says what to do."""
        self._neutral = neutral
        self._instead = instead

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [*self._neutral, None], "description": "Not supported; refused unless it asks for nothing."}

    def _check(self, value: object) -> object:
        # `True == 1` in Python, yet in JSON they ask for different things.
        if any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in self._neutral):
            return value
        raise PydanticCustomError(
            UNSUPPORTED_FIELD, "this field is not supported; {instead}", {"instead": self._instead}
        )


def is_int(value: object) -> bool:
    """True of a JSON number that is whole; JSON's true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_text(text: str) -> str:
    """The text, if an encoding can carry it: JSON can spell half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PydanticCustomError(
            "prompt_text", "is not valid Unicode text: half of a surrogate pair at character {at}", {"at": error.start}
        ) from None
    return text
