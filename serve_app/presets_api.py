"""Steering presets over HTTP: post a version, list, look up, delete."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from .errors import ApiError
from .preset_steering import fingerprint, resolve
from .presets import NAME_PATTERN, Preset, PresetStore
from .schemas import Object, SteeringSpec, check_text
from .schemas.answers import Answer
from .service import Service, api_errors, service_of

router = APIRouter(tags=["presets"])

MAX_DESCRIPTION = 2000


def _check_not_empty(spec: SteeringSpec) -> SteeringSpec:
    if spec.preset is not None:
        raise PydanticCustomError(
            "nested_preset", "a preset holds no other; spell out what it does", {"field": "preset"}
        )
    if not (spec.concepts or spec.interventions or spec.suppress or spec.overrides):
        raise PydanticCustomError("empty_steering", "steers by nothing; name concepts, interventions or suppress")
    return spec


class PresetRequest(Object):
    """Body of POST /v1/steering/presets."""

    name: str = Field(pattern=f"^{NAME_PATTERN}$")
    """Letters, digits, `.`, `_` and `-`; it begins with a letter or a digit."""
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION), AfterValidator(check_text)] = ""
    steering: Annotated[SteeringSpec, AfterValidator(_check_not_empty)]
    """As in a request; labels are resolved now."""


class PresetConcept(Answer):
    """A concept as it was resolved."""

    id: int
    name: str | None


class PresetWeight(PresetConcept):
    """One concept of an intervention."""

    weight: float


class PresetIntervention(Answer):
    """An intervention with everything spelled out."""

    concepts: list[PresetWeight]
    strength: float
    unit: Literal["logits", "raw"]
    layer: int
    schedule: Literal["fixed", "hard_cutoff"]
    cutoff_tokens: int


class PresetSuppression(Answer):
    """A suppression with its concept."""

    concept: PresetConcept
    strength: float


class PresetOverride(Answer):
    """An override with its concept."""

    concept: PresetConcept
    weight: float


class PresetSteering(Answer):
    """What a preset does."""

    interventions: list[PresetIntervention]
    suppress: list[PresetSuppression]
    overrides: list[PresetOverride]
    override_mode: Literal["delta", "reference"]
    """Of `overrides`, if there are some."""


class PresetAnswer(Answer):
    """One version of a preset."""

    id: str
    """`name@version`: what `steering.preset` names in a request."""
    object: Literal["steering.preset"]
    name: str
    version: int
    fingerprint: str
    """The same for the same content."""
    description: str
    steering: PresetSteering
    created: int
    is_compatible: bool
    """Whether it was made for the concepts and layers of the served checkpoint."""


class PresetWithVersions(PresetAnswer):
    """One version, and which others there are."""

    versions: list[int]


class PresetList(Answer):
    """Latest versions, by name."""

    object: Literal["list"]
    data: list[PresetWithVersions]
    total: int
    limit: int
    offset: int
    has_more: bool


class DeletedPreset(Answer):
    """What was deleted."""

    id: str
    object: Literal["steering.preset.deleted"]
    deleted: bool
    versions: list[int]


PresetId = Annotated[str, Path(max_length=100, description="`name`, or `name@version`.")]
Version = Annotated[int | None, Query(ge=1, le=10**9, description="Another way to name a version.")]


@router.post("/v1/steering/presets", response_model=PresetAnswer)
async def create_preset(request: Request, body: PresetRequest) -> dict[str, Any]:
    """Keep steering under a name: as a new version, unless one of the name's versions has this content already."""
    service = service_of(request)
    store, checkpoint = _store(service), service.checkpoint
    with api_errors():
        steering = resolve(body.steering, checkpoint)
    preset = await asyncio.to_thread(store.add, body.name, body.description, steering, fingerprint(checkpoint))
    return _shown(preset, service)


@router.get("/v1/steering/presets", response_model=PresetList)
async def list_presets(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    offset: Annotated[int, Query(ge=0)] = 0,
) -> dict[str, Any]:
    """The latest version of each preset, by name, page by page."""
    service = service_of(request)
    store = _store(service)

    def read() -> tuple[int, list[list[Preset]]]:
        names = store.names()
        return len(names), [versions for name in names[offset : offset + limit] if (versions := store.versions(name))]

    total, page = await asyncio.to_thread(read)
    return {
        "object": "list",
        "data": [_with_versions(versions[-1], versions, service) for versions in page],
        "total": total,
        "limit": limit,
        "offset": offset,
        "has_more": offset + limit < total,
    }


@router.get("/v1/steering/presets/{preset_id}", response_model=PresetWithVersions)
async def get_preset(request: Request, preset_id: PresetId, version: Version = None) -> dict[str, Any]:
    """One version, or the latest of a name."""
    service = service_of(request)
    store = _store(service)

    def read() -> tuple[Preset, list[Preset]]:
        preset = store.get(_named(preset_id, version), param="preset_id")
        return preset, store.versions(preset.name)

    preset, versions = await asyncio.to_thread(read)
    return _with_versions(preset, versions, service)


@router.delete("/v1/steering/presets/{preset_id}", response_model=DeletedPreset)
async def delete_preset(request: Request, preset_id: PresetId, version: Version = None) -> dict[str, Any]:
    """Delete one version, or a name with all its versions; their numbers are never given again."""
    store, named = _store(service_of(request)), _named(preset_id, version)
    deleted = await asyncio.to_thread(store.delete, named, param="preset_id")
    return {"id": named, "object": "steering.preset.deleted", "deleted": True, "versions": deleted}


def _store(service: Service) -> PresetStore:
    if service.presets is None:
        raise ApiError(404, "this server keeps no presets", code="preset_not_found")
    return service.presets


def _named(preset_id: str, version: int | None) -> str:
    if version is None:
        return preset_id
    if "@" in preset_id:
        message = f"the path names {preset_id!r} and the query version {version}; name the version once"
        raise ApiError(400, message, code="invalid_value", param="version")
    return f"{preset_id}@{version}"


def _shown(preset: Preset, service: Service) -> dict[str, Any]:
    return {
        "id": preset.id,
        "object": "steering.preset",
        "name": preset.name,
        "version": preset.version,
        "fingerprint": preset.fingerprint,
        "description": preset.description,
        "steering": preset.steering,
        "created": preset.created,
        "is_compatible": preset.checkpoint == fingerprint(service.checkpoint),
    }


def _with_versions(preset: Preset, versions: list[Preset], service: Service) -> dict[str, Any]:
    return {**_shown(preset, service), "versions": [each.version for each in versions]}
