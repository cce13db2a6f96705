"""The served checkpoint, as far as requests and answers depend on it."""

from __future__ import annotations

from dataclasses import dataclass

from engine import ModelConfig

from ..chat_template import ChatTemplate
from ..concepts import ConceptCatalogue
from ..errors import ApiError
from ..tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What HTTP needs to know of the served checkpoint."""

    model_id: str
    config: ModelConfig
    tokenizer: Tokenizer
    catalogue: ConceptCatalogue
    chat_template: ChatTemplate | None = None
    """None: the model was not made for conversations."""


def check_model(model: str | None, checkpoint: Checkpoint) -> None:
    """Raise ApiError unless `model` is absent or the served one; a preset of it is none where nothing is generated."""
    if model is not None and model.startswith(f"{checkpoint.model_id}@"):
        message = f"model is {model!r}, and a preset steers what is generated only; send {checkpoint.model_id!r}"
        raise ApiError(400, message, code="invalid_value", param="model")
    if model is not None and model != checkpoint.model_id:
        message = f"no model is called {model!r}; this server has {checkpoint.model_id!r}"
        raise ApiError(404, message, code="model_not_found", param="model")
