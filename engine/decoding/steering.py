"""Steering: directions and alphas from concepts, injection into the residual stream, suppression of logits.

Shapes: R rows, G groups, L layers, D model width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..limits import MAX_STEERING_GROUPS
from ..model.fused_support import HAS_TRITON
from ..model.steerling import SteerlingModel
from ..output import ResolvedIntervention
from ..request import Intervention, SteeringParams, Suppression
from .overrides import OverridePlan, plan_overrides

if HAS_TRITON:
    from .kernels import steering as kernels

SMALLEST_PEAK = 1e-6
"""A direction that no token aligns with would make alpha infinite."""
NO_CUTOFF = 2**62
"""Cutoff of the `fixed` schedule: more commits than any sequence has."""


@dataclass(frozen=True, slots=True)
class SteeringPlan:
    """What a request's steering became on this checkpoint.

    The tensors have an entry for each group in use, so an unsteered request takes no device memory while it waits.
    """

    resolved: tuple[ResolvedIntervention, ...]
    vector_GD: Tensor
    """float32: sum of alpha * direction over the interventions of a group."""
    layer_G: Tensor
    """int64: first layer after which the group acts, counted from 1."""
    cutoff_G: Tensor
    """int64: the group acts while fewer tokens are committed."""
    suppression_V: Tensor | None
    """float32, subtracted from the logits; None without suppression."""
    overrides: OverridePlan | None = None

    def tensors(self) -> list[Tensor]:
        """All that it holds on the device."""
        suppression = [] if self.suppression_V is None else [self.suppression_V]
        overrides = [] if self.overrides is None else self.overrides.tensors()
        return [self.vector_GD, self.layer_G, self.cutoff_G, *suppression, *overrides]


def plan_steering(model: SteerlingModel, steering: SteeringParams | None) -> SteeringPlan:
    """Resolve interventions and suppressions against a checkpoint's known head and lm_head.

    Interventions with the same layer, schedule and cutoff add up to one group; a lane holds MAX_STEERING_GROUPS.
    """
    steering = steering or SteeringParams()
    device = model.transformer.lm_head.weight.device
    groups: dict[tuple[int, int], Tensor] = {}
    resolved: list[ResolvedIntervention] = []
    for intervention in steering.interventions:
        outcome, direction_D = resolve_intervention(model, intervention)
        cutoff = intervention.cutoff
        key = (outcome.layer, NO_CUTOFF if cutoff is None else min(cutoff, NO_CUTOFF))
        vector_D = outcome.alpha * direction_D
        groups[key] = groups[key] + vector_D if key in groups else vector_D
        resolved.append(outcome)
    assert len(groups) <= MAX_STEERING_GROUPS, f"{len(groups)} groups; admission lets no more through than a lane holds"
    none_GD = torch.zeros(0, model.config.n_embd, device=device)
    return SteeringPlan(
        resolved=tuple(resolved),
        vector_GD=torch.stack(list(groups.values())) if groups else none_GD,
        layer_G=torch.tensor([layer for layer, _ in groups], dtype=torch.int64, device=device),
        cutoff_G=torch.tensor([cutoff for _, cutoff in groups], dtype=torch.int64, device=device),
        suppression_V=suppression(model, steering.suppress) if steering.suppress else None,
        overrides=plan_overrides(steering, device),
    )


def resolve_intervention(model: SteerlingModel, intervention: Intervention) -> tuple[ResolvedIntervention, Tensor]:
    """Alpha, peak and layer of one intervention, and its unit direction_D (float32).

    The direction is the L2-normalised weighted sum of the concepts' embeddings; `peak` is its largest dot product
    with a row of lm_head, so that strength in logit units is what the likeliest token of the concept gains.
    """
    weights = intervention.weights or (1.0,) * len(intervention.concept_ids)
    # Only their ratios count; huge or tiny ones would overflow the norm or vanish beside its 1e-12.
    largest = max(map(abs, weights)) or 1.0
    weight_K = torch.tensor([w / largest for w in weights], device=model.transformer.lm_head.weight.device)
    id_K = torch.tensor(intervention.concept_ids, device=weight_K.device)
    total_D = (model.known_head.embedding(id_K).float() * weight_K[:, None]).sum(dim=0)
    direction_D = total_D / (total_D.norm() + 1e-12)
    peak = max(float(model.transformer.token_alignments(direction_D[None]).max()), SMALLEST_PEAK)
    alpha = intervention.strength / peak if intervention.unit == "logits" else intervention.strength
    resolved = ResolvedIntervention(
        concept_ids=intervention.concept_ids,
        weights=tuple(weights),
        alpha=alpha,
        peak=peak,
        layer=intervention.first_layer(model.config.n_layers),
        schedule=intervention.schedule,
        cutoff_tokens=intervention.cutoff_tokens,
    )
    return resolved, direction_D


def suppression(model: SteerlingModel, suppress: tuple[Suppression, ...]) -> Tensor:
    """What to subtract from the logits, float32 [V]: sum of strength * relu(embedding . W)."""
    device = model.transformer.lm_head.weight.device
    id_K = torch.tensor([item.concept_id for item in suppress], device=device)
    strength_K = torch.tensor([item.strength for item in suppress], dtype=torch.float32, device=device)
    alignment_KV = model.transformer.token_alignments(model.known_head.embedding(id_K).float())
    return (strength_K[:, None] * alignment_KV.clamp(min=0.0)).sum(dim=0)


def added_by_layer(
    vector_RGD: Tensor, layer_RG: Tensor, cutoff_RG: Tensor, num_committed_R: Tensor, num_layers: int
) -> Tensor:
    """What to add to the residual stream after each layer at masked positions, added_LRD (float32, contiguous).

    A group acts while the row's commits are fewer than its cutoff, after every layer i (from 0) with
    i + 1 >= its layer. Rows without steering get zeros. A row's sums do not depend on the other rows: a product of
    matrices would choose its order by their number.
    """
    if HAS_TRITON and vector_RGD.is_cuda:
        return kernels.added_by_layer(vector_RGD, layer_RG, cutoff_RG, num_committed_R, num_layers)
    return added_by_layer_slow(vector_RGD, layer_RG, cutoff_RG, num_committed_R, num_layers)


def added_by_layer_slow(
    vector_RGD: Tensor, layer_RG: Tensor, cutoff_RG: Tensor, num_committed_R: Tensor, num_layers: int
) -> Tensor:
    """The slow twin of `added_by_layer`: one group after another."""
    num_rows, num_groups, width = vector_RGD.shape
    layer_L = torch.arange(1, num_layers + 1, device=layer_RG.device)
    is_active_RG = num_committed_R[:, None] < cutoff_RG
    acts_LRG = is_active_RG & (layer_RG <= layer_L[:, None, None])
    added_LRD = vector_RGD.new_zeros(num_layers, num_rows, width)
    for group in range(num_groups):
        added_LRD += torch.where(acts_LRG[:, :, group, None], vector_RGD[:, group], 0.0)
    return added_LRD


def inject(x_RCD: Tensor, added_RD: Tensor, masked_RC: Tensor) -> Tensor:
    """The residual stream with each row's `added_RD` at its masked positions."""
    # Not a product with the mask: a NaN in a concept's embedding would reach pages that others share.
    return torch.where(masked_RC[:, :, None], x_RCD + added_RD.to(x_RCD.dtype)[:, None, :], x_RCD)
