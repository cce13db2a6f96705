"""Between host and device without waiting: copies that the host starts, and the one place where it waits for one."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor


def to_device(values: list[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new tensor of the device. The copy is only queued, so that the host goes on at once."""
    tensor = torch.tensor(values, dtype=dtype)
    if device.type != "cuda":
        return tensor.to(device)
    # From ordinary memory torch would wait for the device; pinned memory is kept until the copy has been made.
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """A device tensor on its way to the host. Later writes to the tensor do not change what arrives."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._host = tensor.clone()

    def read(self) -> Tensor:
        """What the tensor held; waits until it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


class Stopwatch:
    """Time of a piece of queued work; on a CPU the host's time, as work is done when it is asked for."""

    def __init__(self, device: torch.device) -> None:
        """Starts behind all that was queued before."""
        self._start = self._moment(device)
        self._stop = self._start
        self._device = device

    def stop(self) -> None:
        """Mark the end of the work."""
        self._stop = self._moment(self._device)

    def seconds(self) -> float:
        """How long the work took; waits for its end."""
        if isinstance(self._stop, torch.cuda.Event):
            self._stop.synchronize()
            return float(self._start.elapsed_time(self._stop)) / 1e3
        return float(self._stop - self._start)

    @staticmethod
    def _moment(device: torch.device) -> Any:
        if device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
