"""Cached scores against the same code without a cache: equal bits, whatever is shared, evicted or under way beside it.

On a CPU the last bits of a product depend on how many rows it has. Where bits are compared, rows therefore run one by
one, which makes each number a function of its row alone, as it is with `deterministic` on a GPU.
"""

from __future__ import annotations

import math
import random
import tracemalloc
from collections.abc import Callable

import pytest
import torch

from engine import Engine, NonFiniteLogits, Scores, ScoreTokens
from engine.analyzing import ScoreCache
from engine.runner.text_passes import TextPasses, TextRow, TokenScore
from tests.checkpoints import Recipe
from tests.records import Records

FOURS = Recipe(name="blocks_of_four", model={"diff_block_size": 4}, seed=5)
BLOCK = FOURS.block
ENTRY = 704 + 8 * BLOCK
"""Bytes of a block's entry without alternatives."""
TOLERANCE = 2e-5


class Read:
    """Results that are there already."""

    def __init__(self, results: list[TokenScore]) -> None:
        self._results = results

    def read(self) -> list[TokenScore]:
        return self._results


class RowByRow:
    """Passes over one row after the other, and a count of both."""

    def __init__(self, passes: TextPasses) -> None:
        self._passes = passes
        self.config, self.max_rows, self.at = passes.config, passes.max_rows, passes.at
        self.num_passes = self.num_rows = 0

    def hidden(self, rows: list[TextRow]) -> torch.Tensor:
        assert 0 < len(rows) <= self.max_rows
        self.num_passes += 1
        self.num_rows += len(rows)
        return torch.cat([self._passes.hidden([row]) for row in rows])

    def scores(self, hidden_MD: torch.Tensor, token_ids: list[int], *, num_logprobs: int) -> Read:
        parts = [
            self._passes.scores(hidden_MD[index : index + 1].clone(), [token_id], num_logprobs=num_logprobs)
            for index, token_id in enumerate(token_ids)
        ]
        return Read([score for part in parts for score in part.read()])


@pytest.fixture
def row_by_row(make_engine) -> Callable[..., Engine]:
    """Engine options -> an engine whose analyses run row by row."""

    def make(**config: object) -> Engine:
        engine = make_engine(FOURS, **config)
        engine.runner.text_passes = RowByRow(engine.runner.text_passes)
        return engine

    return make


def run(engine: Engine, analyses: list[ScoreTokens]) -> list[Scores]:
    """All of them at once, slice by slice."""
    futures = [engine.begin_analysis(analysis) for analysis in analyses]
    for _ in range(5000):
        if not engine.has_work:
            return [future.result(timeout=0) for future in futures]
        engine.step()
        engine.check_integrity()
    raise AssertionError("they do not end")


def texts_with_shared_prefixes(rng: random.Random) -> list[ScoreTokens]:
    """Texts that share each number of tokens from none to four blocks, in any order, some of them twice."""
    base = FOURS.plain_ids(5 * BLOCK, seed=rng.randrange(1000))
    analyses = []
    for shared in range(4 * BLOCK + 2):
        own = FOURS.plain_ids(5 * BLOCK, seed=1000 + rng.randrange(1000))
        length = shared + rng.randint(0, BLOCK + 1)
        analyses.append(
            ScoreTokens(token_ids=[*base[:shared], *own[shared:length]], num_logprobs=rng.choice((0, 1, 3)))
        )
    analyses += rng.choices(analyses, k=4)
    rng.shuffle(analyses)
    return analyses


@pytest.mark.parametrize(
    ("seed", "cache_bytes"),
    [(0, 2**26), (1, 3 * ENTRY), (2, ENTRY), (3, 1)],
    ids=["room for all", "for three blocks", "for one block", "for none"],
)
def test_scores_have_the_bits_that_they_have_without_a_cache(row_by_row, seed, cache_bytes):
    rng = random.Random(seed)
    analyses = texts_with_shared_prefixes(rng)
    plain, cached = row_by_row(score_cache_bytes=0), row_by_row(score_cache_bytes=cache_bytes, num_pages=12)
    expected = [plain.analyze(analysis) for analysis in analyses]
    assert [cached.analyze(analysis) for analysis in analyses] == expected
    if cache_bytes == 2**26:
        assert cached.runner.text_passes.num_rows < plain.runner.text_passes.num_rows
    # And again, several at once, on what is left in the cache.
    while analyses:
        number = rng.randint(1, 6)
        assert run(cached, analyses[:number]) == expected[:number]
        analyses, expected = analyses[number:], expected[number:]


