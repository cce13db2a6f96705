"""When requests are sent: as others end, or at moments of their own."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from .client import Answer

Body = dict[str, Any]
Send = Callable[[Body, float], Awaitable[Answer]]
"""(body, moment at which it was due) -> the answer."""


def arrivals(rate_per_s: float, seconds: float, seed: int = 0) -> list[float]:
    """Moments of a Poisson process from 0 up to `seconds`; the same arguments give the same."""
    drawn, moments, moment = random.Random(seed), [], 0.0
    while (moment := moment + drawn.expovariate(rate_per_s)) < seconds:
        moments.append(moment)
    return moments


async def closed_loop(
    send: Send,
    bodies: Iterator[Body],
    *,
    num_clients: int,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[Answer]:
    """Each client sends its next request when its last one has ended; none begins after `seconds`.

    A client whose request was refused at once does not send again at once: it would ask nothing but to be refused.
    """
    end = clock() + seconds
    answers: list[Answer] = []

    async def one() -> None:
        while (now := clock()) < end:
            body = next(bodies, None)
            if body is None:
                return
            answers.append(answer := await send(body, now))
            if answer.status != 200:
                await asyncio.sleep(0.1)

    await asyncio.gather(*(one() for _ in range(num_clients)))
    return answers


async def open_loop(
    send: Send,
    bodies: Iterator[Body],
    moments: list[float],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> list[Answer]:
    """One request at each of `moments` after now, however long the answers take. Late sending counts as waiting."""
    begin = clock()
    sent: list[asyncio.Future[Answer]] = []
    for moment, body in zip(moments, bodies, strict=False):
        due = begin + moment
        if (wait := due - clock()) > 0:
            await sleep(wait)
        sent.append(asyncio.ensure_future(send(body, due)))
    return list(await asyncio.gather(*sent))
