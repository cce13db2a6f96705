"""Limits and times of the routing policy."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingSettings:
    """Limits and times of the policy."""

    max_queue: int = 4096
    """Requests that may wait; one more is refused. Returned ones always find a place."""
    max_queue_per_tenant: int | None = None
    """Requests of one tenant that may wait. None: as many as `max_queue`."""
    max_wait_s: float = 10.0
    """A request that has waited so long goes before everything that has not, whatever its priority and tenant. Among
    several such ones tenants take turns."""
    lease_timeout_s: float = 2.0
    """A lease of which its replica has said nothing for so long is counted no longer."""
    replica_timeout_s: float = 3.0
    """A replica that has not reported for so long gets nothing more."""
    release_ahead_s: float = 0.02
    """Requests for a full replica are let go so long before its boundary, for the time they take to get there."""
    prefix_wait_s: float = 0.05
    """A request waits at most so long for a full replica that holds its prefix, though another one has room, and only
    if it is expected to have its first block sooner that way. 0: never."""

    def __post_init__(self) -> None:
        if self.max_queue < 1:
            raise ValueError(f"max_queue is {self.max_queue}; it must be at least 1")
        if self.max_queue_per_tenant is not None and self.max_queue_per_tenant < 1:
            raise ValueError(
                f"max_queue_per_tenant is {self.max_queue_per_tenant}; it must be at least 1, or None for no limit"
            )
        for field in fields(self):
            if field.name.endswith("_s") and not 0 <= getattr(self, field.name) < float("inf"):
                raise ValueError(f"{field.name} is {getattr(self, field.name)}; it must be finite and not negative")
