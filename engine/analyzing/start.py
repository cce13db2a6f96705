"""Which generator serves which analysis."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from ..analysis import Analysis
from ..errors import Unsupported
from ..runner.model_runner import ModelRunner
from ..scheduling import Scheduler

Slices = Generator[None, None, Any]
"""Does a slice of work each time it is asked on, and returns the analysis's result in the end."""


def start_analysis(analysis: Analysis, runner: ModelRunner, scheduler: Scheduler) -> Slices:
    """The work of an analysis, nothing of it done yet. Raises InvalidRequest for what can never be served."""
    raise Unsupported(f"{type(analysis).__name__} is not served yet")
