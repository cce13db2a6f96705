"""How many engine replicas there should be: by lanes in use and by how long requests wait in the router.

Standard library only, and no imports of our own: Ray's controller runs this, pickled by value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def replicas_wanted(
    *,
    num_replicas: int,
    lanes_in_use: float,
    lanes_per_replica: float,
    lanes_queued: float,
    oldest_wait_s: float,
    target_lane_use: float,
    max_queue_age_s: float,
) -> int:
    """Replicas with which `target_lane_use` of all lanes would be in use.

    The lanes that waiting requests want count too, but only once the oldest has waited for longer than
    `max_queue_age_s`: a queue that clears within that is what queues are for. Then there is at least one replica more
    than now.
    """
    if lanes_per_replica <= 0:
        return num_replicas
    is_late = lanes_queued > 0 and oldest_wait_s > max_queue_age_s
    lanes_wanted = lanes_in_use + (lanes_queued if is_late else 0)
    wanted = math.ceil(lanes_wanted / (lanes_per_replica * target_lane_use))
    return max(wanted, num_replicas + 1) if is_late else max(wanted, 1)


class LanePolicy:
    """The same for Ray Serve, which adds bounds and delays by itself. A callable autoscaling policy."""

    def __init__(self, target_lane_use: float, max_queue_age_s: float) -> None:
        self._target_lane_use = target_lane_use
        self._max_queue_age_s = max_queue_age_s

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The number of replicas for an AutoscalingContext, and no state."""
        metrics: Mapping[str, Mapping[Any, float | None]] = context.aggregated_metrics or {}

        def numbers(name: str) -> list[float]:
            # What raises here stops all scaling, and one replica's nonsense is no reason for that.
            values = (metrics.get(name) or {}).values()
            return [value for value in values if value is not None and math.isfinite(value)]

        in_use = numbers("lanes_in_use")
        if not in_use:
            # Nothing has been heard yet: no reason to change anything.
            return context.target_num_replicas, {}
        wanted = replicas_wanted(
            num_replicas=context.current_num_replicas,
            lanes_in_use=sum(in_use),
            lanes_per_replica=max(numbers("lanes"), default=0.0),
            # Every replica repeats what the router told it of the one queue.
            lanes_queued=max(numbers("lanes_queued"), default=0.0),
            oldest_wait_s=max(numbers("oldest_wait_s"), default=0.0),
            target_lane_use=self._target_lane_use,
            max_queue_age_s=self._max_queue_age_s,
        )
        return wanted, {}
