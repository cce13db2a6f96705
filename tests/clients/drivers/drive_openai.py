"""The openai package: every call that the server answers, plain, streamed, concurrent and wrong."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import openai
from checks import Checks

checks = Checks("openai")
client = openai.OpenAI(base_url=f"{checks.url}/v1", api_key="none", max_retries=0, timeout=120)
PROMPT = "a small animal that"
SPECIAL = {"<|endofchunk|>", "<|endoftext|>"}
"""Tokens that end a chunk or a text: they have log probabilities, and no text."""
MESSAGES: list[Any] = [
    {"role": "system", "content": "Define words."},
    {"role": "user", "content": [{"type": "text", "text": "an animal "}, {"type": "text", "text": "with wings"}]},
]
# More than a block of 64, so that a stream crosses from one to the next; eight tokens a step, so that it takes no time.
EXTRA: dict[str, Any] = {"ignore_eos": True, "diffusion": {"tokens_per_step": 8}}
COMMON: dict[str, Any] = {"model": checks.model, "seed": 7, "max_tokens": 70, "extra_body": EXTRA}


def gather(chunks: Any, text_of: Any) -> tuple[str, list[Any]]:
    """The streamed text, and the chunks."""
    kept = list(chunks)
    return "".join(text_of(chunk) or "" for chunk in kept if chunk.choices), kept


def check_stream(kept: list[Any], num_tokens: int) -> None:
    """What holds of every default stream with usage."""
    checks.equal([len(chunk.choices) for chunk in kept[-1:]], [0], "the last chunk has usage and no choice")
    checks.that(all(chunk.choices for chunk in kept[:-1]), "every other chunk has a choice")
    checks.that(all(chunk.usage is None for chunk in kept[:-1]), "usage is null before the last chunk")
    checks.equal(kept[-1].usage and kept[-1].usage.completion_tokens, num_tokens, "usage counts the tokens")
    reasons = [chunk.choices[0].finish_reason for chunk in kept[:-1]]
    checks.equal(reasons, [None] * (len(reasons) - 1) + ["length"], "one finish_reason, at the end")
    checks.equal(len({chunk.id for chunk in kept}), 1, "all chunks have one id")


with checks.part("models"):
    checks.that(checks.model in [model.id for model in client.models.list()], "the model is listed")
    checks.equal(client.models.retrieve(checks.model).id, checks.model, "the model is found by its id")

with checks.part("completions"):
    plain = client.completions.create(prompt=PROMPT, **COMMON)
    text = plain.choices[0].text
    checks.that(text.strip(), "there is text", text)
    checks.equal(plain.choices[0].finish_reason, "length", "max_tokens ends it")
    checks.equal(plain.usage and plain.usage.completion_tokens, 70, "max_tokens is exact")
    checks.equal(plain.usage and plain.usage.total_tokens, 70 + len(checks.tokenize(PROMPT)), "the prompt is counted")
    again = client.completions.create(prompt=PROMPT, **COMMON)
    checks.equal(again.choices[0].text, text, "the same seed gives the same text")
    other = client.completions.create(prompt=PROMPT, **(COMMON | {"seed": 8}))
    checks.that(other.choices[0].text != text, "another seed gives another text")

with checks.part("completions streamed"):
    stream = client.completions.create(prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **COMMON)
    streamed, kept = gather(stream, lambda chunk: chunk.choices[0].text)
    checks.equal(streamed, text, "streamed text equals plain text")
    checks.that(len(kept) > 3, "text arrives in pieces", len(kept))
    check_stream(kept, 70)

with checks.part("prompts as token ids and lists"):
    ids = checks.tokenize(PROMPT)
    from_ids = client.completions.create(prompt=ids, **COMMON)
    checks.equal(from_ids.choices[0].text, text, "token ids give what their text gives")
    several = client.completions.create(prompt=[PROMPT, "a plant with"], **COMMON)
    checks.equal([choice.index for choice in several.choices], [0, 1], "one choice a prompt, in order")
    checks.equal(several.choices[0].text, text, "the first prompt's text is as if it were alone")
    lists = client.completions.create(prompt=[ids, checks.tokenize("a plant with")], **COMMON)
    checks.equal([c.text for c in lists.choices], [c.text for c in several.choices], "lists of ids give the same")

with checks.part("n and stop"):
    two = client.completions.create(prompt=PROMPT, n=2, **COMMON)
    checks.equal([choice.index for choice in two.choices], [0, 1], "n choices")
    checks.equal(two.choices[0].text, text, "the first is what n=1 gives")
    checks.that(two.choices[1].text != text, "the second differs")
    checks.equal(two.usage and two.usage.completion_tokens, 140, "usage counts both")
    stop = text[len(text) // 2 :][:4]
    stopped = client.completions.create(prompt=PROMPT, stop=[stop], **COMMON)
    checks.equal(stopped.choices[0].text, text.partition(stop)[0], "the text ends before the stop string")
    checks.equal(stopped.choices[0].finish_reason, "stop", "a stop string is a stop")
    stream = client.completions.create(prompt=PROMPT, stop=stop, stream=True, **COMMON)
    checks.equal(gather(stream, lambda c: c.choices[0].text)[0], stopped.choices[0].text, "streamed, it ends there too")

with checks.part("logprobs and echo"):
    scored = client.completions.create(prompt=PROMPT, logprobs=3, **COMMON)
    table = scored.choices[0].logprobs
    assert table is not None and table.tokens and table.token_logprobs and table.top_logprobs and table.text_offset
    spelled = "".join(token for token in table.tokens if token not in SPECIAL)
    checks.equal(spelled, text, "the tokens spell the text, special ones aside")
    lengths = {len(table.tokens), len(table.token_logprobs), len(table.top_logprobs), len(table.text_offset)}
    checks.equal(lengths, {70}, "every list has one entry a token")
    checks.that(all(-math.inf < p <= 0 for p in table.token_logprobs), "log probabilities are finite and at most 0")
    checks.that(all(3 <= len(top) <= 4 for top in table.top_logprobs), "three alternatives", table.top_logprobs[0])
    checks.equal(table.text_offset[:2], [0, len(table.tokens[0])], "offsets count characters")
    echoed = client.completions.create(prompt=PROMPT, echo=True, logprobs=1, **(COMMON | {"max_tokens": 1}))
    table = echoed.choices[0].logprobs
    assert table is not None and table.tokens and table.token_logprobs
    checks.that(echoed.choices[0].text.startswith(PROMPT), "echo gives the prompt back", echoed.choices[0].text)
    checks.equal(len(table.tokens), len(ids) + 1, "one entry a token of prompt and text")
    checks.equal([p is None for p in table.token_logprobs], [True] + [False] * len(ids), "only the first has none")

with checks.part("chat"):
    chat = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=2, **COMMON)
    message = chat.choices[0].message
    checks.equal(message.role, "assistant", "the answer is the assistant's")
    checks.that((message.content or "").strip(), "there is text")
    checks.equal(chat.choices[0].finish_reason, "length", "max_tokens ends it")
    checks.equal(chat.usage and chat.usage.completion_tokens, 70, "max_tokens is exact")
    entries = (chat.choices[0].logprobs and chat.choices[0].logprobs.content) or []
    checks.equal(len(entries), 70, "log probabilities, one entry a token")
    parts = [bytes(entry.bytes or []) for entry in entries if entry.token not in SPECIAL]
    checks.equal(b"".join(parts).decode(errors="replace"), message.content, "their bytes spell the text")
    checks.that(all(len(entry.top_logprobs) == 2 for entry in entries), "two alternatives each")
    limited = {key: value for key, value in COMMON.items() if key != "max_tokens"}
    fewer = client.chat.completions.create(messages=MESSAGES, max_completion_tokens=5, **limited)
    checks.equal(fewer.usage and fewer.usage.completion_tokens, 5, "max_completion_tokens is exact")
    both = client.chat.completions.create(messages=MESSAGES, n=2, **COMMON)
    checks.equal([c.message.content == message.content for c in both.choices], [True, False], "n=2: the first is alike")

with checks.part("chat streamed"):
    stream = client.chat.completions.create(
        messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **COMMON
    )
    streamed, kept = gather(stream, lambda chunk: chunk.choices[0].delta.content)
    checks.equal(streamed, message.content, "streamed text equals plain text")
    check_stream(kept, 70)
    first = kept[0].choices[0].delta
    checks.that(first.role == "assistant" and first.content, "the role comes with the first text", first)
    # Of an answer that max_tokens ends, the helper would say that it is incomplete.
    stop = (message.content or "")[40:44]
    with client.chat.completions.stream(messages=MESSAGES, stop=stop, **COMMON) as events:
        final = events.get_final_completion()
    before = (message.content or "").partition(stop)[0]
    checks.equal(final.choices[0].message.content, before, "the stream helper gathers the text up to a stop string")

with checks.part("steering and attribution"):
    body = {"steering": {"concepts": ["animal"], "strength": 8}, "attribution": {"level": "token", "top_k": 2}}
    steered = client.completions.create(prompt="", **(COMMON | {"extra_body": {**EXTRA, **body}}))
    extra = steered.model_extra or {}
    checks.equal(extra["steering"]["resolved"][0]["concepts"][0]["name"], "animal", "the concept is resolved")
    tokens = extra["attribution"][0]["tokens"]
    checks.equal(len(tokens), 70, "one attribution a token")
    off = [t["known_total"] + t["discovered_total"] + t["epsilon"] - t["logit"] for t in tokens]
    checks.that(max(map(abs, off)) < 1e-3, "the parts sum to the logit", max(map(abs, off)))
    unsteered = client.completions.create(prompt="", **COMMON)
    checks.that(unsteered.choices[0].text != steered.choices[0].text, "steering changes the text")
    options: Any = {"include_diffusion": "steps"}
    stream = client.completions.create(prompt=PROMPT, stream=True, stream_options=options, **COMMON)
    streamed, kept = gather(stream, lambda chunk: chunk.choices[0].text)
    events = [chunk.model_extra["diffusion"] for chunk in kept if "diffusion" in (chunk.model_extra or {})]
    positions = [commit["position"] for e in events if e.get("type") == "step" for commit in e["commits"]]
    checks.equal(streamed, text, "diffusion events leave the text as it is")
    checks.equal(sorted(positions), list(range(70)), "each position is committed in one event")

with checks.part("embeddings"):
    floats = client.embeddings.create(model=checks.model, input=[PROMPT, "a plant"], encoding_format="float")
    packed = client.embeddings.create(model=checks.model, input=[PROMPT, "a plant"])
    checks.equal([item.index for item in floats.data], [0, 1], "one vector an input, in order")
    width = len(floats.data[0].embedding)
    checks.that(width >= 64, "a vector has the model's width", width)
    pairs = [
        (x, y)
        for f, p in zip(floats.data, packed.data, strict=True)
        for x, y in zip(f.embedding, p.embedding, strict=True)
    ]
    checks.that(max(abs(x - y) for x, y in pairs) < 1e-5, "base64, which the package asks for, holds the same numbers")
    by_id = client.embeddings.create(model=checks.model, input=[checks.tokenize(PROMPT)], encoding_format="float")
    checks.that(
        max(abs(x - y) for x, y in zip(by_id.data[0].embedding, floats.data[0].embedding, strict=True)) < 1e-4,
        "token ids give what their text gives",
    )
    checks.that(floats.data[0].embedding != floats.data[1].embedding, "two texts have two vectors")
    wanted = len(checks.tokenize(PROMPT)) + len(checks.tokenize("a plant"))
    checks.equal(floats.usage.prompt_tokens, wanted, "usage counts the tokens")

with checks.part("errors"):
    try:
        client.completions.create(prompt=PROMPT, model="no-such-model")
        checks.that(False, "an unknown model is an error")
    except openai.NotFoundError as error:
        checks.equal(error.code, "model_not_found", "an unknown model is a NotFoundError with its code")
    try:
        client.completions.create(prompt=PROMPT, **(COMMON | {"extra_body": {"steering": {"strenght": 1}}}))
        checks.that(False, "a misspelt key of ours is an error")
    except openai.BadRequestError as error:
        checks.equal(
            error.param, "steering.strenght", "a misspelt key of ours is a BadRequestError that names its path"
        )
    try:
        client.completions.create(prompt="a " * 3000, **COMMON)
        checks.that(False, "a prompt beyond the context is an error")
    except openai.BadRequestError as error:
        checks.equal(error.code, "context_length_exceeded", "a prompt beyond the context says so")

with checks.part("request ids and disconnects"):
    raw = client.completions.with_raw_response.create(
        prompt=PROMPT, extra_headers={"x-request-id": "mine-1"}, **(COMMON | {"max_tokens": 2})
    )
    checks.equal(raw.headers.get("x-request-id"), "mine-1", "x-request-id is returned")
    checks.that(raw.parse().choices[0].text is not None, "the raw response parses")
    made = client.completions.create(prompt=PROMPT, **(COMMON | {"max_tokens": 2}))
    checks.that(made._request_id, "an id is made where none is given", made._request_id)
    for _ in range(3):
        stream = client.completions.create(prompt=PROMPT, stream=True, **(COMMON | {"max_tokens": 900}))
        next(iter(stream))
        stream.close()
    after = client.completions.create(prompt=PROMPT, **COMMON)
    checks.equal(after.choices[0].text, text, "after abandoned streams the server answers as before")


async def at_once() -> list[str]:
    """One request three times, among three others, all at once."""
    async with openai.AsyncOpenAI(
        base_url=f"{checks.url}/v1", api_key="none", max_retries=0, timeout=120
    ) as concurrent:
        calls = [
            concurrent.completions.create(prompt=PROMPT, **(COMMON | {"seed": seed})) for seed in (7, 1, 7, 2, 7, 3)
        ]
        return [answer.choices[0].text for answer in await asyncio.gather(*calls)]


with checks.part("six at once"):
    texts = asyncio.run(at_once())
    checks.equal({texts[0], texts[2], texts[4]}, {text}, "a request's text does not depend on its neighbours")
    checks.equal(len(set(texts)), 4, "other seeds, other texts")

checks.finish()
