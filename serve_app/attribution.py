"""Attributions as the API shows them: concepts by name, token by token and chunk by chunk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine import Commit, ConceptContribution, Head, TokenAttribution

from .concepts import ConceptCatalogue
from .schemas import AttributionSpec
from .tokenizer import Tokenizer

_SMALLEST_MASS = 1e-8
_DIGITS = 6


@dataclass(frozen=True, slots=True)
class TextToken:
    """One token of the generated text and how it came to be."""

    commit: Commit
    commit_order: int
    """Commits of this choice before it."""
    block: int
    """Counted from the choice's first block."""


class AttributionWriter:
    """Writes attributions for one request's wishes."""

    def __init__(self, spec: AttributionSpec, catalogue: ConceptCatalogue, tokenizer: Tokenizer) -> None:
        self._spec = spec
        self._catalogue = catalogue
        self._tokenizer = tokenizer

    def choice(self, index: int, tokens: Sequence[TextToken], *, endofchunk_token_id: int | None) -> dict[str, Any]:
        """One choice's entry; `tokens` are its text, in order."""
        entry: dict[str, Any] = {"index": index}
        if self._spec.level in ("token", "both"):
            entry["tokens"] = [self._token(position, token) for position, token in enumerate(tokens)]
        if self._spec.level in ("chunk", "both"):
            chunks = chunk_ranges([token.commit.token_id for token in tokens], endofchunk_token_id)
            entry["chunks"] = [
                self._chunk(chunk, [t.commit for t in tokens[chunk.start : chunk.stop]]) for chunk in chunks
            ]
        return entry

    def step_concepts(self, attribution: TokenAttribution) -> list[dict[str, Any]]:
        """The concepts that moved one token most, of all wanted heads together."""
        contributions = [(head, item) for head in self._spec.heads for item in _of_head(attribution, head)]
        contributions.sort(key=lambda pair: -abs(pair[1].contribution))
        return [
            {**self._catalogue.named(head, item.concept_id), "head": head, "contribution": number(item.contribution)}
            for head, item in contributions[: self._spec.top_k]
        ]

    def _token(self, position: int, token: TextToken) -> dict[str, Any]:
        commit = token.commit
        attribution = _explained(commit)
        return {
            "position": position,
            **self._tokenizer.spelled(commit.token_id),
            "token_id": commit.token_id,
            "block": token.block,
            "step": commit.denoising_step,
            "commit_order": token.commit_order,
            "logit": number(commit.target_logit),
            "logprob": number(commit.logprob),
            **{head: self._concepts(attribution, head) for head in self._spec.heads},
            "known_total": number(attribution.known_total),
            "discovered_total": number(attribution.discovered_total),
            "epsilon": number(attribution.epsilon),
        }

    def _concepts(self, attribution: TokenAttribution, head: Head) -> list[dict[str, Any]]:
        return [
            {
                **self._catalogue.named(head, item.concept_id),
                "weight": number(item.weight),
                "contribution": number(item.contribution),
            }
            for item in _of_head(attribution, head)[: self._spec.top_k]
        ]

    def _chunk(self, chunk: range, commits: Sequence[Commit]) -> dict[str, Any]:
        scores, epsilon = chunk_scores([_explained(commit) for commit in commits])
        wanted = [item for item in scores.items() if item[0][0] in self._spec.heads]
        wanted.sort(key=lambda item: (-abs(item[1]), item[0]))
        return {
            "start": chunk.start,
            "end": chunk.stop,
            "text": self._tokenizer.decode(commit.token_id for commit in commits),
            "epsilon_pct": number(100 * epsilon),
            "concepts": [
                {**self._catalogue.named(head, local_id), "head": head, "score": number(score)}
                for (head, local_id), score in wanted[: self._spec.top_k]
            ],
        }


def chunk_ranges(token_ids: Sequence[int], endofchunk_token_id: int | None) -> list[range]:
    """The runs of tokens between end-of-chunk tokens, without them; empty runs are left out."""
    ends = [position for position, token_id in enumerate(token_ids) if token_id == endofchunk_token_id]
    starts = [0, *(end + 1 for end in ends)]
    return [range(start, end) for start, end in zip(starts, [*ends, len(token_ids)], strict=True) if start < end]


def chunk_scores(attributions: Sequence[TokenAttribution]) -> tuple[dict[tuple[Head, int], float], float]:
    """(head, local id) -> mean share of the concept in the chunk's tokens, and the mean share of epsilon.

    A token's shares are its contributions divided by the sum of their absolute values, epsilon's included, so every
    token has the same say. Shares keep their sign. Source: the reference implementation's `chunk_attribution`.
    """
    shares: dict[tuple[Head, int], float] = defaultdict(float)
    epsilon = 0.0
    heads: tuple[Head, ...] = ("known", "discovered")
    for attribution in attributions:
        parts = [(head, item) for head in heads for item in _of_head(attribution, head)]
        mass = max(sum(abs(item.contribution) for _, item in parts) + abs(attribution.epsilon), _SMALLEST_MASS)
        for head, item in parts:
            shares[head, item.concept_id] += item.contribution / mass
        epsilon += attribution.epsilon / mass
    return {key: share / len(attributions) for key, share in shares.items()}, epsilon / len(attributions)


def number(value: float) -> float | None:
    """Rounded for JSON; None for what JSON has no number for."""
    return round(value, _DIGITS) if -float("inf") < value < float("inf") else None


def _of_head(attribution: TokenAttribution, head: Head) -> tuple[ConceptContribution, ...]:
    return attribution.known if head == "known" else attribution.discovered


def _explained(commit: Commit) -> TokenAttribution:
    assert commit.attribution is not None, f"position {commit.position} was not explained"
    return commit.attribution
