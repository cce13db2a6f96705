"""A server in the command's own process. Apart, since it brings torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from engine import EngineConfig, EngineError

from ..local import local_server
from .api_client import ApiFailure


@contextmanager
def served_here(model: str | None, device: str) -> Iterator[str]:
    """Serve a checkpoint's folder or hub id, None the demo model; yields the URL. Raises ApiFailure if it cannot be."""
    try:
        server = local_server(model, engine=EngineConfig(device=device))
        url = server.__enter__()
    except EngineError as error:
        raise ApiFailure(str(error)) from error
    try:
        yield url
    finally:
        server.__exit__(None, None, None)
