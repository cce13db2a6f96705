"""Which concepts drove a committed token, from the hidden state of the very pass that committed it.

Shapes: M committed tokens, K reported concepts of a head, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..model.concept_heads import ConceptHead
from ..model.steerling import SteerlingModel
from .overrides import OverridePlan, SetWeights, is_any_of

NOTHING = -1
"""Instead of a concept's id."""


@dataclass(frozen=True, slots=True)
class HeadExplanation:
    """One head's part, largest absolute contribution first."""

    ids_MK: Tensor
    """int64, local to the head. `NOTHING` for an entry that reports no concept: those come last."""
    weights_MK: Tensor
    """float32: sigmoids, or what the request sets."""
    contributions_MK: Tensor
    """float32: weight * (embedding . W[token])."""
    total_M: Tensor
    """float32: their sum."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Both heads' parts; with the epsilon they sum to the target logit."""

    known: HeadExplanation
    discovered: HeadExplanation
    epsilon_M: Tensor
    """float32: target logit minus all reported contributions."""


def explain(
    model: SteerlingModel,
    hidden_MD: Tensor,
    token_id_M: Tensor,
    target_logit_M: Tensor,
    overrides: OverridePlan | None = None,
) -> Explanation:
    """Explain M committed tokens from their committing passes' hidden states.

    `token_id_M` int64, `target_logit_M` float32 raw logits. A checkpoint without a discovered head reports K = 0.
    `overrides` is what the tokens' request sets: `hidden_MD` is without them, the logits are with them. Concepts that
    are set are reported beside those that the head finds, with the weights they are set to.
    """
    concept = model.config.concept
    token_vector_MD = model.transformer.token_vectors_VD[token_id_M]
    known = _explain_head(
        model.known_head,
        hidden_MD,
        token_vector_MD,
        concept.num_reported_known,
        None if overrides is None else overrides.known,
    )
    if model.discovered_head is None:
        none = target_logit_M.new_zeros(target_logit_M.shape[0], 0)
        discovered = HeadExplanation(
            ids_MK=none.long(), weights_MK=none, contributions_MK=none, total_M=none.sum(dim=-1)
        )
    else:
        discovered = _explain_head(
            model.discovered_head,
            hidden_MD,
            token_vector_MD,
            concept.num_reported_discovered,
            None if overrides is None else overrides.discovered,
        )
    epsilon_M = target_logit_M - (known.total_M + discovered.total_M)
    return Explanation(known=known, discovered=discovered, epsilon_M=epsilon_M)


def _explain_head(
    head: ConceptHead, hidden_MD: Tensor, token_vector_MD: Tensor, k: int, wanted: SetWeights | None
) -> HeadExplanation:
    ids_MK, logits_MK = head.top_k(hidden_MD, k)
    weights_MK = logits_MK.sigmoid()
    is_nothing_MK = torch.zeros_like(ids_MK, dtype=torch.bool)
    if wanted is not None:
        # What the head finds of a concept that is set gives way to what it is set to.
        is_nothing_MK = F.pad(is_any_of(ids_MK, wanted.id_K), (0, len(wanted.id_K)))
        ids_MK = torch.cat((ids_MK, wanted.id_K.expand(len(ids_MK), -1)), dim=-1)
        weights_MK = torch.cat((weights_MK, wanted.weight_K.expand(len(ids_MK), -1)), dim=-1)
    contributions_MK = weights_MK * head.alignments(ids_MK, token_vector_MD)
    contributions_MK = contributions_MK.masked_fill(is_nothing_MK, 0.0)
    ids_MK = ids_MK.masked_fill(is_nothing_MK, NOTHING)
    size_MK = contributions_MK.abs().masked_fill(is_nothing_MK, -1.0)
    order = size_MK.sort(dim=-1, descending=True, stable=True).indices
    contributions_MK = contributions_MK.gather(1, order)
    return HeadExplanation(
        ids_MK=ids_MK.gather(1, order),
        weights_MK=weights_MK.gather(1, order),
        contributions_MK=contributions_MK,
        # Along a row torch adds in an order that follows from the address of its start; columns are all added alike.
        total_M=contributions_MK.T.contiguous().sum(dim=0),
    )


def guided(
    conditional: Explanation, unconditional: Explanation, target_logit_M: Tensor, scale_M: Tensor
) -> Explanation:
    """The explanation of guided logits, which are (scale + 1) * conditional - scale * unconditional ones.

    So is each concept's contribution, where a concept that is not reported in one of the two contributes nothing there.
    Weights are the conditional ones, 0 where only the unconditional pass reports the concept. A head has 2 * K entries;
    those left over are `NOTHING`. `target_logit_M` and `scale_M`: float32, the guided logit and cfg_scale.
    """
    known = _guided_head(conditional.known, unconditional.known, scale_M)
    discovered = _guided_head(conditional.discovered, unconditional.discovered, scale_M)
    return Explanation(known, discovered, target_logit_M - (known.total_M + discovered.total_M))


def _guided_head(conditional: HeadExplanation, unconditional: HeadExplanation, scale_M: Tensor) -> HeadExplanation:
    scale_M1 = scale_M[:, None]
    parts = ((scale_M1 + 1) * conditional.contributions_MK, -scale_M1 * unconditional.contributions_MK)
    weights = (conditional.weights_MK, torch.zeros_like(unconditional.weights_MK))
    # Where both report a concept, its two entries now stand side by side, the conditional one first.
    ids_MK, order = torch.cat((conditional.ids_MK, unconditional.ids_MK), dim=1).sort(dim=1, stable=True)
    contributions_MK, weights_MK = (torch.cat(both, dim=1).gather(1, order) for both in (parts, weights))
    is_second_MK = torch.zeros_like(ids_MK, dtype=torch.bool)
    is_second_MK[:, 1:] = ids_MK[:, 1:] == ids_MK[:, :-1]
    second_MK = torch.where(is_second_MK, contributions_MK, 0.0)
    contributions_MK = contributions_MK + second_MK.roll(-1, dims=1)
    is_nothing_MK = is_second_MK | (ids_MK == NOTHING)
    size_MK = torch.where(is_nothing_MK, -1.0, contributions_MK.abs())
    order = size_MK.sort(dim=1, descending=True, stable=True).indices
    return HeadExplanation(
        ids_MK=torch.where(is_nothing_MK, NOTHING, ids_MK).gather(1, order),
        weights_MK=weights_MK.gather(1, order),
        contributions_MK=torch.where(is_nothing_MK, 0.0, contributions_MK).gather(1, order),
        total_M=(scale_M + 1) * conditional.total_M - scale_M * unconditional.total_M,
    )


def top_tokens(model: SteerlingModel, head: ConceptHead, concept_id: int, k: int) -> tuple[Tensor, Tensor]:
    """The k tokens that a concept most promotes: int64 ids and float32 alignments of its unit embedding."""
    id_1 = torch.tensor([concept_id], device=model.transformer.lm_head.weight.device)
    embedding_D = head.embedding(id_1).float()[0]
    unit_D = embedding_D / (embedding_D.norm() + 1e-12)
    alignment_V = model.transformer.token_alignments(unit_D[None])[0]
    best = alignment_V.topk(min(k, alignment_V.shape[0]))
    return best.indices, best.values
