"""How far the analyses of a checkpoint are from the reference package: what the parity table prints of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from engine import (
    EmbedTokens,
    Engine,
    EngineConfig,
    EstimateLikelihood,
    InspectTokens,
    Likelihood,
    ScoreTokens,
)
from engine.analyzing.likelihood import estimate
from engine.analyzing.noisy_rows import Mask, NoisyText
from engine.analyzing.score_cache import ScoreCache
from engine.analyzing.texts import Tools
from tests.checkpoints import Recipe
from tests.oracle import Oracle
from tests.text_oracle import plain_concepts, plain_embedding, plain_likelihood, plain_scores

Errors = dict[str, float]


def estimate_with(engine: Engine, asked: EstimateLikelihood, masks: Iterable[Mask]) -> Likelihood:
    """The engine's estimate with masks that somebody else drew."""
    prompt, continuation = tuple(asked.prompt_token_ids), tuple(asked.continuation_token_ids)
    is_guided = asked.cfg_scale > 0 and bool(prompt)
    text = NoisyText(prompt, continuation, engine.model_config, is_guided=is_guided)
    tools = Tools(engine.runner.text_passes, engine.scheduler.lending, ScoreCache(0))
    slices = estimate(text, masks, asked, tools)
    while True:
        try:
            next(slices)
        except StopIteration as ended:
            result: Likelihood = ended.value
            return result
        engine.check_integrity()


def analysis_errors(recipe: Recipe, oracle: Oracle, folder: Path) -> Errors:
    """The largest difference of each analysis, over texts that end before, at and behind a block's edge.

    Absolute for scores, embeddings and concepts; a likelihood, which is a sum over tokens, relative.
    """
    config = EngineConfig(device="cpu", dtype="float32", num_pages=64, max_rows=5)
    engine = Engine.from_checkpoint(folder, config)
    errors: Errors = {}
    for length in (recipe.block - 1, recipe.block, recipe.block + 2):
        token_ids = recipe.plain_ids(length, seed=length)
        for name, error in _errors(engine, oracle, token_ids):
            errors[name] = max(errors.get(name, 0.0), error)
    return errors


def _errors(engine: Engine, oracle: Oracle, token_ids: list[int]) -> Iterator[tuple[str, float]]:
    scores = engine.analyze(ScoreTokens(token_ids=token_ids))
    expected = plain_scores(oracle, token_ids, engine.model_config.block_size)
    for token_id, logprob, logprob_V in zip(token_ids, scores.logprobs, expected, strict=True):
        if logprob_V is not None:
            yield "score", abs(logprob - float(logprob_V[token_id]))
    for kind in ("hidden", "composed", "known", "discovered"):
        for pooling in ("mean", "last", "first"):
            vector = engine.analyze(EmbedTokens(token_ids=token_ids, kind=kind, pooling=pooling)).vector
            theirs = plain_embedding(oracle, token_ids, kind, pooling).tolist()
            yield f"{kind} embedding", max(abs(a - b) for a, b in zip(vector, theirs, strict=True))
    tokens = engine.analyze(InspectTokens(token_ids=token_ids, top_k=5)).tokens
    for token, heads in zip(tokens, plain_concepts(oracle, token_ids, 5), strict=True):
        for found, wanted in zip((token.known, token.discovered), heads, strict=True):
            for concept, (_, weight, _) in zip(found, wanted, strict=True):
                yield "concept weight", abs(concept.weight - weight)
    middle = len(token_ids) // 3
    for cfg_scale in (0.0, 1.5):
        asked = EstimateLikelihood(
            prompt_token_ids=token_ids[:middle],
            continuation_token_ids=token_ids[middle:],
            num_samples=7,
            batch_size=3,
            cfg_scale=cfg_scale,
        )
        theirs = plain_likelihood(
            oracle, token_ids[:middle], token_ids[middle:], num_samples=7, batch_size=3, cfg_scale=cfg_scale
        )
        ours = estimate_with(engine, asked, theirs.masks)
        name = "guided likelihood" if cfg_scale else "likelihood"
        yield name, abs(ours.log_likelihood / theirs.log_likelihood - 1)
