"""From a request as JSON spells it to the engine's: text to ids, names to concepts, defaults to values."""

from .checkpoint import Checkpoint, check_model
from .jobs import ChoiceJob, encode_messages, end_token_ids, make_jobs, wanted_steering
from .steering import steering_params, summed_weights

__all__ = [
    "Checkpoint",
    "ChoiceJob",
    "check_model",
    "encode_messages",
    "end_token_ids",
    "make_jobs",
    "steering_params",
    "summed_weights",
    "wanted_steering",
]
