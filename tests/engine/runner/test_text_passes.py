"""Rows of texts over pages against dense forwards, and parts of one size against parts of any size."""

from __future__ import annotations

import pytest
import torch

from engine.analysis import EmbedTokens, InspectTokens, ScoreTokens
from engine.analyzing.embed import start_embedding
from engine.analyzing.inspect import start_inspection
from engine.analyzing.score import start_scores
from engine.analyzing.score_cache import ScoreCache
from engine.analyzing.texts import Tools
from engine.runner.text_passes import TextPasses, TextRow
from tests.checkpoints import EOT, NO_CORRECTION

TOLERANCE = 2e-5


def test_rows_over_pages_are_the_dense_forward(make_engine):
    """Blocks of two texts in one pass, on pages in no order, one text ending within a block."""
    engine = make_engine(EOT)
    passes, model = engine.runner.text_passes, engine.runner.model
    texts, tables = [EOT.plain_ids(48, seed=1), EOT.plain_ids(24, seed=2)], [(5, 0, 9), (2, 7)]
    rows = []
    for text, table in zip(texts, tables, strict=True):
        for block in range(len(table)):
            ids = text[16 * block : 16 * (block + 1)]
            rows.append(
                TextRow(
                    block=block,
                    token_ids=(*ids, *[0] * (16 - len(ids))),
                    page_ids=table[: block + 1],
                    key_length=min(16 * (block + 1), len(text)),
                )
            )
    hidden_RCD = passes.hidden(rows)
    dense = [model.hidden_dense(torch.tensor([text]))[0] for text in texts]
    torch.testing.assert_close(hidden_RCD[:3].flatten(0, 1), dense[0], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(hidden_RCD[3:].flatten(0, 1)[:24], dense[1], atol=TOLERANCE, rtol=0)
    picked_MD = passes.at(hidden_RCD, [(2, 3), (0, 15), (2, 3)])
    torch.testing.assert_close(picked_MD, dense[0][[35, 15, 35]], atol=TOLERANCE, rtol=0)


def test_too_many_rows_for_a_pass_are_a_mistake_of_ours(make_engine):
    engine = make_engine(EOT, max_rows=2)
    row = TextRow(block=0, token_ids=(1,) * 16, page_ids=(0,), key_length=16)
    with pytest.raises(AssertionError, match="3 rows in a pass of at most 2"):
        engine.runner.text_passes.hidden([row] * 3)


@pytest.mark.parametrize("recipe", [EOT, NO_CORRECTION], ids=lambda r: r.name)
def test_parts_of_one_size_give_the_same_numbers(make_engine, recipe):
    """What `deterministic` does on a GPU: positions are filled up to whole blocks, and go to the device one by one."""
    engine = make_engine(recipe)
    usual = engine.runner.text_passes
    fixed = TextPasses(
        engine.runner.model,
        usual._backend,
        max_rows=5,
        filler_page=engine.runner.cache.scratch_page,
        is_deterministic=True,
    )
    text = recipe.plain_ids(40)

    def ask(passes):
        tools = Tools(passes, engine.scheduler.lending, ScoreCache(0))
        for work in (
            start_scores(ScoreTokens(token_ids=text, num_logprobs=2), tools),
            start_embedding(EmbedTokens(token_ids=text, kind="discovered"), tools),
            start_inspection(InspectTokens(token_ids=text, top_k=3), tools),
        ):
            while True:
                try:
                    next(work)
                except StopIteration as ended:
                    yield ended.value
                    break

    for expected, found in zip(ask(usual), ask(fixed), strict=True):
        match expected:
            case _ if hasattr(expected, "logprobs"):
                assert found.logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE)
                assert [[i for i, _ in top] for top in found.top_logprobs] == [
                    [i for i, _ in top] for top in expected.top_logprobs
                ]
            case _ if hasattr(expected, "vector"):
                assert found.vector == pytest.approx(expected.vector, abs=TOLERANCE)
            case _:
                assert len(found.tokens) == len(expected.tokens) == 40
                for ours, theirs in zip(found.tokens, expected.tokens, strict=True):
                    assert [c.concept_id for c in ours.known] == [c.concept_id for c in theirs.known]
