"""Concept weights that a request sets, in place of those its model's heads find.

Applied between the last layer and lm_head, so no key and no value ever sees them. Two ways to do it:

- `delta`: composed + sum of (new - current weight) * embedding over the concepts that are set. The current weight is
  what attribution reports, the sigmoid of the concept's logit at that position, whether or not the concept is among
  the head's active ones. Everything else stays, the epsilon included, so setting the current weight changes nothing.
- `reference`: what the public package's `intervene` does. Features are summed anew with the set weights; one known
  concept leaves the epsilon correction out, and discovered ones alone change nothing where it is in. Without a
  discovered head the remainder is whatever the known features leave of the hidden state, so nothing changes at all.

Shapes: M hidden states, D model width, K concepts that are set, T concepts that are active.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..model.concept_heads import ConceptHead
from ..model.steerling import SteerlingModel
from ..request import Head, OverrideMode, SteeringParams, WeightOverride

MOST_IN_DENSE_HEAD = 50_000
"""The package sums weights anew for heads of up to this many concepts. For larger ones it adds the difference to the
current weight, even of a concept that is not active."""


@dataclass(frozen=True, slots=True, eq=False)
class SetWeights:
    """What one head's concepts are set to."""

    id_K: Tensor
    """int64, distinct, local to the head."""
    weight_K: Tensor
    """float32."""


@dataclass(frozen=True, slots=True, eq=False)
class OverridePlan:
    """A request's overrides on its model's device. Equal to itself alone."""

    mode: OverrideMode
    known: SetWeights | None
    """None: nothing is set."""
    discovered: SetWeights | None

    def tensors(self) -> list[Tensor]:
        """All that it holds on the device."""
        return [t for part in (self.known, self.discovered) if part is not None for t in (part.id_K, part.weight_K)]


def plan_overrides(steering: SteeringParams, device: torch.device) -> OverridePlan | None:
    """The overrides of a request that `admission` has let in; None without any."""
    if not steering.overrides:
        return None
    return OverridePlan(
        mode=steering.override_mode,
        known=_set_weights(steering.overrides, "known", device),
        discovered=_set_weights(steering.overrides, "discovered", device),
    )


def _set_weights(overrides: Iterable[WeightOverride], head: Head, device: torch.device) -> SetWeights | None:
    mine = [(item.concept_id, item.weight) for item in overrides if item.head == head]
    if not mine:
        return None
    ids, weights = zip(*mine, strict=True)
    return SetWeights(
        id_K=torch.tensor(ids, dtype=torch.int64, device=device),
        weight_K=torch.tensor(weights, dtype=torch.float32, device=device),
    )


def override(model: SteerlingModel, hidden_MD: Tensor, composed_MD: Tensor, plan: OverridePlan) -> Tensor:
    """What lm_head reads in place of `composed_MD`, in its dtype.

    `composed_MD` is `model.compose(hidden_MD)`. The host waits for nothing.
    """
    if plan.mode == "reference":
        return _sum_anew(model, hidden_MD, composed_MD, plan)
    total_MD = composed_MD.float()
    for head, wanted in ((model.known_head, plan.known), (model.discovered_head, plan.discovered)):
        if head is not None and wanted is not None:
            total_MD = total_MD + _difference(head, hidden_MD, wanted)
    return total_MD.to(composed_MD.dtype)


def _sum_anew(model: SteerlingModel, hidden_MD: Tensor, composed_MD: Tensor, plan: OverridePlan) -> Tensor:
    concept = model.config.concept
    keeps_epsilon = concept.use_epsilon_correction and plan.known is None
    if model.discovered_head is None or keeps_epsilon:
        return composed_MD
    if plan.known is None:
        known_MD = model.known_features(hidden_MD)
    elif model.known_head.num_concepts > MOST_IN_DENSE_HEAD:
        known_MD = model.known_features(hidden_MD) + _difference(model.known_head, hidden_MD, plan.known)
    else:
        # Not `topk_known_features`: weights that are set are summed with those that are reported.
        known_MD = _dense_features(model.known_head, hidden_MD, plan.known, concept.topk_known)
    if plan.discovered is None:
        discovered_MD = model.discovered_features(hidden_MD)
    elif model.discovered_head.num_concepts > MOST_IN_DENSE_HEAD:
        change_MD = _difference(model.discovered_head, hidden_MD, plan.discovered)
        discovered_MD = model.discovered_features(hidden_MD) + change_MD
    else:
        k = concept.discovered_topk if concept.apply_topk_to_discovered else None
        discovered_MD = _dense_features(model.discovered_head, hidden_MD, plan.discovered, k)
    return (known_MD + discovered_MD).to(composed_MD.dtype)


def _difference(head: ConceptHead, hidden_MD: Tensor, wanted: SetWeights) -> Tensor:
    """Sum of (new - current weight) * embedding, float32 [M, D]."""
    change_MK = wanted.weight_K - head.logits_of(hidden_MD, wanted.id_K).sigmoid()
    return change_MK @ head.embedding(wanted.id_K).float()


def _dense_features(head: ConceptHead, hidden_MD: Tensor, wanted: SetWeights, k: int | None) -> Tensor:
    """Sum of weight * embedding over the top k concepts (None: all) and those that are set, float32 [M, D]."""
    if k is None:
        return head.features(hidden_MD, None).float() + _difference(head, hidden_MD, wanted)
    id_MT, logits_MT = head.top_k(hidden_MD, k)
    weight_MT = logits_MT.sigmoid().masked_fill(is_any_of(id_MT, wanted.id_K), 0.0)
    return head.mix(id_MT, weight_MT).float() + wanted.weight_K @ head.embedding(wanted.id_K).float()


def is_any_of(id_MT: Tensor, id_K: Tensor) -> Tensor:
    """Which ids are among the second ones, bool [M, T]."""
    return (id_MT[:, :, None] == id_K).any(dim=-1)
