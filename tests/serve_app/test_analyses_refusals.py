"""What analyses of text refuse, on a real engine: a fault is told by the name that the body has for it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.serve_app.real_api import RealApi, real_api

pytestmark = pytest.mark.anyio


@pytest.fixture
async def api(folder, served) -> AsyncIterator[RealApi]:
    """Its pages are for half a context."""
    async with real_api(folder, served, kind=RealApi, num_pages=16) as api:
        yield api


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": [1, 279]}, "input[1]"),
        ("/v1/embeddings", {"input": [[1], [2, 279]]}, "input[1][1]"),
        ("/v1/concepts/inspect", {"input": [279]}, "input[0]"),
        ("/v1/likelihoods", {"prompt": [279], "continuation": "a"}, "prompt[0]"),
        ("/v1/likelihoods", {"continuation": [279]}, "continuation[0]"),
        ("/v1/completions", {"prompt": [1, 279], "max_tokens": 0, "echo": True, "logprobs": 0}, "prompt"),
    ],
)
async def test_a_mask_is_no_text_and_is_named_where_it_stands(api, served, path, body, param):
    assert served.config.mask_token_id == 279
    error = await api.refusal(path, body)
    assert error["param"] == param and "mask token" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": [1] * 400}, "input"),
        ("/v1/concepts/inspect", {"input": [1] * 400}, "input"),
        ("/v1/likelihoods", {"continuation": [1] * 400}, "continuation"),
        ("/v1/completions", {"prompt": [1] * 400, "max_tokens": 0, "echo": True, "logprobs": 0}, "prompt"),
    ],
)
async def test_a_text_that_needs_more_pages_than_there_are_is_named_as_the_body_has_it(api, path, body, param):
    error = await api.refusal(path, body)
    assert error["param"] == param and error["message"].startswith(f"{param} needs ")
