"""A server in the command's own process. Apart, since it brings torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from engine import EngineConfig, EngineError

from ..local import local_server
from .api_client import ApiFailure


@contextmanager
def served_here(model: str | None, device: str, progress: Callable[[int, int], None]) -> Iterator[str]:
    """Serve a checkpoint's folder or hub id, None the demo model; yields the URL.

    `progress` is told bytes of weights read and in all. Raises ApiFailure if it cannot be served.
    """
    with ExitStack() as stack:
        try:
            url = stack.enter_context(local_server(model, engine=EngineConfig(device=device), progress=progress))
        except EngineError as error:
            raise ApiFailure(str(error)) from error
        yield url