@pytest.mark.parametrize(("max_rows", "cache_bytes"), [(2, 2**26), (5, 2 * ENTRY), (16, 2**26)])
def test_analyses_side_by_side_have_the_bits_that_they_have_alone(row_by_row, max_rows, cache_bytes):
    analyses = texts_with_shared_prefixes(random.Random(max_rows))
    plain = row_by_row(score_cache_bytes=0)
    expected = [plain.analyze(analysis) for analysis in analyses]
    assert run(row_by_row(score_cache_bytes=cache_bytes, max_rows=max_rows), analyses) == expected


def test_in_whole_passes_scores_are_those_without_a_cache_but_for_rounding(make_engine):
    analyses = texts_with_shared_prefixes(random.Random(7))
    plain, cached = make_engine(FOURS, score_cache_bytes=0), make_engine(FOURS)
    for analysis, found in zip(analyses, run(cached, analyses), strict=True):
        expected = plain.analyze(analysis)
        assert found.logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE)
        assert [len(top) for top in found.top_logprobs] == [len(top) for top in expected.top_logprobs]


CONTEXT = tuple(FOURS.plain_ids(50, seed=3))
ENDINGS = [ScoreTokens(token_ids=(*CONTEXT, *FOURS.plain_ids(5, seed=seed))) for seed in range(10, 14)]
"""Four endings of a context of twelve complete blocks and two tokens of another; with their own they fill that one."""


def test_endings_of_one_context_pay_for_its_complete_blocks_once(row_by_row):
    def work_of(cache_bytes: int, *, at_once: bool) -> tuple[int, int]:
        engine = row_by_row(score_cache_bytes=cache_bytes)
        if at_once:
            run(engine, ENDINGS)
        else:
            for analysis in ENDINGS:
                engine.analyze(analysis)
        return engine.runner.text_passes.num_rows, engine.runner.text_passes.num_passes

    # Twelve rows prefill the context, once, and one the block that an ending completes: a pass each time. 47 rows score
    # the context's complete blocks and 7 the rest: 54 rows are four passes, 7 are one.
    assert work_of(0, at_once=False) == (4 * (1 + 54) + 12, 4 * (1 + 4))
    assert work_of(2**26, at_once=False) == (4 * (1 + 7) + 12 + 47, 4 * (1 + 1) + 3)
    # Under way together: one scores the context, the others score their own ends and wait for it.
    assert work_of(0, at_once=True) == (4 * (1 + 54) + 12, 4 * (1 + 4))
    assert work_of(2**26, at_once=True) == (4 * (1 + 7) + 12 + 47, 4 * (1 + 1) + 3)


def test_a_text_of_cached_blocks_alone_takes_no_row_and_no_page(row_by_row):
    engine = row_by_row()
    text = FOURS.plain_ids(3 * BLOCK)
    first = engine.analyze(ScoreTokens(token_ids=[*text, 7], num_logprobs=2))
    before = engine.runner.text_passes.num_rows, engine.stats()
    again = engine.analyze(ScoreTokens(token_ids=text, num_logprobs=1))
    assert (engine.runner.text_passes.num_rows, engine.stats()) == before
    assert again.logprobs == first.logprobs[:-1]
    assert again.top_logprobs == tuple(top[:1] for top in first.top_logprobs[:-1])


def test_a_block_is_known_by_all_tokens_before_it(row_by_row):
    """The same block behind another one, and at another place, has other scores."""
    engine, plain = row_by_row(), row_by_row(score_cache_bytes=0)
    a, b, c = (FOURS.plain_ids(BLOCK, seed=seed) for seed in range(3))
    for text in ([*a, *b], [*c, *b], b, [*a, *a, *b], [*a, *b]):
        asked = ScoreTokens(token_ids=text, num_logprobs=1)
        assert engine.analyze(asked) == plain.analyze(asked)


