"""`logprobs`, `echo` and `return_token_ids` of /v1/completions: lists that stay in step with the text."""

from __future__ import annotations

import math

import pytest

from engine import ScoreTokens
from serve_app.rendering.logprobs import TokenEntry, chat_logprobs, completion_logprobs, prompt_offsets, token_key
from tests.serve_app.streams import diffusion_of, events_of, streamed_text

pytestmark = pytest.mark.anyio

LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def joined(events: list[dict], index: int = 0) -> dict[str, list]:
    """The lists of a stream's chunks, put together."""
    parts = [c["logprobs"] for e in events for c in e["choices"] if c["index"] == index and c["logprobs"] is not None]
    return {name: [item for part in parts for item in part[name]] for name in LISTS}


async def test_every_token_has_one_entry_in_every_list(server):
    one = server()
    choice = (await one.post({"prompt": "a", "max_tokens": 20, "seed": 1, "logprobs": 3})).json()["choices"][0]
    lists = choice["logprobs"]
    assert tuple(lists) == LISTS
    assert {len(lists[name]) for name in LISTS} == {20}
    assert lists["token_logprobs"] == [-0.25] * 20
    assert all(
        token in top and len(top) == 3 for token, top in zip(lists["tokens"], lists["top_logprobs"], strict=True)
    )
    assert one.engine.requests[0].sampling.num_logprobs == 3


async def test_a_token_is_among_its_own_top_logprobs_also_where_it_is_not_likely(server):
    lists = (await server().post({"prompt": "a", "max_tokens": 5, "logprobs": 1})).json()["choices"][0]["logprobs"]
    assert all(
        token in top and len(top) == 2 for token, top in zip(lists["tokens"], lists["top_logprobs"], strict=True)
    )
    lists = (await server().post({"prompt": "a", "max_tokens": 5, "logprobs": 0})).json()["choices"][0]["logprobs"]
    assert lists["top_logprobs"] == [{token: -0.25} for token in lists["tokens"]]


async def test_without_logprobs_there_are_none(server):
    one = server()
    assert (await one.post({"prompt": "a", "max_tokens": 5})).json()["choices"][0]["logprobs"] is None
    assert one.engine.requests[0].sampling.num_logprobs == 0


async def test_offsets_are_where_the_tokens_text_begins(server, served):
    one = server(script=served.tokenizer.encode("the sea, été; "))
    choice = (await one.post({"prompt": "a", "max_tokens": 30, "logprobs": 0})).json()["choices"][0]
    text, lists = choice["text"], choice["logprobs"]
    starts = lists["text_offset"]
    for token, start, end in zip(lists["tokens"], starts, [*starts[1:], len(text)], strict=True):
        if not token.startswith("bytes:"):
            assert text[start:end] == token


@pytest.mark.parametrize("fields", [{}, {"stop": ["q", "x"]}, {"diffusion": {"tokens_per_step": 5}}, {"echo": True}])
async def test_a_streams_lists_put_together_are_the_plain_ones(server, fields):
    body = {"prompt": "a small animal", "max_tokens": 60, "seed": 3, "logprobs": 2, "return_token_ids": True, **fields}
    plain = (await server().post(body)).json()["choices"][0]
    events = events_of(await server().post({**body, "stream": True}))
    assert joined(events) == plain["logprobs"]
    assert streamed_text(events) == plain["text"]
    choices = [choice for event in events for choice in event["choices"]]
    assert [token_id for choice in choices for token_id in choice["token_ids"]] == plain["token_ids"]
    assert [c["prompt_token_ids"] for c in choices if "prompt_token_ids" in c] == [plain["prompt_token_ids"]]


async def test_an_entry_never_comes_before_its_text(server, served):
    one = server(script=served.tokenizer.encode("the sea, été; "))
    body = {"prompt": "a", "max_tokens": 90, "stop": "sea, été; t", "logprobs": 0, "stream": True, "min_tokens": 40}
    text = ""
    for event in events_of(await one.post(body)):
        (choice,) = event["choices"]
        text += choice["text"]
        if choice["finish_reason"] is None and choice["logprobs"] is not None:
            assert all(offset <= len(text) for offset in choice["logprobs"]["text_offset"])


