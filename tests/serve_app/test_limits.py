"""What one request may ask for, where the operator says less than the model allows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve_app.config import Limits

pytestmark = pytest.mark.anyio


@pytest.fixture
def target(server):
    target = server()
    limits = Limits(max_tokens=5, max_embedding_inputs=2)
    target.app.state.service = replace(target.app.state.service, limits=limits)
    return target


MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": "a"}, "max_tokens"),
        ("/v1/chat/completions", {"messages": MESSAGES}, "max_tokens"),
        ("/v1/chat/completions", {"messages": MESSAGES}, "max_completion_tokens"),
    ],
)
async def test_as_many_tokens_as_the_server_allows_and_no_more(target, path, body, field):
    assert (await target.post({**body, field: 5}, path)).status_code == 200
    response = await target.post({**body, field: 6}, path)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert error["message"] == f"{field} is 6; this server allows 5"


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": MESSAGES})]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_who_does_not_say_how_many_tokens_gets_as_many_as_there_are(target, path, body, stream):
    """Clients that send no limit, for a title in the background for instance, would get nothing but errors."""
    assert (await target.post({**body, "stream": stream}, path)).status_code == 200
    assert target.engine.requests[-1].max_tokens == 5


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(1, 256), (256, 256), (257, 255), (511, 1)])
async def test_the_default_is_what_the_context_leaves_behind_the_prompt(server, num_prompt, max_tokens):
    target = server()
    answer = (await target.post({"prompt": [1] * num_prompt, "n": 2})).json()
    assert [request.max_tokens for request in target.engine.requests] == [max_tokens] * 2
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": [1] * 512}, "the prompt has 512 tokens; at most 511, so that one can follow"),
        ({"prompt": [1] * 600, "max_tokens": 0, "echo": True}, "the prompt has 600 tokens; at most 512"),
        (
            {"prompt": [1] * 500, "max_tokens": 13},
            "the prompt has 500 tokens and max_tokens is 13; together at most 512",
        ),
        ({"prompt": [[1], [1] * 512]}, "prompt[1]: the prompt has 512 tokens; at most 511, so that one can follow"),
        ({"prompt": [7000]}, "prompt[0] is 7000; it must be a token id, an int in [0, 280)"),
        ({"prompt": [[1], [2, 7000]]}, "prompt[1][1] is 7000; it must be a token id, an int in [0, 280)"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_refusal_tells_the_clients_own_numbers_and_names(server, body, message):
    assert (await server().post(body)).json()["error"]["message"] == message


async def test_a_prompt_that_fills_the_context_is_refused_and_so_is_an_asked_for_number_beyond_it(server):
    for body, param in (({"prompt": [1] * 512}, "prompt"), ({"prompt": [1] * 300, "max_tokens": 256}, "max_tokens")):
        error = (await server().post(body)).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)


async def test_prompts_of_several_lengths_each_get_what_is_left(server):
    target = server()
    await target.post({"prompt": [[1] * 500, [1] * 10]})
    assert sorted(request.max_tokens for request in target.engine.requests) == [12, 256]


async def test_a_request_that_is_explained_is_a_request(target):
    request = {"prompt": "a", "max_tokens": 6}
    error = (await target.post({"request": request}, "/v1/attributions/input")).json()["error"]
    assert error["param"] == "request.max_tokens"


async def test_embeddings_have_a_limit_of_their_own(target):
    assert (await target.post({"input": ["a", "b"]}, "/v1/embeddings")).status_code == 200
    assert (await target.post({"input": ["a", "b", "c"]}, "/v1/embeddings")).json()["error"]["param"] == "input"


AT_LIMIT = {
    "max_choices": ("/v1/completions", lambda most: {"prompt": "a", "n": most}, "n"),
    "max_logprobs": ("/v1/completions", lambda most: {"prompt": "a", "logprobs": most}, "logprobs"),
    "max_stop_strings": ("/v1/completions", lambda most: {"prompt": "a", "stop": ["x"] * most}, "stop"),
    "max_stop_length": ("/v1/completions", lambda most: {"prompt": "a", "stop": "x" * most}, "stop"),
    "max_stop_token_ids": (
        "/v1/completions",
        lambda most: {"prompt": "a", "stop_token_ids": list(range(most))},
        "stop_token_ids",
    ),
    "max_messages": (
        "/tokenize",
        lambda most: {"messages": [{"role": "user", "content": ""}] * most},
        "messages",
    ),
    "max_steering_groups": (
        "/v1/completions",
        lambda most: {
            "prompt": "a",
            "steering": {
                "interventions": [
                    {"concepts": [1], "strength": 1.0, "schedule": "hard_cutoff", "cutoff_tokens": 1 + i}
                    for i in range(most)
                ]
            },
        },
        "steering.interventions",
    ),
    "max_strength": (
        "/v1/completions",
        lambda most: {"prompt": "a", "steering": {"concepts": [1], "strength": most}},
        "steering.strength",
    ),
    "max_interventions": (
        "/v1/completions",
        lambda most: {"prompt": "a", "steering": {"interventions": [{"concepts": [1], "strength": 1.0}] * most}},
        "steering.interventions",
    ),
    "max_suppressions": (
        "/v1/completions",
        lambda most: {"prompt": "a", "steering": {"suppress": [{"concept": 1, "strength": 1.0}] * most}},
        "steering.suppress",
    ),
    "max_overrides": (
        "/v1/completions",
        lambda most: {
            "prompt": "a",
            "steering": {"overrides": [{"concept": concept, "weight": 1.0} for concept in range(most)]},
        },
        "steering.overrides",
    ),
    "max_concepts_per_intervention": (
        "/v1/completions",
        lambda most: {"prompt": "a", "steering": {"concepts": [1] * most, "strength": 1.0}},
        "steering.concepts",
    ),
    "max_likelihood_samples": (
        "/v1/likelihoods",
        lambda most: {"continuation": "a", "num_samples": most},
        "num_samples",
    ),
    "max_input_attribution_targets": (
        "/v1/attributions/input",
        lambda most: {"request": {"prompt": "a", "max_tokens": 400}, "targets": list(range(most))},
        "targets",
    ),
    "max_input_attribution_steps": (
        "/v1/attributions/input",
        lambda most: {"request": {"prompt": "a", "max_tokens": 4}, "n_steps": most},
        "n_steps",
    ),
}


@pytest.mark.parametrize("name", AT_LIMIT)
async def test_a_told_limit_is_the_one_that_holds(server, name):
    target = server()
    most = (await target.get("/v1/capabilities")).json()["limits"][name]
    path, body, param = AT_LIMIT[name]
    taken, refused = await target.post(body(most), path), await target.post(body(most + 1), path)
    assert taken.status_code == 200, taken.text
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_every_told_limit_is_tried(target):
    configured = {"max_body_bytes", "max_prompts", "max_tokens", "max_embedding_inputs"}
    assert set((await target.get("/v1/capabilities")).json()["limits"]) == configured | set(AT_LIMIT)


async def test_capabilities_tell_the_limits(target):
    limits = (await target.get("/v1/capabilities")).json()["limits"]
    assert (limits["max_tokens"], limits["max_embedding_inputs"]) == (5, 2)
