"""Explanations that the device has been asked for: which concepts drove some committed tokens.

Shapes: M commits, K concepts of a head, F fields of a packed explanation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ..decoding import attribution
from ..decoding.overrides import OverridePlan
from ..model.steerling import SteerlingModel
from ..output import Commit, ConceptContribution, TokenAttribution
from ..request import SamplingParams
from ..scheduling import PlannedRow
from .lanes import Lanes
from .transfer import HostCopy, to_device

_GRAPH_SIZES = (8, 64, 256)
"""Commits that are explained at once. Each gathers an embedding for every concept it reports, so the last is a bound on
memory, with and without graphs."""
_MOST_IN_GRAPH = 1024
"""Concepts that a commit reports. A graph copies all of them to the host; checkpoints that report more go without."""
_EXPLAINED_ALWAYS = 64
"""Commits, repeated ones where there are fewer, if results must not depend on their number."""


@dataclass(frozen=True, slots=True)
class KeptCommit:
    """A commit whose hidden state is kept in a lane until it is explained."""

    lane: int
    position: int
    token_id: int
    target_logit: float
    shadow_lane: int | None = None
    """Of a guided commit: where the hidden state of its unconditional copy is kept."""
    cfg_scale: float = 0.0
    """Of a guided commit."""


def keep(commit: Commit, row: PlannedRow, sampling: SamplingParams) -> KeptCommit:
    """What explains a commit later that this denoise row has made."""
    return KeptCommit(
        lane=row.lane,
        position=commit.position,
        token_id=commit.token_id,
        target_logit=commit.target_logit,
        shadow_lane=row.shadow_lane,
        cfg_scale=sampling.cfg_scale,
    )


class Explainer:
    """Explains commits from their kept hidden states, many at a time."""

    def __init__(self, model: SteerlingModel, lanes: Lanes, *, uses_graphs: bool, is_deterministic: bool) -> None:
        """`uses_graphs`: capture what is done for some numbers of commits; eagerly, some hundred small kernels would
        keep the device waiting for the host. `is_deterministic`: the device computes with tensors of one size, so that
        a library has no choice of kernels.
        """
        self._model = model
        self._lanes = lanes
        sizes = (_EXPLAINED_ALWAYS,) if is_deterministic else _GRAPH_SIZES
        self._at_once = sizes[-1]
        self._is_padded = is_deterministic
        self._graphs: dict[int, _Captured] = {}
        concept = model.config.concept
        self._num_known = concept.num_reported_known
        if uses_graphs and concept.num_reported_known + concept.num_reported_discovered <= _MOST_IN_GRAPH:
            # On one stream and in one pool, the largest first, so that the others fit into the memory it leaves.
            stream = torch.cuda.Stream(lanes.device)  # type: ignore[no-untyped-call]
            pool = torch.cuda.graph_pool_handle()
            captured = {size: self._capture(size, stream, pool) for size in reversed(sizes)}
            self._graphs = {size: captured[size] for size in sizes}
        if lanes.device.type == "cuda":
            # Whatever explaining compiles or loads is there before the first request.
            nobody = KeptCommit(lanes.idle_lane, 0, 0, 0.0)
            self.explain([nobody, replace(nobody, shadow_lane=lanes.idle_lane)], [None, None]).read()

    @torch.no_grad()
    def explain(self, kept: list[KeptCommit], top_k: list[int | None]) -> ExplanationInFlight:
        """Have commits explained, and do not wait for it; `top_k[i]` cuts what is returned for commit i, None nothing.

        The kept hidden states are taken before any pass that is launched later can overwrite them.
        """
        parts = []
        for part, overrides, is_guided in self._alike(kept):
            # Most requests want a few concepts of some hundred: the others are not looked at.
            most = None if None in top_k[part] else max(k for k in top_k[part] if k is not None)
            explain = self._explain_guided if is_guided else self._run
            packed, num_known = explain(kept[part], most, overrides)
            parts.append(_Part(HostCopy(packed[: len(kept[part])]), num_known, most, top_k[part]))
        return ExplanationInFlight(parts)

    def _alike(self, kept: list[KeptCommit]) -> Iterator[tuple[slice, OverridePlan | None, bool]]:
        """Neighbours that can be explained at once: those of one lane that sets concept weights, or of no such lane;
        guided, which takes two places each, or not."""
        start = 0
        keys = groupby(kept, key=lambda commit: (self._lanes.overrides(commit.lane), commit.shadow_lane is not None))
        for (overrides, is_guided), commits in keys:
            stop = start + sum(1 for _ in commits)
            at_once = self._at_once // 2 if is_guided else self._at_once
            for first in range(start, stop, at_once):
                yield slice(first, min(first + at_once, stop)), overrides, is_guided
            start = stop

    def _explain_guided(
        self, kept: list[KeptCommit], most: int | None, overrides: OverridePlan | None
    ) -> tuple[Tensor, int]:
        copies = [replace(c, lane=c.shadow_lane) for c in kept if c.shadow_lane is not None]
        packed_MF, num_known = self._run([*kept, *copies], None, overrides)
        own, other = (_unpack(part, num_known) for part in packed_MF[: 2 * len(kept)].chunk(2))
        numbers = [[c.target_logit, c.cfg_scale] for c in kept]
        target_M, scale_M = to_device(numbers, torch.float32, self._lanes.device).unbind(dim=1)
        return _pack(attribution.guided(own, other, target_M, scale_M), most)

    def _run(self, kept: list[KeptCommit], most: int | None, overrides: OverridePlan | None) -> tuple[Tensor, int]:
        if self._graphs and overrides is None:
            size = next(size for size in self._graphs if size >= len(kept))
            captured = self._graphs[size]
            captured.inputs_M4.copy_(_pinned(kept, size), non_blocking=True)
            captured.graph.replay()
            return captured.packed_MF, self._num_known
        size = self._at_once if self._is_padded else len(kept)
        inputs_M4 = to_device(_numbers(kept, size), torch.float64, self._lanes.device)
        return _pack(_explain(self._model, self._lanes, inputs_M4, overrides), most)

    def _capture(self, size: int, stream: torch.cuda.Stream, pool: Any) -> _Captured:
        nobody = [KeptCommit(self._lanes.idle_lane, 0, 0, 0.0)]
        inputs_M4 = to_device(_numbers(nobody, size), torch.float64, self._lanes.device)

        def work() -> Tensor:
            return _pack(_explain(self._model, self._lanes, inputs_M4), None)[0]

        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            packed_MF = work()
        return _Captured(inputs_M4, packed_MF, graph)


@dataclass(frozen=True, slots=True)
class _Captured:
    """The explanation of one number of commits, over its own input."""

    inputs_M4: Tensor
    packed_MF: Tensor
    graph: torch.cuda.CUDAGraph


@dataclass(frozen=True, slots=True)
class _Part:
    """Some commits' explanations on their way."""

    packed: HostCopy
    num_known: int
    most: int | None
    top_k: list[int | None]