def test_fewer_alternatives_come_from_the_cache_and_more_are_computed_and_stay(make_engine):
    records = Records()
    engine = make_engine(FOURS, recorder=records)
    text = FOURS.plain_ids(BLOCK)

    def computed(num_logprobs: int) -> float:
        before = records.counts["scored_tokens", "computed"]
        scores = engine.analyze(ScoreTokens(token_ids=text, num_logprobs=num_logprobs))
        assert [len(top) for top in scores.top_logprobs] == [0, *[num_logprobs] * (BLOCK - 1)]
        return records.counts["scored_tokens", "computed"] - before

    assert [computed(number) for number in (2, 2, 0, 3, 2, 3, 20, 1)] == [
        BLOCK - 1,
        0,
        0,
        BLOCK - 1,
        0,
        0,
        BLOCK - 1,
        0,
    ]
    # One that asks for few ends behind one that asks for many: the many stay.
    text = FOURS.plain_ids(BLOCK, seed=1)
    run(engine, [ScoreTokens(token_ids=text, num_logprobs=number) for number in (0, 5, 0)])
    assert computed(5) == 0


def test_what_is_found_and_what_is_computed_is_counted(make_engine):
    records = Records()
    engine = make_engine(FOURS, recorder=records)
    assert records.gauges["score_cache_bytes"] == 0
    for _ in range(2):
        engine.analyze(ScoreTokens(token_ids=FOURS.plain_ids(2 * BLOCK + 3)))
    # Nothing precedes the first token, and the last block is not complete.
    assert records.counts["scored_tokens", "computed"] == (2 * BLOCK + 2) + 3
    assert records.counts["scored_tokens", "cached"] == 2 * BLOCK - 1
    assert records.gauges["score_cache_bytes"] == (704 + 8 * (BLOCK - 1)) + ENTRY


def test_without_a_cache_every_position_is_computed_each_time(make_engine):
    records = Records()
    engine = make_engine(FOURS, recorder=records, score_cache_bytes=0)
    for _ in range(2):
        run(engine, [ScoreTokens(token_ids=FOURS.plain_ids(40))] * 2)
    assert records.counts["scored_tokens", "computed"] == 4 * 39
    assert ("scored_tokens", "cached") not in records.counts
    assert records.gauges["score_cache_bytes"] == 0


@pytest.mark.parametrize("num_steps", [1, 13, 16, 25])
def test_who_waits_for_an_analysis_that_leaves_computes_by_itself(row_by_row, num_steps):
    engine, plain = row_by_row(max_rows=4), row_by_row(score_cache_bytes=0)
    leaving, *staying = [engine.begin_analysis(analysis) for analysis in ENDINGS[:3]]
    for _ in range(num_steps):
        engine.step()
    leaving.cancel()
    for _ in range(2000):
        engine.step()
        engine.check_integrity()
    assert [future.result(timeout=0) for future in staying] == [plain.analyze(a) for a in ENDINGS[1:3]]


def test_scores_that_are_not_finite_are_kept_by_nobody_and_take_those_of_their_text_along(row_by_row):
    """The cause may be what a shared page holds, and then other scores of the text stand on it too."""
    engine = row_by_row()
    sound, longer = (ScoreTokens(token_ids=FOURS.plain_ids(length)) for length in (2 * BLOCK, 3 * BLOCK + 1))
    other = ScoreTokens(token_ids=FOURS.plain_ids(BLOCK, seed=1))
    expected = [engine.analyze(analysis) for analysis in (sound, other)]
    weight = engine.runner.model.transformer.layers[0].mlp.up.weight
    values = weight.clone()
    with torch.no_grad():
        weight.fill_(math.nan)
    with pytest.raises(NonFiniteLogits, match=f"position {2 * BLOCK};"):
        engine.analyze(longer)
    with torch.no_grad():
        weight.copy_(values)
    before = engine.runner.text_passes.num_rows
    assert [engine.analyze(analysis) for analysis in (sound, other)] == expected
    assert engine.runner.text_passes.num_rows - before == 1 + 2 * BLOCK - 1


def test_scores_that_are_not_finite_do_not_stay_where_their_analysis_leaves_before_it_fails(row_by_row):
    engine = row_by_row(max_rows=4)
    asked = ScoreTokens(token_ids=FOURS.plain_ids(3 * BLOCK))
    with torch.no_grad():
        engine.runner.model.transformer.layers[0].mlp.up.weight.fill_(math.nan)
    leaving = engine.begin_analysis(asked)
    for _ in range(4):
        engine.step()
    leaving.cancel()
    engine.step()
    assert not engine.has_work and len(engine._score_cache) == 0


