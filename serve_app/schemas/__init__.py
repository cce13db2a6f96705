"""Requests as JSON spells them.

Top-level fields that nobody knows are tolerated, since ordinary clients send some; unknown keys inside our own objects
are errors. `null` means unset everywhere. A field that exists in the APIs we speak and would change the answer, but is
not served, is refused by name unless it holds the value that asks for nothing.
"""

from .base import Object, StrictObject, Unsupported, check_text, is_int
from .chat import MAX_MESSAGES, ChatRequest, Message
from .completion import CompletionRequest, Prompt, check_prompt
from .generate import (
    DEFAULT_MAX_TOKENS,
    MAX_CHOICES,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    DiffusionSpec,
    GenerateFields,
    StreamOptions,
)
from .steering import (
    MAX_INTERVENTIONS,
    MAX_STEERED_CONCEPTS,
    MAX_STRENGTH,
    AttributionSpec,
    ConceptItem,
    ConceptName,
    InterventionSpec,
    OverrideSpec,
    SteeringSpec,
    SuppressionSpec,
)

__all__ = [
    "DEFAULT_MAX_TOKENS",
    "MAX_CHOICES",
    "MAX_INTERVENTIONS",
    "MAX_MESSAGES",
    "MAX_STEERED_CONCEPTS",
    "MAX_STOP_LENGTH",
    "MAX_STOP_STRINGS",
    "MAX_STRENGTH",
    "AttributionSpec",
    "ChatRequest",
    "CompletionRequest",
    "ConceptItem",
    "ConceptName",
    "DiffusionSpec",
    "GenerateFields",
    "InterventionSpec",
    "Message",
    "Object",
    "OverrideSpec",
    "Prompt",
    "SteeringSpec",
    "StreamOptions",
    "StrictObject",
    "SuppressionSpec",
    "Unsupported",
    "check_prompt",
    "check_text",
    "is_int",
]
