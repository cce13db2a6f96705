"""Keys and values against the models of a whole tree, and everything that is wrong with them at once.

Knows models, dataclasses and the types that hold them; nothing of what they mean.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, Union

from pydantic import BaseModel, ValidationError
from ray.runtime_env import RuntimeEnv

_RUNTIME_ENV: dict[str, Any] = {name: Any for name in RuntimeEnv.known_fields if not name.startswith("_")}


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong, and where."""

    path: str
    """As `applications[0].args.engine.max_rows`; empty for the whole file."""
    message: str
    """The value, why it is wrong, and the way out."""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


def known_part(value: Any, annotation: Any, path: str, faults: list[Fault]) -> Any:
    """`value` without the keys that its type does not know; each becomes a fault.

    Ray declares some levels as "a dictionary or this model", where pydantic takes the dictionary unread; the model
    is what we look at.
    """
    alternatives = list(_alternatives(annotation))
    if isinstance(value, Mapping):
        for fields in filter(None, map(_fields, alternatives)):
            return _kept(value, fields, path, faults)
        for alternative in alternatives:
            if typing.get_origin(alternative) is dict and typing.get_args(alternative):
                inner = typing.get_args(alternative)[1]
                return {key: known_part(item, inner, f"{path}.{key}", faults) for key, item in value.items()}
    if isinstance(value, list):
        for alternative in alternatives:
            if typing.get_origin(alternative) in (list, tuple) and typing.get_args(alternative):
                inner = typing.get_args(alternative)[0]
                return [known_part(item, inner, f"{path}[{index}]", faults) for index, item in enumerate(value)]
    return value


_SECRET = ("password", "secret", "token")
"""In the name of a key whose value is nobody's to read."""


def _kept(value: Mapping[Any, Any], fields: Mapping[str, Any], path: str, faults: list[Fault]) -> Any:
    kept: dict[str, Any] = {}
    for key, item in value.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in fields:
            is_secret = any(word in str(key).lower() for word in _SECRET)
            shown = "" if is_secret else f" (value {show(item)})"
            faults.append(Fault(where, f"unknown key{shown}{way(str(key), fields)}"))
        elif key == "runtime_env" and isinstance(item, Mapping):
            # Ray types it as a dictionary and warns of unknown keys in a log.
            kept[key] = _kept(item, _RUNTIME_ENV, where, faults)
        else:
            kept[key] = known_part(item, fields[key], where, faults)
    return kept


def _alternatives(annotation: Any) -> Iterator[Any]:
    """The types that a union stands for, without what pydantic adds to them."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        yield from _alternatives(typing.get_args(annotation)[0])
    elif origin is Union or origin is types.UnionType:
        for member in typing.get_args(annotation):
            yield from _alternatives(member)
    else:
        yield annotation


def _fields(annotation: Any) -> dict[str, Any] | None:
    """Names and types of the fields, if this is a model or a dataclass."""
    if not isinstance(annotation, type):
        return None
    if issubclass(annotation, BaseModel):
        return {field.alias or name: field.annotation for name, field in annotation.model_fields.items()}
    if dataclasses.is_dataclass(annotation):
        return typing.get_type_hints(annotation)
    return None


def refusals(model: type[BaseModel], value: Any, path: str) -> list[Fault]:
    """What a model says against a value; an empty list if nothing."""
    try:
        model.model_validate(value)
    except ValidationError as error:
        return [
            Fault(_join(path, each["loc"]), f"is {show(each['input'])}: {each['msg'].removeprefix('Value error, ')}")
            for each in error.errors(include_url=False)
        ]
    except (TypeError, NotImplementedError) as error:
        # pydantic lets these through from Ray's validators.
        return [Fault(path, str(error))]
    return []


def _join(path: str, location: Iterable[str | int]) -> str:
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.removeprefix(".")


def show(value: Any) -> str:
    """A value as a message shows it, at most 80 characters of it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def way(wrong: str, known: Iterable[str]) -> str:
    """The nearest known name, or else all of them."""
    names = sorted(known)
    near = get_close_matches(wrong, names, n=1)
    return f"; did you mean {near[0]}?" if near else f"; known are {', '.join(names)}"