async def test_the_tokens_of_a_stop_string_are_returned_though_its_text_is_not(server, served):
    ids = [served.tokenizer.encode(letter)[0] for letter in "abc"]
    body = {"prompt": "a", "max_tokens": 50, "stop": "cab", "logprobs": 0, "return_token_ids": True}
    answer = (await server(script=ids).post(body)).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["token_ids"]) == ("ab", [*ids, *ids[:2]])
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_without_logprobs_puts_the_prompt_before_the_text(server, stream):
    body = {"prompt": ["a small animal", "the sea"], "max_tokens": 20, "seed": 3}
    plain = [choice["text"] for choice in (await server().post(body)).json()["choices"]]
    one = server()
    response = await one.post({**body, "echo": True, "stream": stream})
    if stream:
        events = events_of(response)
        texts = [streamed_text(events, index) for index in range(2)]
    else:
        texts = [choice["text"] for choice in response.json()["choices"]]
    assert texts == [prompt + text for prompt, text in zip(body["prompt"], plain, strict=True)]
    assert not one.engine.analyses


async def test_echo_with_logprobs_scores_prompt_and_text_from_left_to_right(server, served):
    one = server()
    body = {
        "prompt": "a small animal",
        "max_tokens": 4,
        "seed": 3,
        "echo": True,
        "logprobs": 1,
        "return_token_ids": True,
    }
    answer = (await one.post(body)).json()
    choice = answer["choices"][0]
    ids = [*choice["prompt_token_ids"], *choice["token_ids"]]
    assert one.engine.analyses == [ScoreTokens(token_ids=tuple(ids), num_logprobs=1)]
    assert one.engine.requests[0].sampling.num_logprobs == 0, "the generation's own would be thrown away"
    lists = choice["logprobs"]
    assert lists["tokens"] == [token_key(served.tokenizer, token_id) for token_id in ids]
    assert (lists["token_logprobs"][0], lists["top_logprobs"][0]) == (None, None)
    assert lists["token_logprobs"][1:] == [-1.0 - token_id % 7 for token_id in ids[1:]]
    assert lists["text_offset"][:2] == [0, len(served.tokenizer.decode(ids[:1]))]
    assert lists["text_offset"][len(choice["prompt_token_ids"])] == len("a small animal")
    assert choice["text"].startswith("a small animal")
    assert answer["usage"]["completion_tokens"] == 4


