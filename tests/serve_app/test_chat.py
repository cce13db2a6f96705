"""POST /v1/chat/completions on a FakeEngine: messages in, a message out, plain and streamed."""

from __future__ import annotations

import json

import pytest

from tests.serve_app.streams import diffusion_of, events_of

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a sea"}]


def content_of(events: list[dict], index: int = 0) -> str:
    deltas = [c["delta"] for event in events for c in event["choices"] if c["index"] == index]
    return "".join(delta.get("content", "") for delta in deltas)


async def test_a_plain_answer_has_the_shape_of_openais(server):
    response = await server().post({"messages": MESSAGES, "max_tokens": 20, "seed": 3}, CHAT)
    answer = response.json()
    assert response.status_code == 200, answer
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice.keys() == {"index", "message", "logprobs", "finish_reason", "stop_reason"}
    assert choice["message"].keys() == {"role", "content", "refusal"}
    assert (choice["message"]["role"], choice["message"]["refusal"]) == ("assistant", None)
    assert (choice["logprobs"], choice["finish_reason"], choice["stop_reason"]) == (None, "length", None)
    assert answer["usage"]["completion_tokens"] == 20
    assert answer["diffusion"]["seed"] == 3


async def test_the_prompt_is_the_template_filled_in(server, served):
    one = server()
    await one.post({"messages": MESSAGES, "max_tokens": 1}, CHAT)
    rendered = (
        "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|endofchunk|><|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\na sea<|endofchunk|><|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    (request,) = one.engine.requests
    assert list(request.prompt_token_ids) == served.tokenizer.encode_with_special(rendered)
    assert request.prompt_token_ids.count(served.config.eot_id) == 2


@pytest.mark.parametrize(
    ("messages", "same_as"),
    [
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "sea"}]}],
            [{"role": "user", "content": "a\nsea"}],
        ),
        ([{"role": "developer", "content": "x"}], [{"role": "system", "content": "x"}]),
        (
            [{"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "annotations": []}],
            [{"role": "assistant", "content": "x"}],
        ),
    ],
)
async def test_messages_that_mean_the_same_make_the_same_prompt(server, messages, same_as):
    one = server()
    for body in (messages, same_as):
        assert (await one.post({"messages": body, "max_tokens": 1}, CHAT)).status_code == 200
    assert one.engine.requests[0].prompt_token_ids == one.engine.requests[1].prompt_token_ids


async def test_a_final_message_can_be_continued(server, served):
    one = server()
    messages = [*MESSAGES, {"role": "assistant", "content": "The sea "}]
    body = {"messages": messages, "max_tokens": 1, "add_generation_prompt": False, "continue_final_message": True}
    assert (await one.post(body, CHAT)).status_code == 200
    text = served.tokenizer.decode(one.engine.requests[0].prompt_token_ids)
    assert text.endswith("assistant\n\nThe sea ")
    assert one.engine.requests[0].prompt_token_ids[-1] != served.config.eot_id


@pytest.mark.parametrize("path", [CHAT, "/tokenize", "/v1/concepts/inspect"])
async def test_a_name_that_no_encoding_can_carry_is_refused(server, path):
    """Contents were checked and names were not: a template that shows names made the tokenizer fail with a 500."""
    field = "input" if path.endswith("inspect") else "messages"
    answer = await server().post({field: [{**MESSAGES[0], "name": "a\ud800"}]}, path)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == f"{field}[0].name"
    assert "surrogate" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "limit", [{"max_tokens": 7}, {"max_completion_tokens": 7}, {"max_tokens": 7, "max_completion_tokens": 7}]
)
async def test_both_names_of_the_limit_are_exact(server, limit):
    answer = (await server().post({"messages": MESSAGES, **limit}, CHAT)).json()
    assert answer["usage"]["completion_tokens"] == 7


async def test_without_a_limit_there_are_256_tokens(server):
    assert (await server().post({"messages": MESSAGES}, CHAT)).json()["usage"]["completion_tokens"] == 256


async def test_a_default_stream_holds_standard_chunks_and_the_role_comes_with_the_first_text(server):
    body = {"messages": MESSAGES, "max_tokens": 40, "seed": 3}
    plain = (await server().post(body, CHAT)).json()["choices"][0]["message"]["content"]
    events = events_of(await server().post({**body, "stream": True}, CHAT))
    assert all(event.keys() == {"id", "object", "created", "model", "choices"} for event in events)
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    choices = [event["choices"][0] for event in events]
    assert choices[0]["delta"].keys() == {"role", "content"}
    assert choices[0]["delta"]["content"]
    assert all(choice["delta"].keys() == {"content"} and choice["delta"]["content"] for choice in choices[1:-1])
    assert choices[-1]["delta"] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert content_of(events) == plain


async def test_a_stream_without_any_text_still_says_who_is_silent(server, served):
    one = server(script=[served.config.eot_id])
    (event,) = events_of(await one.post({"messages": MESSAGES, "stream": True}, CHAT))
    (choice,) = event["choices"]
    assert choice["delta"] == {"role": "assistant", "content": ""}
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)


