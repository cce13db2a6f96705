"""Which generator serves which analysis."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from ..analysis import Analysis, AttributeInputs, ReplayTrace
from ..errors import Unsupported
from ..runner.model_runner import ModelRunner
from ..scheduling import Scheduler
from .input_attribution import attribute_inputs
from .replaying import replay_trace

Slices = Generator[None, None, Any]
"""Does a slice of work each time it is asked on, and returns the analysis's result in the end."""


def start_analysis(analysis: Analysis, runner: ModelRunner, scheduler: Scheduler) -> Slices:
    """The work of an analysis, nothing of it done yet. Raises InvalidRequest for what can never be served."""
    match analysis:
        case AttributeInputs():
            return attribute_inputs(analysis, runner)
        case ReplayTrace():
            return replay_trace(analysis, runner)
        case _:
            raise Unsupported(f"{type(analysis).__name__} is not served yet")