class ExplanationInFlight:
    """Attributions on their way to the host."""

    def __init__(self, parts: list[_Part]) -> None:
        self._parts = parts

    def read(self) -> list[TokenAttribution]:
        """One attribution for each commit; waits until they are there."""
        return [attribution for part in self._parts for attribution in _attributions(part)]


def _numbers(kept: list[KeptCommit], size: int) -> list[list[float]]:
    """What the device needs of each commit, the first one's again where there are fewer."""
    values: list[list[float]] = [[c.lane, c.position, c.token_id, c.target_logit] for c in kept]
    return values + values[:1] * (size - len(values))


def _pinned(kept: list[KeptCommit], size: int) -> Tensor:
    return torch.tensor(_numbers(kept, size), dtype=torch.float64).pin_memory()


@torch.no_grad()
def _explain(
    model: SteerlingModel, lanes: Lanes, inputs_M4: Tensor, overrides: OverridePlan | None = None
) -> attribution.Explanation:
    # One copy brings all: float64 holds ids and float32 logits exactly.
    lane_M, position_M, token_M, target_M = inputs_M4.unbind(dim=1)
    hidden_MD = lanes.hidden_NCD[lane_M.long(), lanes.hidden_place(position_M.long())]
    return attribution.explain(model, hidden_MD, token_M.long(), target_M.float(), overrides)


def _pack(explanation: attribution.Explanation, most: int | None) -> tuple[Tensor, int]:
    """packed_MF in float32, which holds every concept id exactly, and how many of the concepts are known ones.

    Totals of both heads and the epsilon, then (id, weight, contribution) of each concept, known ones first, at most
    `most` of a head.
    """
    heads = (explanation.known, explanation.discovered)
    concepts = [
        torch.stack((head.ids_MK[:, :most].float(), head.weights_MK[:, :most], head.contributions_MK[:, :most]), dim=-1)
        for head in heads
    ]
    totals = torch.stack((*(head.total_M for head in heads), explanation.epsilon_M), dim=-1)
    parts = [totals, *(part.flatten(1) for part in concepts)]
    return torch.cat(parts, dim=-1), concepts[0].shape[1]


def _unpack(packed_MF: Tensor, num_known: int) -> attribution.Explanation:
    """What `_pack` made `packed_MF` of, as views but for the ids."""
    parts = (packed_MF[:, 3 : 3 + 3 * num_known], packed_MF[:, 3 + 3 * num_known :])
    known, discovered = (
        attribution.HeadExplanation(
            ids_MK=part[:, ::3].long(), weights_MK=part[:, 1::3], contributions_MK=part[:, 2::3], total_M=total_M
        )
        for part, total_M in zip(parts, packed_MF.unbind(dim=1)[:2], strict=True)
    )
    return attribution.Explanation(known=known, discovered=discovered, epsilon_M=packed_MF[:, 2])


def _attributions(part: _Part) -> list[TokenAttribution]:
    packed_MF = part.packed.read()
    known, discovered = packed_MF[:, 3 : 3 + 3 * part.num_known], packed_MF[:, 3 + 3 * part.num_known :]
    if part.most is not None:
        known, discovered = known[:, : 3 * part.most], discovered[:, : 3 * part.most]
    rows = zip(packed_MF[:, :3].tolist(), known.tolist(), discovered.tolist(), part.top_k, strict=True)
    return [
        TokenAttribution(
            known=_contributions(known_values, most),
            discovered=_contributions(discovered_values, most),
            known_total=known_total,
            discovered_total=discovered_total,
            epsilon=epsilon,
        )
        for (known_total, discovered_total, epsilon), known_values, discovered_values, most in rows
    ]


def _contributions(values: list[float], most: int | None) -> tuple[ConceptContribution, ...]:
    # A slice takes a number of any size; `islice` raises beyond a machine word.
    kept = values if most is None else values[: 3 * most]
    return tuple(
        ConceptContribution(int(id_), weight, amount)
        for id_, weight, amount in zip(kept[::3], kept[1::3], kept[2::3], strict=True)
        if id_ != attribution.NOTHING
    )