async def test_a_harness_reads_the_scores_of_a_continuation(server, served):
    """lm-eval asks for one token, and takes the entries from the context's end to the one before the last."""
    context, whole = served.tokenizer.encode("a sea"), served.tokenizer.encode("a sea animal")
    assert whole[: len(context)] == context
    body = {"prompt": [whole], "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1, "seed": 1234}
    lists = (await server().post(body)).json()["choices"][0]["logprobs"]
    assert len(lists["token_logprobs"]) == len(whole) + 1
    assert sum(lists["token_logprobs"][len(context) : -1]) == sum(-1.0 - i % 7 for i in whole[len(context) :])


@pytest.mark.parametrize("stream", [False, True])
async def test_with_max_tokens_0_the_prompt_is_scored_and_nothing_is_generated(server, served, stream):
    one = server()
    prompts = ["a small animal", "the sea"]
    response = await one.post({"prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 2, "stream": stream})
    if stream:
        events = events_of(response)
        texts, lists = [streamed_text(events, i) for i in range(2)], [joined(events, i) for i in range(2)]
        assert [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]] == ["length"] * 2
    else:
        answer = response.json()
        assert answer["usage"]["completion_tokens"] == 0
        assert "diffusion" not in answer
        texts = [choice["text"] for choice in answer["choices"]]
        lists = [choice["logprobs"] for choice in answer["choices"]]
    assert texts == prompts
    assert [len(item["tokens"]) for item in lists] == [len(served.tokenizer.encode(prompt)) for prompt in prompts]
    assert not one.engine.requests
    assert len(one.engine.analyses) == 2


async def test_with_max_tokens_0_and_no_logprobs_only_the_prompt_comes_back(server):
    one = server()
    answer = (await one.post({"prompt": "the sea", "max_tokens": 0, "echo": True})).json()
    assert answer["choices"][0]["text"] == "the sea"
    assert not (one.engine.requests or one.engine.analyses)


async def test_a_prompt_without_tokens_has_no_scores(server):
    one = server()
    answer = (await one.post({"prompt": "", "max_tokens": 0, "echo": True, "logprobs": 1})).json()
    assert answer["choices"][0]["logprobs"] == {name: [] for name in LISTS}
    assert not one.engine.analyses


async def test_an_echoed_and_scored_stream_keeps_its_diffusion_events(server):
    body = {"prompt": "a sea", "max_tokens": 20, "seed": 1, "echo": True, "logprobs": 0, "stream": True}
    events = events_of(await server().post({**body, "stream_options": {"include_diffusion": "steps"}}))
    positions = [c["position"] for e in diffusion_of(events, "step") for c in e["commits"]]
    assert sorted(positions) == list(range(20))
    assert len([event for event in events if event["choices"] and event["choices"][0]["text"]]) == 1


async def test_choices_and_prompts_are_numbered_together(server):
    one = server()
    body = {"prompt": ["a sea", "an animal"], "n": 2, "max_tokens": 20, "seed": 2, "return_token_ids": True}
    choices = (await one.post(body)).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in choices}) == 4
    asked = [(request.prompt_token_ids, request.sampling.choice_index) for request in one.engine.requests]
    by_index = [(tuple(choice["prompt_token_ids"]), choice["index"] % 2) for choice in choices]
    assert sorted(asked) == sorted(by_index)


async def test_a_prompt_counts_once_however_many_choices_it_has(server):
    body = {"prompt": ["a sea", "an animal"], "max_tokens": 5}
    alone = (await server().post(body)).json()["usage"]
    twice = (await server().post({**body, "n": 2})).json()["usage"]
    assert twice["prompt_tokens"] == alone["prompt_tokens"]
    assert twice["completion_tokens"] == 2 * alone["completion_tokens"]


def test_minus_infinity_is_a_number_that_json_has(served):
    entry = TokenEntry(3, 0, -math.inf, ((4, -0.5), (5, -math.inf)))
    lists = completion_logprobs(served.tokenizer, [entry])
    assert lists["token_logprobs"] == [-9999.0]
    assert sorted(lists["top_logprobs"][0].values()) == [-9999.0, -9999.0, -0.5]
    (token,) = chat_logprobs(served.tokenizer, [entry])["content"]
    assert (token["logprob"], token["top_logprobs"][1]["logprob"]) == (-9999.0, -9999.0)


def test_tokens_that_hold_a_part_of_a_character_keep_names_of_their_own(served):
    """Spelled with U+FFFD, all of them would be one key of `top_logprobs`, and a greedy token not the best one."""
    parts = [
        i for i in range(272) if len(served.tokenizer.text_bytes(i)) == 1 and served.tokenizer.text_bytes(i) > b"\x7f"
    ]
    assert len({token_key(served.tokenizer, token_id) for token_id in parts}) == len(parts) > 100
    assert token_key(served.tokenizer, parts[0]).startswith("bytes:\\x")


def test_offsets_of_a_prompt_count_characters(served):
    ids = served.tokenizer.encode("été a")
    assert prompt_offsets(served.tokenizer, [])[:1] == []
    offsets = prompt_offsets(served.tokenizer, ids)
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    assert offsets[-1] == len("été a") - len(served.tokenizer.decode(ids[-1:]))