def block_of_scores(seed: int, num_logprobs: int = 0) -> list[TokenScore]:
    rng = random.Random(seed)
    return [
        TokenScore(-rng.random(), tuple((rng.randrange(100), -rng.random()) for _ in range(num_logprobs)))
        for _ in range(BLOCK)
    ]


def test_the_block_that_was_used_longest_ago_goes_first():
    cache = ScoreCache(3 * ENTRY)
    for key in (b"a", b"b", b"c"):
        cache.add(key, 0, block_of_scores(0))
    assert cache.find(b"a", 0) is not None
    cache.add(b"b", 0, block_of_scores(0))
    cache.add(b"d", 0, block_of_scores(0))
    assert [key for key in (b"a", b"b", b"c", b"d") if cache.find(key, 0)] == [b"a", b"b", b"d"]
    assert (len(cache), cache.num_bytes) == (3, 3 * ENTRY)
    # A find that asks for too much is no use.
    assert cache.find(b"a", 1) is None
    cache.add(b"e", 0, block_of_scores(0))
    assert cache.find(b"a", 0) is None


def test_an_entry_larger_than_the_limit_drives_nobody_out():
    cache = ScoreCache(2 * ENTRY)
    cache.add(b"a", 0, block_of_scores(0))
    cache.add(b"b", 20, block_of_scores(1, 20))
    cache.add(b"a", 20, block_of_scores(0, 20))
    assert cache.find(b"a", 0) == block_of_scores(0)
    assert (len(cache), cache.find(b"b", 20)) == (1, None)
    cache.check_integrity(is_idle=True)


def test_numbers_come_back_with_all_their_bits():
    values = [-0.0, -math.inf, -5e-324, -1 / 3, -1e300]
    scores = [TokenScore(value, ((2**31 - 1, value), (0, -value))) for value in values]
    cache = ScoreCache(2**20)
    cache.add(b"a", 2, scores)
    assert repr(cache.find(b"a", 2)) == repr(scores)


def test_a_vocabulary_with_fewer_tokens_than_were_asked_for_gives_them_all():
    cache = ScoreCache(2**20)
    cache.add(b"a", 20, block_of_scores(0, 7))
    assert cache.find(b"a", 20) == cache.find(b"a", 8) == block_of_scores(0, 7)
    assert [len(score.top) for score in cache.find(b"a", 3)] == [3] * BLOCK


def test_a_promise_ends_with_the_one_who_gave_it_last():
    cache, first, second = ScoreCache(2**20), object(), object()
    cache.promise(b"a", 1, by=first)
    assert cache.is_promised(b"a", 1) and not cache.is_promised(b"a", 2) and not cache.is_promised(b"b", 0)
    cache.promise(b"a", 2, by=second)
    cache.release(b"a", by=first)
    assert cache.is_promised(b"a", 2)
    with pytest.raises(AssertionError, match="1 blocks are promised"):
        cache.check_integrity(is_idle=True)
    cache.release(b"a", by=second)
    assert not cache.is_promised(b"a", 0)
    cache.check_integrity(is_idle=True)


@pytest.mark.parametrize(("num_logprobs", "counted"), [(0, 1216), (1, 1216 + 768), (5, 1216 + 5 * 768)])
def test_a_block_takes_no_more_memory_than_it_counts_for_and_not_much_less(num_logprobs, counted):
    """A limit in bytes has to hold on the host: 1.2 KiB a block of 64, and 0.75 KiB for each alternative."""
    cache, number = ScoreCache(2**40), 1000
    scores = [TokenScore(-1.0, ((7, -1.0),) * num_logprobs)] * 64
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for index in range(number):
            cache.add(index.to_bytes(32, "big"), num_logprobs, scores)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert cache.num_bytes == number * counted
    assert 0.6 * cache.num_bytes < taken <= cache.num_bytes
    assert round(2**26 / (1216 + 768), -3) == 34_000, "what docs/serving.md says of 64 MiB and one alternative"
