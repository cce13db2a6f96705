"""What the router is told and asked beside all requests: who left, which replicas are lost, and whether it is back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextvars import Context
from typing import Any

from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle

from .config import IngressSettings
from .lease_messages import RefusalReason, Returned
from .routing.messages import Lease

logger = logging.getLogger("ray.serve")

ROUTER_LOST: tuple[type[Exception], ...] = (
    RayActorError,
    RayTaskError,
    ReplicaUnavailableError,
    DeploymentUnavailableError,
    BackPressureError,
    TimeoutError,
)
"""What a call to the router ends with that died, left, or does not answer; a defect of its own counts as
its death, since requests can do without it."""


class RouterNotes:
    """Tells the router what it would find out by itself, later. Nobody waits for it, and what fails is let be."""

    def __init__(self, router: DeploymentHandle[Any] | None, settings: IngressSettings) -> None:
        """Without a `router` nobody is told anything."""
        self._router = router
        self._settings = settings
        self._search: asyncio.Task[None] | None = None
        """Runs while the router is away."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._withdrawn: list[str] = []

    @property
    def is_router_away(self) -> bool:
        """Whether it did not answer, and has not answered since."""
        return self._search is not None and not self._search.done()

    def lost(self, replica_id: str, lease: Lease | None) -> None:
        """A replica is lost, and with it the lease, if there was one. Unnamed and without a lease it is not known."""
        if lease is not None:
            self._note(Returned(lease.lease_id, lease.replica_id, RefusalReason.LOST))
        elif replica_id:
            self._note(replica_id)

    def withdraw(self, request_id: str) -> None:
        """Have the router free what a request has there whose client has left; it would keep a lease until that
        times out. Of many that leave together it is told in few messages."""
        if self._router is not None:
            self._withdrawn.append(request_id)
            if len(self._withdrawn) == 1:
                self._note(None)

    def find_router(self, error: Exception) -> None:
        """It cannot be reached: ask for it until it answers, so that no request has to find out."""
        if not self.is_router_away:
            logger.warning("the router cannot be reached (%r); choosing replicas without it", error)
            self._search = _in_nobodys_name(self._find())

    async def settled(self) -> None:
        """Wait until what was to be told has been told, or has failed."""
        await asyncio.gather(*self._tasks)

    async def _find(self) -> None:
        assert self._router is not None
        while True:
            await asyncio.sleep(self._settings.router_retry_s)
            response = self._router.ping.remote()
            try:
                async with asyncio.timeout(self._settings.router_timeout_s):
                    await response
                break
            except ROUTER_LOST:
                continue
            finally:
                response.cancel()  # type: ignore[no-untyped-call]
        logger.info("the router is back")

    def _note(self, news: Returned | str | None) -> None:
        """Tell what became of a lease, which replica is gone, or, with None, who left."""
        router = self._router
        if router is None:
            return

        async def tell() -> None:
            try:
                async with asyncio.timeout(self._settings.router_timeout_s):
                    if isinstance(news, Returned):
                        await router.give_back.remote(news)
                    elif news is not None:
                        await router.gone.remote(news)
                    else:
                        withdrawn, self._withdrawn = tuple(self._withdrawn), []
                        await router.withdraw.remote(withdrawn)
            except ROUTER_LOST as error:
                logger.info("the router was not told what became of a lease or a replica: %r", error)

        task = _in_nobodys_name(tell())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _in_nobodys_name(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task whose calls are no part of the request that began it: Serve would cancel them together with it."""
    return asyncio.get_running_loop().create_task(work, context=Context())
