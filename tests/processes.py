"""What tests need that start processes: a port for them, and patience."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

DEADLINE_S = 90.0
"""Long enough for a busy machine to start processes; only a failure takes it."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 on which nobody listens yet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def eventually(check: Callable[[], bool]) -> bool:
    """Whether `check` comes true before the deadline."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        if check():
            return True
        time.sleep(0.1)
    return False
