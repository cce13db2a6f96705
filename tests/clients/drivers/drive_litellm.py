"""litellm as a library: its `openai/` and `text-completion-openai/` routes, plain, streamed and asynchronous."""

from __future__ import annotations

import asyncio
from typing import Any

import litellm
from checks import Checks

checks = Checks("litellm")
SERVER: dict[str, Any] = {"api_base": f"{checks.url}/v1", "api_key": "none", "timeout": 120, "num_retries": 0}
EXTRA: dict[str, Any] = {"ignore_eos": True, "diffusion": {"tokens_per_step": 8}}
COMMON: dict[str, Any] = {"seed": 7, "max_tokens": 70, "extra_body": EXTRA, **SERVER}
CHAT = f"openai/{checks.model}"
TEXT = f"text-completion-openai/{checks.model}"
MESSAGES = [{"role": "user", "content": "an animal with wings"}]
PROMPT = "a small animal that"
answer = text = ""

with checks.part("chat"):
    plain = litellm.completion(CHAT, messages=MESSAGES, **COMMON)
    answer = plain.choices[0].message.content
    own = checks.post(
        "/v1/chat/completions",
        {"model": checks.model, "messages": MESSAGES, "seed": 7, "max_tokens": 70, **EXTRA},
    )
    checks.equal(answer, own["choices"][0]["message"]["content"], "the answer is what the server says")
    checks.equal(plain.choices[0].finish_reason, "length", "max_tokens ends it")
    checks.equal(plain.usage.completion_tokens, 70, "usage counts the tokens")
    chunks = list(
        litellm.completion(CHAT, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **COMMON)
    )
    checks.equal(
        "".join(c.choices[0].delta.content or "" for c in chunks if c.choices), answer, "streamed text is equal"
    )
    rebuilt = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    checks.equal(rebuilt.choices[0].message.content, answer, "litellm rebuilds the answer from the stream")
    checks.equal(rebuilt.usage.completion_tokens, 70, "and its usage")
    checks.equal(rebuilt.choices[0].finish_reason, "length", "and why it ended")

with checks.part("chat, asynchronous"):

    async def ask() -> tuple[str, str]:
        """The same, awaited and as an asynchronous stream."""
        whole = await litellm.acompletion(CHAT, messages=MESSAGES, **COMMON)
        stream = await litellm.acompletion(CHAT, messages=MESSAGES, stream=True, **COMMON)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        return whole.choices[0].message.content, "".join(pieces)

    checks.equal(asyncio.run(ask()), (answer, answer), "awaited and streamed, the answer is equal")

with checks.part("completions"):
    plain = litellm.text_completion(model=TEXT, prompt=PROMPT, **COMMON)
    text = plain.choices[0].text
    checks.that(text.strip(), "there is text", text)
    checks.equal(plain.usage.completion_tokens, 70, "usage counts the tokens")
    stream = litellm.text_completion(model=TEXT, prompt=PROMPT, stream=True, **COMMON)
    checks.equal("".join(c.choices[0].text or "" for c in stream if c.choices), text, "streamed text is equal")
    scored = litellm.text_completion(model=TEXT, prompt=PROMPT, logprobs=2, **COMMON)
    checks.equal(len(scored.choices[0].logprobs.tokens), 70, "log probabilities, one entry a token")

with checks.part("embeddings"):
    found = litellm.embedding(f"openai/{checks.model}", input=[PROMPT, "a plant"], **SERVER)
    own = checks.post("/v1/embeddings", {"model": checks.model, "input": [PROMPT, "a plant"]})
    off = [
        abs(x - y)
        for theirs, ours in zip(found.data, own["data"], strict=True)
        for x, y in zip(theirs["embedding"], ours["embedding"], strict=True)
    ]
    checks.that(max(off) < 1e-5, "the vectors are the server's", max(off))

with checks.part("extensions"):
    body = {**EXTRA, "steering": {"concepts": ["animal"], "strength": 8}}
    steered = litellm.text_completion(model=TEXT, prompt="", **(COMMON | {"extra_body": body}))
    checks.equal(
        steered.model_extra["steering"]["resolved"][0]["concepts"][0]["name"], "animal", "the steering comes back"
    )

with checks.part("errors"):
    try:
        litellm.completion("openai/no-such-model", messages=MESSAGES, **COMMON)
        checks.that(False, "an unknown model is an error")
    except litellm.NotFoundError as error:
        checks.that("no-such-model" in str(error), "an unknown model is a NotFoundError that names it", str(error))
    try:
        litellm.completion(CHAT, messages=MESSAGES, **(COMMON | {"extra_body": {"steering": {"strenght": 1}}}))
        checks.that(False, "a misspelt key of ours is an error")
    except litellm.BadRequestError as error:
        checks.that("steering.strenght" in str(error), "a misspelt key of ours is named", str(error))

checks.finish()
