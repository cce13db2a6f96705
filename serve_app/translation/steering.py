"""Steering by names -> steering by the engine's ids."""

from __future__ import annotations

from collections.abc import Sequence

from engine import Intervention as EngineIntervention
from engine import InvalidRequest, SteeringParams, Suppression, WeightOverride

from ..concepts import Concept, ConceptCatalogue
from ..errors import ApiError
from ..schemas import (
    MAX_INTERVENTIONS,
    MAX_STEERED_CONCEPTS,
    MAX_STRENGTH,
    ConceptItem,
    InterventionSpec,
    OverrideSpec,
    SteeringSpec,
)


def steering_params(spec: SteeringSpec, catalogue: ConceptCatalogue, *, num_layers: int) -> SteeringParams:
    """What the engine is asked for. Raises ApiError with the path of the field at fault."""
    interventions = [
        _intervention(item, catalogue, f"steering.interventions[{i}]") for i, item in enumerate(spec.interventions)
    ]
    if spec.concepts is not None and spec.strength is not None:
        short_form = InterventionSpec(
            concepts=spec.concepts,
            strength=spec.strength,
            layer=-(-num_layers // 4),
            schedule="hard_cutoff",
            group=spec.group,
        )
        # Last, so that an error's index counts the caller's own list.
        interventions.append(_intervention(short_form, catalogue, "steering"))
    if len(interventions) > MAX_INTERVENTIONS:
        message = f"the short form and interventions are {len(interventions)} together; at most {MAX_INTERVENTIONS}"
        raise ApiError(400, message, code="invalid_value", param="steering.interventions")
    suppress = []
    for i, item in enumerate(spec.suppress):
        concept = catalogue.steerable(item.concept, param=f"steering.suppress[{i}].concept")
        suppress.append(Suppression(concept_id=catalogue.local_id(concept), strength=item.strength))
    return SteeringParams(
        interventions=tuple(interventions),
        suppress=tuple(suppress),
        overrides=_overrides(spec.overrides, catalogue),
        override_mode=spec.override_mode,
    )


def _overrides(specs: Sequence[OverrideSpec], catalogue: ConceptCatalogue) -> tuple[WeightOverride, ...]:
    overrides: dict[Concept, WeightOverride] = {}
    for i, item in enumerate(specs):
        path = f"steering.overrides[{i}].concept"
        concept = catalogue.find(item.concept, param=path)
        if concept in overrides:
            message = f"concept {concept.id} is overridden twice; set it once"
            raise ApiError(400, message, code="invalid_value", param=path)
        local_id = catalogue.local_id(concept)
        overrides[concept] = WeightOverride(concept_id=local_id, head=concept.head, weight=item.weight)
    return tuple(overrides.values())


def _intervention(spec: InterventionSpec, catalogue: ConceptCatalogue, path: str) -> EngineIntervention:
    weights = summed_weights(spec.concepts, catalogue, path, with_groups=spec.group)
    concept_ids = tuple(catalogue.local_id(concept) for concept in weights)
    are_equal = len(set(weights.values())) == 1 and next(iter(weights.values())) > 0
    try:
        return EngineIntervention(
            concept_ids=concept_ids,
            weights=None if are_equal else tuple(weights.values()),
            strength=spec.strength,
            unit=spec.unit,
            layer=spec.layer,
            schedule=spec.schedule,
            cutoff_tokens=spec.cutoff_tokens,
        )
    except InvalidRequest as error:
        field = (error.param or "").rpartition(".")[2]
        raise ApiError(400, str(error), code="invalid_value", param=f"{path}.{field}") from error


def summed_weights(
    items: Sequence[ConceptItem], catalogue: ConceptCatalogue, path: str, *, with_groups: bool
) -> dict[Concept, float]:
    """Concept -> weight, each concept once: naming one twice adds its weights up, as adding its embedding twice would.

    The members that a group adds take the weight of the concept that brought them and are not added up.
    """
    weights: dict[Concept, float] = {}
    for i, item in enumerate(items):
        concept = catalogue.steerable(item.id, param=f"{path}.concepts[{i}]")
        weights[concept] = weights.get(concept, 0.0) + item.weight
    if with_groups:
        for concept, weight in list(weights.items()):
            for member in catalogue.group(concept):
                weights.setdefault(member, weight)
    if len(weights) > MAX_STEERED_CONCEPTS:
        message = f"{len(weights)} concepts in one intervention; at most {MAX_STEERED_CONCEPTS}"
        raise ApiError(400, message, code="invalid_value", param=f"{path}.concepts")
    for concept, weight in weights.items():
        if abs(weight) > MAX_STRENGTH:
            message = f"the weights of concept {concept.id} add up to {weight:g}; at most {MAX_STRENGTH:g} either way"
            raise ApiError(400, message, code="invalid_value", param=f"{path}.concepts")
    if not any(weights.values()):
        raise ApiError(400, "the weights add up to nothing", code="invalid_value", param=f"{path}.concepts")
    return weights
