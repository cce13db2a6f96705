"""Steering as presets keep it: every concept by its id, every default spelled out, tied to what the ids mean."""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

from engine import GenerateRequest, check_request, limits

from .errors import ApiError
from .presets import Preset, PresetStore
from .schemas import (
    MAX_INTERVENTIONS,
    ConceptItem,
    GenerateFields,
    InterventionSpec,
    OverrideSpec,
    SteeringSpec,
    SuppressionSpec,
)
from .translation import Checkpoint, steering_params, summed_weights

Fields = TypeVar("Fields", bound=GenerateFields)
_LIMITS = {"interventions": MAX_INTERVENTIONS, "suppress": MAX_INTERVENTIONS, "overrides": limits.MAX_OVERRIDES}


def fingerprint(checkpoint: Checkpoint) -> str:
    """The same for checkpoints whose concepts and layers a preset may name alike."""
    facts = f"{checkpoint.catalogue.fingerprint} {checkpoint.config.n_layers}"
    return hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()


def resolve(spec: SteeringSpec, checkpoint: Checkpoint) -> dict[str, Any]:
    """What `spec` means for this checkpoint, as a preset keeps it. Raises ApiError or InvalidRequest for what it lacks.

    Labels become ids with names, groups their members, the short form an intervention.
    """
    steering = steering_params(spec, checkpoint.catalogue, num_layers=checkpoint.config.n_layers)
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
    overrides = []
    for i, override in enumerate(spec.overrides):
        concept = catalogue.find(override.concept, param=f"steering.overrides[{i}].concept")
        overrides.append({"concept": {"id": concept.id, "name": concept.name}, "weight": override.weight})
    return {
        "interventions": interventions,
        "suppress": suppress,
        "overrides": overrides,
        # Without overrides it says nothing, and may not part what is the same.
        "override_mode": spec.override_mode if overrides else "delta",
    }


def names_preset(request: GenerateFields) -> bool:
    """Whether there may be something for `apply_preset` to do."""
    return (request.steering is not None and request.steering.preset is not None) or "@" in (request.model or "")


def apply_preset(request: Fields, checkpoint: Checkpoint, store: PresetStore | None) -> Fields:
    """The request with the preset that it names put in place of the name; itself if it names none. Reads files.

    `model: "MODEL@PRESET"` names one as `steering.preset` does, for clients that can send nothing else.
    Raises ApiError for a preset that is not there or not for this checkpoint.
    """
    model, by_model = split_model(request.model, checkpoint.model_id)
    own = request.steering or SteeringSpec()
    if own.preset is not None and by_model not in (None, own.preset):
        message = f"steering.preset is {own.preset!r} and model names preset {by_model!r}; name one"
        raise ApiError(400, message, code="invalid_value", param="steering.preset")
    named, param = (own.preset, "steering.preset") if own.preset is not None else (by_model, "model")
    if named is None:
        return request
    if (why := request.why_plain) is not None:
        message = f"preset {named!r} has no effect: {why}; leave it out"
        raise ApiError(400, message, code="invalid_value", param=param)
    if store is None:
        raise ApiError(404, "this server keeps no presets", code="preset_not_found", param=param)
    steering = with_preset(own, store.get(named, param=param), checkpoint, param=param)
    return request.model_copy(update={"model": model, "steering": steering})


def split_model(model: str | None, served: str) -> tuple[str | None, str | None]:
    """What `model` names: a model and a preset of it."""
    # A model's own name may hold the sign that parts the two.
    if model is not None and model.startswith(f"{served}@"):
        return served, model.removeprefix(f"{served}@")
    return model, None


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
    overrides = [
        OverrideSpec(concept=item["concept"]["id"], weight=item["weight"]) for item in preset.steering["overrides"]
    ]
    mode = preset.steering["override_mode"] if overrides else own.override_mode
    if mode != own.override_mode and (own.overrides or "override_mode" in own.model_fields_set):
        message = f"override_mode is {own.override_mode!r} and preset {preset.id} overrides by {mode!r}; use one mode"
        raise ApiError(400, message, code="invalid_value", param="steering.override_mode")
    if mode != "delta" and not (overrides or own.overrides):
        message = (
            f"override_mode is {mode!r}, and neither the request nor preset {preset.id} has overrides; leave it out"
        )
        raise ApiError(400, message, code="invalid_value", param="steering.override_mode")
    merged = own.model_copy(
        update={
            "interventions": [*own.interventions, *interventions],
            "suppress": [*own.suppress, *suppress],
            "overrides": [*own.overrides, *overrides],
            "override_mode": mode,
            "preset": preset.id,
        }
    )
    for name, most in _LIMITS.items():
        number = len(getattr(merged, name))
        if number > most:
            message = f"steering.{name} and preset {preset.id} hold {number} together; at most {most}"
            raise ApiError(400, message, code="invalid_value", param=f"steering.{name}")
    return merged


def _intervention(spec: InterventionSpec, checkpoint: Checkpoint, path: str, default_layer: int) -> dict[str, Any]:
    weights = summed_weights(spec.concepts, checkpoint.catalogue, path, with_groups=spec.group)
    return {
        "concepts": [{"id": concept.id, "name": concept.name, "weight": weight} for concept, weight in weights.items()],
        "strength": spec.strength,
        "unit": spec.unit,
        "layer": default_layer if spec.layer is None else spec.layer,
        "schedule": spec.schedule,
        "cutoff_tokens": spec.cutoff_tokens,
    }
