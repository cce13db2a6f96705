"""Tokens over HTTP, for clients that have no tokenizer."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.anyio


async def tokenize(server, **body):
    response = await server().post(body, "/tokenize")
    return response.json() if response.status_code == 200 else response.json()["error"]


async def test_a_prompt_becomes_its_tokens(server, served):
    answer = await tokenize(server, prompt="an animal", return_token_strs=True)
    assert answer["tokens"] == served.tokenizer.encode("an animal")
    assert "".join(answer["token_strs"]) == "an animal"
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 512)


async def test_token_strings_come_only_when_asked_for(server):
    assert (await tokenize(server, prompt="an animal"))["token_strs"] is None


async def test_the_name_of_a_special_token_is_one_id_here_and_text_in_a_prompt(server, served):
    """lm-eval learns the id of the end of a text by asking for `<|endoftext|>`."""
    answer = await tokenize(server, prompt="<|endoftext|>", add_special_tokens=False)
    assert answer["tokens"] == [served.config.eos_token_id]
    around = await tokenize(server, prompt="sea<|endoftext|><|mask|>sea")
    sea = served.tokenizer.encode("sea")
    assert around["tokens"] == [*sea, served.config.eos_token_id, served.config.mask_token_id, *sea]
    assert len(served.tokenizer.encode("<|endoftext|>")) > 1


async def test_messages_become_what_a_chat_completion_is_asked_with(server, served):
    target = server()
    messages = [{"role": "user", "content": "sing <|endoftext|>"}]
    answer = (await target.post({"messages": messages}, "/tokenize")).json()
    await target.post({"messages": messages, "max_tokens": 1}, "/v1/chat/completions")
    assert tuple(answer["tokens"]) == target.engine.requests[0].prompt_token_ids
    assert answer["tokens"][0] == served.config.start_header_id
    assert served.config.eos_token_id not in answer["tokens"], "what people write is text"


async def test_messages_need_a_chat_template(server):
    target = server()
    target.without_chat_template()
    response = await target.post({"messages": [{"role": "user", "content": "a"}]}, "/tokenize")
    assert (response.status_code, response.json()["error"]["code"]) == (400, "chat_template_missing")
    assert (await target.get("/tokenizer_info")).json()["chat_template"] is None
    assert (await server().get("/tokenizer_info")).json()["chat_template"]


async def test_an_empty_prompt_has_no_tokens(server):
    assert (await tokenize(server, prompt=""))["tokens"] == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": []}, "messages"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ({"messages": [{"role": "cat", "content": "a"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": "a"}], "continue_final_message": True},
            "continue_final_message",
        ),
        ({"prompt": 3}, "prompt"),
        ({"prompt": "a", "model": "other"}, "model"),
        ({"prompt": "\ud800"}, "prompt"),
    ],
    ids=str,
)
async def test_what_cannot_be_tokenized_is_refused_by_name(server, body, param):
    assert (await tokenize(server, **body))["param"] == param


@pytest.mark.parametrize("text", ["", "été in the sea", "<|endoftext|>a<|bos|>", "\x00\n"])
async def test_detokenize_gives_back_what_tokenize_took(server, text):
    tokens = (await tokenize(server, prompt=text))["tokens"]
    response = await server().post({"tokens": tokens}, "/detokenize")
    assert response.json() == {"prompt": text}


@pytest.mark.parametrize(("tokens", "param"), [([0, 280], "tokens[1]"), ([-1], "tokens[0]"), (["a"], "tokens[0]")])
async def test_an_id_that_is_none_is_refused_by_its_place(server, tokens, param):
    response = await server().post({"tokens": tokens}, "/detokenize")
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_the_largest_id_has_a_text(server, served):
    response = await server().post({"tokens": [served.config.vocab_size - 1]}, "/detokenize")
    assert response.json() == {"prompt": "<|mask|>"}


async def test_tokenizer_info_names_the_special_tokens_so_that_they_are_found_again(server, served):
    info = (await server().get("/tokenizer_info")).json()
    for name in ("eos", "bos", "pad", "mask"):
        tokens = (await tokenize(server, prompt=info[f"{name}_token"]))["tokens"]
        assert tokens == [info[f"{name}_token_id"]] == [getattr(served.config, f"{name}_token_id")]
    assert set(info["additional_special_tokens"]) >= {"<|eot_id|>", "<|endofchunk|>"}
    assert (info["model_max_length"], info["vocab_size"]) == (512, 280)