async def test_usage_and_diffusion_events_travel_in_chunks_without_choices(server):
    options = {"include_usage": True, "include_diffusion": "steps"}
    body = {"messages": MESSAGES, "max_tokens": 20, "stream": True, "stream_options": options}
    *others, last = events_of(await server().post(body, CHAT))
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 20)
    assert all(event["usage"] is None for event in others)
    assert all(event["choices"] == [] for event in others if "diffusion" in event)
    positions = [c["position"] for e in diffusion_of(others, "step") for c in e["commits"]]
    assert sorted(positions) == list(range(20))


async def test_logprobs_are_objects_with_bytes(server, served):
    body = {"messages": MESSAGES, "max_tokens": 12, "seed": 1, "logprobs": True, "top_logprobs": 2}
    choice = (await server().post(body, CHAT)).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == 12
    spelled = b"".join(bytes(entry["bytes"]) for entry in content)
    assert spelled.decode("utf-8", "replace") == choice["message"]["content"]
    assert all(entry["logprob"] == -0.25 and len(entry["top_logprobs"]) == 2 for entry in content)
    assert content[0]["top_logprobs"][1]["bytes"] == content[0]["bytes"]
    assert choice["logprobs"]["refusal"] is None
    events = events_of(await server().post({**body, "stream": True}, CHAT))
    streamed = [entry for e in events for c in e["choices"] if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert streamed == content


async def test_token_ids_come_on_request(server, served):
    body = {"messages": MESSAGES, "max_tokens": 12, "seed": 1, "return_token_ids": True}
    one = server()
    answer = (await one.post(body, CHAT)).json()
    assert answer["prompt_token_ids"] == list(one.engine.requests[0].prompt_token_ids)
    assert served.tokenizer.decode(answer["choices"][0]["token_ids"]) == answer["choices"][0]["message"]["content"]
    events = events_of(await one.post({**body, "stream": True}, CHAT))
    assert [i for e in events for c in e["choices"] for i in c["token_ids"]] == answer["choices"][0]["token_ids"]
    assert [e["prompt_token_ids"] for e in events if "prompt_token_ids" in e] == [answer["prompt_token_ids"]]


async def test_choices_have_one_prompt_and_other_words(server):
    body = {"messages": MESSAGES, "max_tokens": 20, "seed": 1, "n": 3}
    one = server()
    answer = (await one.post(body, CHAT)).json()
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert len(set(texts)) == 3
    assert [request.sampling.choice_index for request in one.engine.requests] == [0, 1, 2]
    alone = (await one.post({**body, "n": 1}, CHAT)).json()
    assert texts[0] == alone["choices"][0]["message"]["content"]
    assert answer["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 60
    events = events_of(await one.post({**body, "stream": True}, CHAT))
    assert [content_of(events, index) for index in range(3)] == texts


BAD_MESSAGES = [
    ({"messages": None}, "messages", "invalid_value"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": "hello"}, "messages", "invalid_value"),
    ({"messages": ["hello"]}, "messages[0]", "invalid_value"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "invalid_value"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "invalid_value"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "invalid_value"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]", "invalid_value"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "invalid_value"),
    ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [MESSAGES[0], {"content": "a"}]}, "messages[1].role", "invalid_value"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role", "unsupported_field"),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}
            ]
        },
        "messages[0].content[1].type",
        "unsupported_field",
    ),
    ({"messages": [{"role": "user", "content": "sea " * 2000}]}, "messages", "context_length_exceeded"),
    ({"messages": [{"role": "user", "content": "sea " * 20_000}]}, "messages", "context_length_exceeded"),
    (
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]},
        "messages[0].tool_calls",
        "unsupported_field",
    ),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"logprobs": 1}, "logprobs", "invalid_value"),
    ({"continue_final_message": True}, "continue_final_message", "invalid_value"),
    ({"echo": True}, "echo", "unsupported_field"),
    ({"chat_template": "{{ messages }}"}, "chat_template", "unsupported_field"),
    ({"tools": [{"type": "function"}]}, "tools", "unsupported_field"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "unsupported_field"),
    ({"verbosity": "high"}, "verbosity", "unsupported_field"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "unsupported_field"),
    ({"n": 5}, "n", "invalid_value"),
]


@pytest.mark.parametrize(("fields", "param", "code"), BAD_MESSAGES, ids=lambda value: str(value)[:60])
async def test_a_bad_field_is_refused_by_its_path(server, fields, param, code):
    one = server()
    response = await one.post(json.dumps({"messages": MESSAGES, **fields}), CHAT)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code), error
    assert not one.engine.requests


async def test_what_clients_send_along_is_tolerated(server):
    extras = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "tools": None,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "stop": None,
        "logprobs": False,
        "modalities": ["text"],
    }
    assert (await server().post({"messages": MESSAGES, "max_tokens": 2, **extras}, CHAT)).status_code == 200


async def test_a_checkpoint_without_template_says_where_to_go(server, served):
    one = server()
    one.without_chat_template()
    response = await one.post({"messages": MESSAGES}, CHAT)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "chat_template_missing", "messages")
    assert "/v1/completions" in error["message"]
