"""A torch profiler trace of some engine steps, for chrome://tracing or Perfetto."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

logger = logging.getLogger(__name__)


class StepProfiler:
    """Traces `num_steps` steps after the first `num_skipped`, then writes one file and is done.

    The file bears the process's number, because several replicas may share a folder.
    """

    def __init__(self, directory: str | Path, num_steps: int, num_skipped: int = 0) -> None:
        self._directory = Path(directory)
        self._first, self._last = num_skipped, num_skipped + num_steps - 1
        self._number = 0
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self._profile = profile(activities=activities)
        logger.info("will trace steps %d to %d into %s", self._first, self._last, self._directory)

    @property
    def is_done(self) -> bool:
        """True once the trace has been written."""
        return self._number > self._last

    @contextmanager
    def step(self) -> Iterator[None]:
        """One engine step happens in here."""
        if self._number == self._first:
            self._profile.start()
        is_traced = self._first <= self._number <= self._last
        try:
            if is_traced:
                with torch.profiler.record_function(f"engine step {self._number}"):
                    yield
            else:
                yield
        finally:
            if self._number == self._last:
                self._write()
            self._number += 1

    def _write(self) -> None:
        self._profile.stop()
        self._directory.mkdir(parents=True, exist_ok=True)
        file = self._directory / f"steps-{self._first}-{self._last}-{os.getpid()}.json"
        self._profile.export_chrome_trace(str(file))
        logger.info("wrote %s", file)
