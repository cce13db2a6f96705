"""Where a checkpoint is: a folder on this machine, or the hub's copy of one."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from engine import CheckpointError, ModelConfig

from .chat_template import TEMPLATE_FILE, ChatTemplate
from .concepts import LABELS_FILE, ConceptCatalogue
from .tokenizer import Tokenizer
from .translation import Checkpoint

_DESCRIPTION_FILES = ["*.json", LABELS_FILE, TEMPLATE_FILE]
_WEIGHT_FILES = ["*.safetensors"]


def locate(model: str, revision: str | None, *, with_weights: bool) -> Path:
    """The folder that holds `model`: itself, or a hub id's files, downloaded where they are not here yet.

    Works offline for what was downloaded before. Raises CheckpointError if it is neither.
    """
    if Path(model).is_dir():
        return Path(model)
    patterns = _DESCRIPTION_FILES + (_WEIGHT_FILES if with_weights else [])
    try:
        return Path(huggingface_hub.snapshot_download(model, revision=revision, allow_patterns=patterns))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise CheckpointError(f"model {model!r} is no folder here and the hub does not give it: {error}") from error


def describe(folder: Path, model_id: str) -> Checkpoint:
    """What HTTP needs of the checkpoint in `folder`, without its weights."""
    config = ModelConfig.from_json(folder)
    tokenizer = Tokenizer.from_checkpoint(folder, config)
    return Checkpoint(
        model_id=model_id,
        config=config,
        tokenizer=tokenizer,
        chat_template=ChatTemplate.from_checkpoint(folder, config, tokenizer),
        catalogue=ConceptCatalogue.from_checkpoint(folder, config),
    )
