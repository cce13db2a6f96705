"""Calls of replicas that are answered once and change nothing there, so that each may be made again elsewhere."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle

from engine import EngineStopped, Recorder

from .config import IngressSettings
from .errors import SERVER_ERROR, ApiError

logger = logging.getLogger("ray.serve")

REPLICA_LOST: tuple[type[Exception], ...] = (RayActorError, ReplicaUnavailableError, EngineStopped, TimeoutError)
"""What a call to a replica ends with that died, left, or does not answer."""
_PAUSE_S = 0.02
"""Before another replica is asked, and longer each time."""


class ReplicaCalls:
    """Asks one of the replicas, and another one where that is lost."""

    def __init__(self, engine: DeploymentHandle[Any], settings: IngressSettings, recorder: Recorder) -> None:
        self._engine = engine
        self._settings = settings
        self._recorder = recorder

    async def ask(self, method: str, *arguments: Any) -> Any:
        """What a replica answers. Raises what it raises, and ApiError 504 if none has answered in time.

        Cancelling this ends the call.
        """
        limit_s = self._settings.analysis_timeout_s
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                return await self._ask(method, arguments)
        except TimeoutError as error:
            if limit.expired():
                message = f"no replica has answered within {limit_s:g} s; ask for less, or try again later"
                raise ApiError(504, message, code="analysis_timeout", type=SERVER_ERROR) from error
            raise

    async def _ask(self, method: str, arguments: tuple[Any, ...]) -> Any:
        for num_tries in range(1, self._settings.max_tries + 1):
            response = getattr(self._engine, method).remote(*arguments)
            is_answered = False
            try:
                answer = await response
                is_answered = True
                return answer
            except REPLICA_LOST as error:
                if num_tries == self._settings.max_tries:
                    raise
                logger.warning("%s: a replica is lost (%r); asking another", method, error)
                self._recorder.count("ingress_retries")
            finally:
                if not is_answered:
                    # Or the replica would go on for nobody.
                    response.cancel()
            await asyncio.sleep(_PAUSE_S * num_tries)
        raise AssertionError("the last try returns or raises")
