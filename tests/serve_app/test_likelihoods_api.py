"""Estimates of how likely a continuation is, over HTTP."""

from __future__ import annotations

import pytest

from engine import EstimateLikelihood

pytestmark = pytest.mark.anyio
PATH = "/v1/likelihoods"


async def test_an_estimate_comes_with_its_error(server, served):
    target = server()
    body = {"prompt": "an", "continuation": " animal", "num_samples": 4, "batch_size": 2, "seed": 9}
    answer = (await target.post(body, PATH)).json()
    continuation = served.tokenizer.encode(" animal")
    assert target.engine.analyses == [
        EstimateLikelihood(
            prompt_token_ids=served.tokenizer.encode("an"),
            continuation_token_ids=continuation,
            num_samples=4,
            batch_size=2,
            seed=9,
        )
    ]
    assert answer == {
        "object": "likelihood",
        "model": "tiny",
        "log_likelihood": -float(len(continuation)),
        "standard_error": 0.5,
        "num_samples": 4,
        "num_tokens": len(continuation),
    }


@pytest.mark.parametrize(("num_samples", "error"), [(2, None), (3, None), (4, 0.5)])
async def test_the_error_of_one_batch_is_null(server, num_samples, error):
    body = {"continuation": "a", "num_samples": num_samples, "batch_size": 3}
    assert (await server().post(body, PATH)).json()["standard_error"] == error


async def test_a_prompt_may_be_missing_and_ids_stand_for_text(server):
    target = server()
    assert (await target.post({"continuation": [1, 2]}, PATH)).json()["num_tokens"] == 2
    (asked,) = target.engine.analyses
    assert (asked.prompt_token_ids, asked.continuation_token_ids) == ((), (1, 2))


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"prompt": "a"}, "invalid_value", "continuation"),
        ({"continuation": ""}, "invalid_value", "continuation"),
        ({"continuation": []}, "invalid_value", "continuation"),
        ({"continuation": ["a"]}, "invalid_value", "continuation"),
        ({"continuation": [280]}, "invalid_value", "continuation[0]"),
        ({"continuation": "a", "num_samples": 0}, "invalid_value", "num_samples"),
        ({"continuation": "a", "num_samples": 1025}, "invalid_value", "num_samples"),
        ({"continuation": "a", "batch_size": 1025}, "invalid_value", "batch_size"),
        ({"continuation": "a", "seed": -1}, "invalid_value", "seed"),
        ({"continuation": "a", "seed": 2**63}, "invalid_value", "seed"),
        ({"continuation": "a", "cfg_scale": -0.5}, "invalid_value", "cfg_scale"),
        ({"continuation": "a", "cfg_scale": 101}, "invalid_value", "cfg_scale"),
        ({"continuation": "a", "steering": {}}, "invalid_value", "steering"),
        ({"continuation": "a", "num_sample": 4}, "invalid_value", "num_sample"),
        ({"prompt": [1] * 500, "continuation": [1] * 13}, "context_length_exceeded", "prompt"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_what_cannot_be_estimated_is_refused_by_name_before_any_work(server, body, code, param):
    target = server()
    error = (await target.post(body, PATH)).json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert not target.engine.analyses


async def test_a_full_context_is_taken(server):
    body = {"prompt": [1] * 500, "continuation": [1] * 12, "num_samples": 1024, "seed": 2**63 - 1, "cfg_scale": 100}
    assert (await server().post(body, PATH)).status_code == 200
