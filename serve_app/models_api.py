"""GET /v1/models: the served model, alone and with each preset, for clients that can choose nothing but a model."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from fastapi import APIRouter, Request

from .preset_steering import fingerprint, split_model
from .schemas.answers import Answer
from .service import Service, service_of
from .translation import check_model

router = APIRouter(tags=["models"])


class Model(Answer):
    """One model, or the model with a preset."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Answer):
    """Answer of GET /v1/models."""

    object: Literal["list"]
    data: list[Model]


@router.get("/v1/models", response_model=ModelList)
async def list_models(request: Request) -> dict[str, Any]:
    """The model served, and it with the latest version of each preset that it can use."""
    service = service_of(request)
    presets = await asyncio.to_thread(_usable_presets, service)
    return {"object": "list", "data": [_model(service), *(_model(service, name) for name in presets)]}


@router.get("/v1/models/{model:path}", response_model=Model)
async def get_model(request: Request, model: str) -> dict[str, Any]:
    """One model, with a preset or a version of it where the id names one."""
    service = service_of(request)
    base, preset_id = split_model(model, service.checkpoint.model_id)
    check_model(base, service.checkpoint)
    if preset_id is None or service.presets is None:
        check_model(model, service.checkpoint)
        return _model(service)
    await asyncio.to_thread(service.presets.get, preset_id, param="model")
    return _model(service, preset_id)


def _usable_presets(service: Service) -> list[str]:
    """Names whose latest version was made for this checkpoint."""
    if service.presets is None:
        return []
    own = fingerprint(service.checkpoint)
    latest = ((name, service.presets.versions(name)) for name in service.presets.names())
    return [name for name, versions in latest if versions and versions[-1].checkpoint == own]


def _model(service: Service, preset_id: str | None = None) -> dict[str, Any]:
    checkpoint = service.checkpoint
    return {
        "id": checkpoint.model_id if preset_id is None else f"{checkpoint.model_id}@{preset_id}",
        "object": "model",
        "created": service.created,
        "owned_by": "glassblock",
        "max_model_len": checkpoint.config.block_size,
    }
