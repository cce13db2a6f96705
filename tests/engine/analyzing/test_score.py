"""Scores against the reference package on texts whose blocks are masked by hand."""

from __future__ import annotations

import pytest

from engine import GenerateRequest, InvalidValue, PromptTooLong, RequestTooLarge, SamplingParams, ScoreTokens
from tests.checkpoints import EOT, NO_ROPE, RECIPES, STEERLING_LIKE, UNTIED, Recipe
from tests.text_oracle import plain_scores

TOLERANCE = 2e-5
CUT_CONTEXT = Recipe(name="context_ends_within_a_block", model={"block_size": 40})
CASES = [
    (EOT, (2, 15, 16, 17, 32, 37)),
    (STEERLING_LIKE, (63, 65)),
    (UNTIED, (31, 33, 64)),
    (CUT_CONTEXT, (33, 40)),
    (NO_ROPE, (19,)),
    *((recipe, (recipe.block + 3,)) for recipe in RECIPES if recipe.name.startswith("no_epsilon")),
]


@pytest.mark.parametrize(
    ("recipe", "length"), [pytest.param(r, n, id=f"{r.name}-{n}") for r, lengths in CASES for n in lengths]
)
def test_each_token_is_scored_with_its_block_masked_from_there_on(make_engine, oracle, recipe, length):
    token_ids = recipe.plain_ids(length, seed=length)
    engine = make_engine(recipe, max_rows=8)
    scores = engine.analyze(ScoreTokens(token_ids=token_ids, num_logprobs=4))
    expected = plain_scores(oracle(recipe), token_ids, engine.model_config.block_size)
    assert len(scores.logprobs) == len(scores.top_logprobs) == length
    assert (scores.logprobs[0], scores.top_logprobs[0]) == (None, ())
    for position in range(1, length):
        logprob_V = expected[position]
        assert scores.logprobs[position] == pytest.approx(float(logprob_V[token_ids[position]]), abs=TOLERANCE)
        top = logprob_V.topk(4)
        assert [value for _, value in scores.top_logprobs[position]] == pytest.approx(
            top.values.tolist(), abs=TOLERANCE
        )
        for token_id, value in scores.top_logprobs[position]:
            assert value == pytest.approx(float(logprob_V[token_id]), abs=TOLERANCE)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_scores_of_a_prefix_are_the_first_scores_of_the_whole(make_engine, length):
    """A score must not tell how long the text is: the block is masked to its end, also past the text's."""
    token_ids = EOT.plain_ids(45)
    whole = make_engine(EOT).analyze(ScoreTokens(token_ids=token_ids))
    part = make_engine(EOT).analyze(ScoreTokens(token_ids=token_ids[:length]))
    assert part.logprobs == pytest.approx(whole.logprobs[:length], abs=TOLERANCE)


@pytest.mark.parametrize("config", [{"max_rows": 2}, {"num_pages": 33}, {"share_prefixes": False}])
def test_scores_depend_neither_on_rows_a_pass_nor_on_pages(make_engine, config):
    token_ids = EOT.plain_ids(512)
    plenty = make_engine(EOT, max_rows=64).analyze(ScoreTokens(token_ids=token_ids[:70]))
    scores = make_engine(EOT, **config).analyze(ScoreTokens(token_ids=token_ids[:70]))
    assert scores.logprobs == pytest.approx(plenty.logprobs, abs=TOLERANCE)


def test_texts_without_a_scored_token_cost_nothing(make_engine):
    engine = make_engine(EOT)
    empty = engine.analyze(ScoreTokens(token_ids=()))
    single = engine.analyze(ScoreTokens(token_ids=(7,), num_logprobs=3))
    assert (empty.logprobs, empty.top_logprobs) == ((), ())
    assert (single.logprobs, single.top_logprobs) == ((None,), ((),))
    assert engine.stats().pages_free == engine.stats().num_pages


def test_complete_blocks_are_prefilled_once_for_scores_and_generation(make_engine):
    engine = make_engine(EOT)
    token_ids = EOT.plain_ids(40)
    first = engine.analyze(ScoreTokens(token_ids=token_ids))
    assert engine.stats().pages_cached == 2
    second = engine.analyze(ScoreTokens(token_ids=token_ids))
    assert engine.stats().pages_cached == 2
    request = GenerateRequest(prompt_token_ids=token_ids, max_tokens=3, sampling=SamplingParams(temperature=0.0))
    assert engine.generate([request])[0].num_cached_tokens == 32
    assert second.logprobs == pytest.approx(first.logprobs, abs=TOLERANCE)


def test_blocks_that_generation_wrote_serve_scores(make_engine):
    engine, alone = make_engine(EOT), make_engine(EOT)
    request = GenerateRequest(
        prompt_token_ids=EOT.plain_ids(20), max_tokens=40, sampling=SamplingParams(temperature=0.0, ignore_eos=True)
    )
    output = engine.generate([request])[0]
    cached = engine.stats().pages_cached
    assert cached == 3
    text = [*request.prompt_token_ids, *output.token_ids]
    scores = engine.analyze(ScoreTokens(token_ids=text))
    assert engine.stats().pages_cached == cached
    assert scores.logprobs == pytest.approx(alone.analyze(ScoreTokens(token_ids=text)).logprobs, abs=TOLERANCE)


def test_the_last_token_of_the_context_is_scored_and_one_more_is_refused(make_engine):
    engine = make_engine(CUT_CONTEXT)
    token_ids = CUT_CONTEXT.plain_ids(41)
    assert engine.analyze(ScoreTokens(token_ids=token_ids[:40])).logprobs[39] is not None
    with pytest.raises(PromptTooLong, match="token_ids has 41 tokens; together at most 40"):
        engine.begin_analysis(ScoreTokens(token_ids=token_ids))


@pytest.mark.parametrize(
    ("token_id", "words"), [(-1, "it must be a token id"), (97, "it must be a token id"), (96, "the mask token 96")]
)
def test_ids_that_are_no_tokens_of_a_text_are_refused(make_engine, token_id, words):
    engine = make_engine(EOT)
    with pytest.raises(InvalidValue, match=rf"token_ids\[1\] is .*{words}") as refused:
        engine.begin_analysis(ScoreTokens(token_ids=(3, token_id)))
    assert refused.value.param == "token_ids"
    assert not engine.has_work


def test_a_text_that_no_pool_of_this_size_can_hold_is_refused_at_the_door(make_engine):
    engine = make_engine(EOT, num_pages=3)
    assert engine.analyze(ScoreTokens(token_ids=EOT.plain_ids(48))).logprobs[47] is not None
    with pytest.raises(RequestTooLarge, match="needs 4 pages at once and the engine has 3"):
        engine.begin_analysis(ScoreTokens(token_ids=EOT.plain_ids(49)))
