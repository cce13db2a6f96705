"""Concepts of clean texts against the reference package's own heads."""

from __future__ import annotations

import pytest

from engine import InspectTokens
from tests.checkpoints import EOT, NO_DISCOVERED, RECIPES
from tests.text_oracle import plain_concepts

TOLERANCE = 2e-5


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_each_token_has_the_packages_concepts_weights_and_contributions(make_engine, oracle, recipe):
    token_ids = recipe.plain_ids(recipe.block + 5)
    tokens = make_engine(recipe, max_rows=2).analyze(InspectTokens(token_ids=token_ids, top_k=20)).tokens
    expected = plain_concepts(oracle(recipe), token_ids, 20)
    for ours, theirs in zip(tokens, expected, strict=True):
        for found, wanted in zip((ours.known, ours.discovered), theirs, strict=True):
            assert len(found) == len(wanted)
            # Two weights that are equal to rounding may swap places.
            assert [c.weight for c in found] == pytest.approx([weight for _, weight, _ in wanted], abs=TOLERANCE)
            contributions = {concept: contribution for concept, _, contribution in wanted[:-1]}
            for concept in found[:-1]:
                assert concept.contribution == pytest.approx(contributions[concept.concept_id], abs=TOLERANCE)


def test_weights_descend_and_no_concept_comes_twice(make_engine):
    for token in make_engine(EOT).analyze(InspectTokens(token_ids=EOT.plain_ids(20), top_k=50)).tokens:
        for found in (token.known, token.discovered):
            weights = [concept.weight for concept in found]
            assert weights == sorted(weights, reverse=True)
            assert len({concept.concept_id for concept in found}) == len(found) == 50


def test_more_concepts_than_exist_give_all_and_none_gives_none(make_engine):
    engine = make_engine(NO_DISCOVERED)
    (token,) = engine.analyze(InspectTokens(token_ids=(3,), top_k=1024)).tokens
    assert (len(token.known), len(token.discovered)) == (50, 0)
    nothing = engine.analyze(InspectTokens(token_ids=(3, 4), top_k=0)).tokens
    assert [(token.known, token.discovered) for token in nothing] == [((), ())] * 2


def test_a_text_inspected_again_on_cached_pages_is_the_same(make_engine):
    engine = make_engine(EOT, max_rows=3, num_pages=4)
    asked = InspectTokens(token_ids=EOT.plain_ids(37), top_k=3)
    first, second = engine.analyze(asked), engine.analyze(asked)
    for a, b in zip(first.tokens, second.tokens, strict=True):
        assert [c.concept_id for c in a.known] == [c.concept_id for c in b.known]
        assert [c.contribution for c in a.known] == pytest.approx([c.contribution for c in b.known], abs=TOLERANCE)
