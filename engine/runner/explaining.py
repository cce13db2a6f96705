"""Explanations that the device has been asked for: which concepts drove some committed tokens.

Shapes: M commits, K concepts handed out of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from ..decoding import attribution
from ..model.steerling import SteerlingModel
from ..output import ConceptContribution, TokenAttribution
from .lanes import Lanes
from .transfer import HostCopy, to_device

_EXPLAINED_AT_ONCE = 256
"""Commits, each of which gathers an embedding for every concept it reports: a bound on memory."""
_EXPLAINED_ALWAYS = 64
"""Commits, repeated ones where there are fewer, if results must not depend on their number."""


@dataclass(frozen=True, slots=True)
class KeptCommit:
    """A commit whose hidden state is kept in a lane until it is explained."""

    lane: int
    position: int
    token_id: int
    target_logit: float


class ExplanationInFlight:
    """Attributions on their way to the host.

    The kept hidden states are taken before any pass that is launched later can overwrite them.
    """

    def __init__(
        self,
        model: SteerlingModel,
        lanes: Lanes,
        kept: list[KeptCommit],
        top_k: list[int | None],
        *,
        is_deterministic: bool = False,
    ) -> None:
        """`top_k[i]`: how many concepts a head returns for commit i; None: all that it reports.

        `is_deterministic`: the device computes with tensors of one size, so that a library has no choice of kernels.
        """
        self._top_k = top_k
        self._parts: list[tuple[HostCopy, int]] = []
        at_once = _EXPLAINED_ALWAYS if is_deterministic else _EXPLAINED_AT_ONCE
        for start in range(0, len(kept), at_once):
            part = slice(start, start + at_once)
            asked = kept[part]
            num_more = at_once - len(asked) if is_deterministic else 0
            explanation = _explain(model, lanes, asked + asked[:1] * num_more)
            # Most requests want a few concepts of some hundred: the others never leave the device.
            most = None if None in top_k[part] else max(k for k in top_k[part] if k is not None)
            packed, num_known = _pack(explanation, most)
            self._parts.append((HostCopy(packed[: len(asked)]), num_known))

    def read(self) -> list[TokenAttribution]:
        """One attribution for each commit; waits until they are there."""
        top_k = iter(self._top_k)
        return [
            _attribution(values, num_known, next(top_k))
            for part, num_known in self._parts
            for values in part.read().tolist()
        ]


def _explain(model: SteerlingModel, lanes: Lanes, kept: list[KeptCommit]) -> attribution.Explanation:
    # One copy brings all: float64 holds ids and float32 logits exactly.
    values = [[c.lane, c.position, c.token_id, c.target_logit] for c in kept]
    lane_M, position_M, token_M, target_M = to_device(values, torch.float64, lanes.device).unbind(dim=1)
    hidden_MD = lanes.hidden_NCD[lane_M.long(), lanes.hidden_slot(position_M.long())]
    return attribution.explain(model, hidden_MD, token_M.long(), target_M.float())


def _pack(explanation: attribution.Explanation, most: int | None) -> tuple[Tensor, int]:
    """[M, 3 + 3 K] in float32, which holds every concept id exactly, and how many of K are known concepts.

    Totals of both heads and the epsilon, then (id, weight, contribution) of each concept, known ones first.
    """
    heads = (explanation.known, explanation.discovered)
    concepts = [
        torch.stack((head.ids_MK[:, :most].float(), head.weights_MK[:, :most], head.contributions_MK[:, :most]), dim=-1)
        for head in heads
    ]
    totals = torch.stack((*(head.total_M for head in heads), explanation.epsilon_M), dim=-1)
    parts = [totals, *(part.flatten(1) for part in concepts)]
    return torch.cat(parts, dim=-1), concepts[0].shape[1]


def _attribution(values: list[float], num_known: int, most: int | None) -> TokenAttribution:
    known_total, discovered_total, epsilon, *concepts = values
    return TokenAttribution(
        known=_contributions(concepts[: 3 * num_known], most),
        discovered=_contributions(concepts[3 * num_known :], most),
        known_total=known_total,
        discovered_total=discovered_total,
        epsilon=epsilon,
    )


def _contributions(values: list[float], most: int | None) -> tuple[ConceptContribution, ...]:
    items = zip(values[::3], values[1::3], values[2::3], strict=True)
    return tuple(ConceptContribution(int(id_), weight, amount) for id_, weight, amount in islice(items, most))
