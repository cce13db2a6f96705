"""The router's policy: events in, decisions out.

No Ray, no clock, no waiting: the caller brings the time and does what the decisions say, so the same code runs in the
router, in a simulator and in tests that take milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from .messages import Decision, RouterEvent


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingSettings:
    """Limits and times of the policy."""

    max_queue: int = 4096
    """Requests that may wait; one more is refused."""
    max_queue_per_tenant: int | None = None
    """Requests of one tenant that may wait. None: as many as `max_queue`."""
    max_wait_s: float = 10.0
    """A request that has waited so long goes before everything that has not, whatever its priority and tenant."""
    lease_timeout_s: float = 2.0
    """A lease of which its replica has said nothing for so long is counted no longer."""
    replica_timeout_s: float = 3.0
    """A replica that has not reported for so long gets nothing more."""
    release_ahead_s: float = 0.02
    """Requests for a full replica are let go so long before its boundary, for the time they take to get there."""


class RoutingPolicy:
    """Keeps the waiting requests and what is known of each replica; binds one to the other as late as it may."""

    def __init__(self, settings: RoutingSettings | None = None) -> None:
        self.settings = settings or RoutingSettings()

    def handle(self, event: RouterEvent | None, now_s: float) -> list[Decision]:
        """Take in what happened, None for nothing but the passing of time, and decide what can be decided.

        `now_s` never falls. Every submitted request gets exactly one Assigned or Rejected, or is withdrawn.
        """
        raise NotImplementedError

    def next_wake_s(self) -> float | None:
        """When `handle` should be called again though nothing happened; None: no earlier than the next event."""
        raise NotImplementedError
