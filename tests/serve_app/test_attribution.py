from __future__ import annotations

import math

import pandas as pd
import pytest
import torch
from steerling.attribution.concept_attribution import ConceptLabels, OutputToConceptAttribution, chunk_attribution
from steerling.attribution.utils import find_chunk_boundaries

from engine import Commit, ConceptContribution, TokenAttribution
from serve_app.attribution import AttributionWriter, TextToken, chunk_ranges, chunk_scores, number
from serve_app.schemas import AttributionSpec


def random_attributions(num_tokens: int, seed: int) -> list[TokenAttribution]:
    generator = torch.Generator().manual_seed(seed)

    def head(size: int, num_concepts: int) -> tuple[ConceptContribution, ...]:
        ids = torch.randperm(num_concepts, generator=generator)[:size].tolist()
        values = torch.randn(size, generator=generator).double().tolist()
        items = [ConceptContribution(i, 0.5, value) for i, value in zip(ids, values, strict=True)]
        return tuple(sorted(items, key=lambda item: -abs(item.contribution)))

    epsilons = torch.randn(num_tokens, generator=generator).double().tolist()
    return [TokenAttribution(head(4, 6), head(5, 9), 0.0, 0.0, epsilon) for epsilon in epsilons]


class Ids(ConceptLabels):
    """Labels that are ids, so that the reference's entries can be told apart."""

    def __init__(self) -> None:
        self._labels, self._heads, self._df = {}, {}, pd.DataFrame()


@pytest.mark.parametrize("seed", range(5))
def test_chunk_scores_equal_the_reference(seed):
    attributions = random_attributions(7, seed)

    def stack(head: str, field: str) -> torch.Tensor:
        return torch.tensor([[[getattr(item, field) for item in getattr(a, head)] for a in attributions]])

    epsilon = torch.tensor([[a.epsilon for a in attributions]])
    reference = OutputToConceptAttribution(
        target_token_ids=torch.zeros(1, 7, dtype=torch.long),
        target_logits=torch.zeros(1, 7),
        known_indices=stack("known", "concept_id"),
        known_weights=stack("known", "weight"),
        known_contributions=stack("known", "contribution"),
        unk_indices=stack("discovered", "concept_id"),
        unk_weights=stack("discovered", "weight"),
        unk_contributions=stack("discovered", "contribution"),
        epsilon_contribution=epsilon,
        committed=torch.ones(1, 7, dtype=torch.bool),
    )
    entries, epsilon_pct = chunk_attribution(reference, 1, 6, concept_labels=Ids())
    scores, share = chunk_scores(attributions[1:6])
    expected = {(entry["type"], int(entry["label"].rpartition("#")[2])): entry["contribution"] for entry in entries}
    assert scores == pytest.approx(expected, abs=1e-6)
    assert 100 * share == pytest.approx(epsilon_pct, abs=1e-4)


@pytest.mark.parametrize(
    ("ids", "ranges"),
    [
        ([], []),
        ([1, 2], [range(0, 2)]),
        ([1, 9, 2, 3, 9], [range(0, 1), range(2, 4)]),
        ([9, 1], [range(1, 2)]),
        ([1, 9, 9, 2], [range(0, 1), range(3, 4)]),
        ([9], []),
    ],
)
def test_chunks_lie_between_end_of_chunk_tokens(ids, ranges):
    assert chunk_ranges(ids, 9) == ranges
    # The reference also gives the empty ones, which no text belongs to.
    reference = find_chunk_boundaries(ids, 9, include_final_chunk=True)
    assert [range(*pair) for pair in reference if pair[0] < pair[1]] == ranges


def test_without_an_end_of_chunk_token_all_is_one_chunk():
    assert chunk_ranges([1, 9, 2], None) == [range(0, 3)]


def entry(served, level: str, **spec):
    ids = served.tokenizer.encode("a sea")
    attributions = random_attributions(len(ids), 3)
    tokens = [
        TextToken(Commit(10 + i, token_id, 5 - i, 0.5, 7.25, -math.inf, (), attribution), len(ids) - 1 - i, 0)
        for i, (token_id, attribution) in enumerate(zip(ids, attributions, strict=True))
    ]
    writer = AttributionWriter(AttributionSpec(level=level, **spec), served.catalogue, served.tokenizer)
    return writer.choice(3, tokens, endofchunk_token_id=served.config.endofchunk_token_id), attributions


def test_levels_choose_what_is_written(served):
    assert entry(served, "token")[0].keys() == {"index", "tokens"}
    assert entry(served, "chunk")[0].keys() == {"index", "chunks"}
    assert entry(served, "both")[0].keys() == {"index", "tokens", "chunks"}


def test_a_token_tells_where_it_came_from_and_names_its_concepts(served):
    written, attributions = entry(served, "token", top_k=2)
    token = written["tokens"][1]
    assert (token["position"], token["step"], token["block"]) == (1, 4, 0)
    assert bytes(token["bytes"]).decode() == token["token"]
    assert token["logprob"] is None, "JSON has no minus infinity"
    known, discovered = attributions[1].known[0], attributions[1].discovered[0]
    assert token["known"][0]["id"] == known.concept_id
    assert token["known"][0]["name"] == served.catalogue.get(known.concept_id).name
    assert token["discovered"][0]["id"] == 50 + discovered.concept_id
    assert (len(token["known"]), len(token["discovered"])) == (2, 2)


def test_only_wanted_heads_are_listed_but_totals_are_always_there(served):
    token = entry(served, "token", heads=["discovered"])[0]["tokens"][0]
    assert "known" not in token
    assert token.keys() >= {"discovered", "known_total", "discovered_total", "epsilon"}


def test_a_chunk_lists_its_largest_scores_of_both_heads(served):
    written, attributions = entry(served, "chunk", top_k=3)
    (chunk,) = written["chunks"]
    assert (chunk["start"], chunk["text"]) == (0, "a sea")
    scores, _ = chunk_scores(attributions)
    largest = sorted(scores.values(), key=abs, reverse=True)[:3]
    assert [item["score"] for item in chunk["concepts"]] == pytest.approx(largest, abs=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_cannot_hold_becomes_null(value):
    assert number(value) is None
