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
    num_queued: float,
    oldest_wait_s: float,
    target_lane_use: float,
    max_queue_age_s: float,
) -> int:
    """Replicas with which `target_lane_use` of all lanes would be in use.

    Requests that wait for a lane want one too, but only once the oldest has waited for longer than `max_queue_age_s`:
    a queue that clears within that is what queues are for. Then there is at least one replica more than now.
    """
    if lanes_per_replica <= 0:
        return num_replicas
    is_late = num_queued > 0 and oldest_wait_s > max_queue_age_s
    lanes_wanted = lanes_in_use + (num_queued if is_late else 0)
    wanted = math.ceil(lanes_wanted / (lanes_per_replica * target_lane_use))
    return max(wanted, num_replicas + 1) if is_late else max(wanted, 1)


class LanePolicy:
    """The same for Ray Serve, which adds bounds and delays by itself. A callable autoscaling policy."""

    def __init__(self, target_lane_use: float, max_queue_age_s: float) -> None:
        self._target_lane_use = target_lane_use
        self._max_queue_age_s = max_queue_age_s

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The number of replicas for an AutoscalingContext, and no state."""
        metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        in_use = metrics.get("lanes_in_use") or {}
        if not in_use:
            # Nothing has been heard yet: no reason to change anything.
            return context.target_num_replicas, {}
        lanes = list((metrics.get("lanes") or {}).values())
        wanted = replicas_wanted(
            num_replicas=context.current_num_replicas,
            lanes_in_use=sum(in_use.values()),
            lanes_per_replica=max(lanes, default=0.0),
            # Every replica repeats what the router told it of the one queue.
            num_queued=max((metrics.get("num_queued") or {}).values(), default=0.0),
            oldest_wait_s=max((metrics.get("oldest_wait_s") or {}).values(), default=0.0),
            target_lane_use=self._target_lane_use,
            max_queue_age_s=self._max_queue_age_s,
        )
        return wanted, {}
