"""Is it alive, what does it do now, what can it do: routes for probes, operators and clients that adapt."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from . import __version__
from .capabilities import Capabilities, capabilities
from .schemas.answers import Answer
from .service import answer_of, service_of

router = APIRouter(tags=["operations"])


class Status(Answer):
    """Answer of GET /health and GET /ready."""

    status: Literal["ok", "ready"]


class Version(Answer):
    """Answer of GET /version."""

    version: str
    model: str


class ReplicaUse(Answer):
    """What one engine replica uses now."""

    id: str
    """As Serve names it; empty where only one of several answered."""
    lanes: int
    lanes_in_use: int
    pages: int
    pages_free: int
    """Free, and kept for prefixes only as long as nobody needs them."""
    num_waiting: int
    """Requests that it has taken and not yet begun."""


class Load(Answer):
    """Answer of GET /load: sums over replicas, and each of them."""

    server_load: int
    """HTTP requests that this ingress process is answering, this one not counted."""
    num_replicas: int
    lanes: int
    lanes_in_use: int
    pages: int
    pages_free: int
    num_queued: int
    """Requests that wait in the router and, taken but not yet begun, in replicas."""
    oldest_wait_s: float
    is_complete: bool
    """False while the router cannot be asked: then one replica has answered for itself."""
    replicas: list[ReplicaUse]


@router.get("/health", response_model=Status)
@router.head("/health", include_in_schema=False)
async def get_health() -> dict[str, str]:
    """The HTTP side is alive."""
    return {"status": "ok"}


@router.get("/ready", response_model=Status)
@router.head("/ready", include_in_schema=False)
async def get_ready(request: Request) -> dict[str, str]:
    """An engine has loaded its checkpoint, has generated something and answers; otherwise a 503."""
    await answer_of(request, service_of(request).client.check_ready())
    return {"status": "ready"}


@router.get("/version", response_model=Version)
@router.head("/version", include_in_schema=False)
async def get_version(request: Request) -> dict[str, str]:
    """Version of the server and name of its model."""
    return {"version": __version__, "model": service_of(request).checkpoint.model_id}


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus text."}},
)
@router.head("/metrics", include_in_schema=False)
async def get_metrics(request: Request) -> Response:
    """What this ingress process has measured, for Prometheus; Ray's own port has that and the engines'."""
    text, media_type = service_of(request).metrics.render(request.headers.get("accept", ""))
    return Response(text, headers={"content-type": media_type})


@router.get("/load", response_model=Load)
async def get_load(request: Request) -> dict[str, Any]:
    """What is in use now, of all replicas as the router hears from them at block boundaries."""
    service = service_of(request)
    load = await answer_of(request, service.client.load())
    replicas = [
        {
            "id": each.replica_id,
            "lanes": each.num_lanes,
            "lanes_in_use": each.num_lanes - each.num_lanes_free,
            "pages": each.num_pages,
            "pages_free": each.num_pages_free,
            "num_waiting": each.num_waiting,
        }
        for each in load.replicas
    ]
    return {
        "server_load": max(int(service.metrics.value("ingress_open_requests")) - 1, 0),
        "num_replicas": len(replicas),
        "lanes": sum(each.num_lanes for each in load.replicas),
        "lanes_in_use": sum(each.num_lanes - each.num_lanes_free for each in load.replicas),
        "pages": sum(each.num_pages for each in load.replicas),
        "pages_free": sum(each.num_pages_free for each in load.replicas),
        "num_queued": load.num_queued + sum(each.num_waiting for each in load.replicas),
        "oldest_wait_s": round(load.oldest_wait_s, 3),
        "is_complete": load.is_complete,
        "replicas": replicas,
    }


@router.get("/v1/capabilities", response_model=Capabilities)
async def get_capabilities(request: Request) -> dict[str, Any]:
    """What this server and its checkpoint can do, and the limits of a request."""
    service = service_of(request)
    return capabilities(service.checkpoint, service.limits, has_presets=service.presets is not None)
