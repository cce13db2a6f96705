"""Steering as presets keep it: every concept by its id, every default spelled out, tied to what the ids mean."""

from __future__ import annotations

import hashlib
from typing import Any

from engine import GenerateRequest, check_request

from .errors import ApiError
from .presets import Preset
from .schemas import (
    MAX_INTERVENTIONS,
    CompletionRequest,
    ConceptItem,
    InterventionSpec,
    SteeringSpec,
    SuppressionSpec,
)
from .translation import Checkpoint, _steering, _weights


def fingerprint(checkpoint: Checkpoint) -> str:
    """The same for checkpoints whose concepts and layers a preset may name alike."""
    facts = f"{checkpoint.catalogue.fingerprint} {checkpoint.config.n_layers}"
    return hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()


def resolve(spec: SteeringSpec, checkpoint: Checkpoint) -> dict[str, Any]:
    """What `spec` means for this checkpoint, as a preset keeps it. Raises ApiError or InvalidRequest for what it lacks.

    Labels become ids with names, groups their members, the short form an intervention.
    """
    steering = _steering(CompletionRequest.model_construct(steering=spec), checkpoint)
    check_request(GenerateRequest(prompt_token_ids=(), max_tokens=1, steering=steering), checkpoint.config)
    catalogue, n_layers = checkpoint.catalogue, checkpoint.config.n_layers
    interventions = [
        _intervention(item, checkpoint, f"steering.interventions[{i}]", n_layers // 2)
        for i, item in enumerate(spec.interventions)
    ]
    if spec.concepts is not None and spec.strength is not None:
        short_form = InterventionSpec(
            concepts=spec.concepts, strength=spec.strength, schedule="hard_cutoff", group=spec.group
        )
        interventions.append(_intervention(short_form, checkpoint, "steering", -(-n_layers // 4)))
    suppress = []
    for i, item in enumerate(spec.suppress):
        concept = catalogue.steerable(item.concept, param=f"steering.suppress[{i}].concept")
        suppress.append({"concept": {"id": concept.id, "name": concept.name}, "strength": item.strength})
    return {"interventions": interventions, "suppress": suppress}


def with_preset(own: SteeringSpec, preset: Preset, checkpoint: Checkpoint, *, param: str) -> SteeringSpec:
    """What a request says of steering, and what the preset adds to it; raises ApiError if it is for another checkpoint.

    The request's own come first, so that errors count them as their client does.
    """
    if preset.checkpoint != fingerprint(checkpoint):
        message = (
            f"preset {preset.id} was made for a checkpoint with other concepts or layers than "
            f"{checkpoint.model_id!r}; post it again here"
        )
        raise ApiError(400, message, code="preset_incompatible", param=param)
    interventions = [
        InterventionSpec(
            concepts=[ConceptItem(id=concept["id"], weight=concept["weight"]) for concept in item["concepts"]],
            **{name: item[name] for name in ("strength", "unit", "layer", "schedule", "cutoff_tokens")},
        )
        for item in preset.steering["interventions"]
    ]
    suppress = [
        SuppressionSpec(concept=item["concept"]["id"], strength=item["strength"])
        for item in preset.steering["suppress"]
    ]
    merged = own.model_copy(
        update={
            "interventions": [*own.interventions, *interventions],
            "suppress": [*own.suppress, *suppress],
            "preset": None,
        }
    )
    for name in ("interventions", "suppress"):
        number = len(getattr(merged, name))
        if number > MAX_INTERVENTIONS:
            message = f"steering.{name} and preset {preset.id} hold {number} together; at most {MAX_INTERVENTIONS}"
            raise ApiError(400, message, code="invalid_value", param=f"steering.{name}")
    return merged


def _intervention(spec: InterventionSpec, checkpoint: Checkpoint, path: str, default_layer: int) -> dict[str, Any]:
    weights = _weights(spec.concepts, checkpoint.catalogue, path, with_groups=spec.group)
    return {
        "concepts": [{"id": concept.id, "name": concept.name, "weight": weight} for concept, weight in weights.items()],
        "strength": spec.strength,
        "unit": spec.unit,
        "layer": default_layer if spec.layer is None else spec.layer,
        "schedule": spec.schedule,
        "cutoff_tokens": spec.cutoff_tokens,
    }
