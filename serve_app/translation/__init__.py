"""From a request as JSON spells it to the engine's: text to ids, names to concepts, defaults to values."""

from .checkpoint import Checkpoint, check_model
from .jobs import ChoiceJob, make_jobs, turns_of
from .steering import steering_params, summed_weights

__all__ = [
    "Checkpoint",
    "ChoiceJob",
    "check_model",
    "make_jobs",
    "steering_params",
    "summed_weights",
    "turns_of",
]
