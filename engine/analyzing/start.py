"""Which generator serves which analysis."""

from __future__ import annotations

from ..analysis import (
    Analysis,
    AttributeInputs,
    EmbedTokens,
    EstimateLikelihood,
    InspectTokens,
    ReplayTrace,
    ScoreTokens,
)
from ..checks import shown
from ..errors import InvalidValue
from ..runner.model_runner import ModelRunner
from ..scheduling import Scheduler
from .embed import start_embedding
from .input_attribution import attribute_inputs
from .inspect import start_inspection
from .likelihood import start_likelihood
from .replaying import replay_trace
from .score import start_scores
from .score_cache import ScoreCache
from .texts import Slices, Tools


def start_analysis(analysis: Analysis, runner: ModelRunner, scheduler: Scheduler, score_cache: ScoreCache) -> Slices:
    """The work of an analysis, nothing of it done yet. Raises InvalidRequest for what can never be served."""
    tools = Tools(runner.text_passes, scheduler.lending, score_cache)
    match analysis:
        case ScoreTokens():
            return start_scores(analysis, tools)
        case EstimateLikelihood():
            return start_likelihood(analysis, tools)
        case EmbedTokens():
            return start_embedding(analysis, tools)
        case InspectTokens():
            return start_inspection(analysis, tools)
        case AttributeInputs():
            return attribute_inputs(analysis, runner)
        case ReplayTrace():
            return replay_trace(analysis, runner)
        case _:
            raise InvalidValue(f"the analysis is {shown(analysis)}; it must be one of those that engine.Analysis names")
