"""The engine computes what the reference package computes, on every switch of the configuration.

`python -m tests.parity_table` prints the same comparison as a table.
"""

import pytest

from engine import Engine, EngineConfig, GenerateRequest, SamplingParams
from tests.checkpoints import NO_ROPE, RECIPES, STEERLING_LIKE
from tests.parity import compare_output
from tests.parity_cases import cases, compare, run_engine
from tests.reference import generate

NAMES = [case.name for case in cases(STEERLING_LIKE)]


@pytest.fixture(scope="module", params=RECIPES, ids=lambda recipe: recipe.name)
def run(request, checkpoint, oracle):
    recipe = request.param
    results = run_engine(recipe, checkpoint(recipe))
    return oracle(recipe), {case.name: (case, output) for case, output in results}


@pytest.mark.parametrize("name", NAMES)
def test_commits_logits_and_concepts_equal_the_reference(run, name):
    oracle, results = run
    case, output = results[name]
    result = compare(oracle, case, output)
    assert result.num_commits >= case.request.max_tokens
    assert {"target logit", "logprob", "confidence", "weight", "contribution", "epsilon"} <= set(result.errors)


def test_runs_differ_enough_for_equality_to_mean_something(run):
    _, results = run
    texts = [output.token_ids for _, output in results.values()]
    assert len(set(texts)) > len(texts) // 2
    assert sum(len(set(text)) for text in texts) / len(texts) > 4


def test_without_rotary_embeddings_a_block_is_filled_from_the_left(checkpoint, oracle):
    """All masked positions of a block are then alike, so every choice between them is a tie."""
    engine = Engine.from_checkpoint(checkpoint(NO_ROPE), EngineConfig(device="cpu", num_pages=64))
    requests = [
        GenerateRequest(
            prompt_token_ids=NO_ROPE.plain_ids(length), max_tokens=25, sampling=SamplingParams(temperature=0.0)
        )
        for length in (0, 7, 16, 33)
    ]
    for request, output in zip(requests, engine.generate(requests), strict=True):
        compare_output(output, generate(oracle(NO_ROPE), request))
        start = len(request.prompt_token_ids)
        assert [c.position for c in output.commits] == list(range(start, start + 25))


def test_from_nothing_the_first_token_is_the_leftmost(run):
    """Without a prompt all masked positions are alike until something is committed."""
    _, results = run
    for case, output in results.values():
        if case.length == "nothing":
            first = [c.position for c in output.commits if c.denoising_step == 0]
            assert first == list(range(len(first)))
