"""What `vllm bench serve` sends and how it reads the answer, for the completions and chat backends.

The program itself needs all of vLLM, which is too large for a test. The shapes here are those of its request functions
in release 0.1x: a probe first, then streams that are read as they come off the socket.
"""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
from checks import Checks

checks = Checks(None)
PROMPT = "a small animal that"
OUTPUT_LEN = 48


@dataclass
class Answer:
    """What the load tool keeps of one request."""

    text: str = ""
    output_tokens: int = 0
    prompt_tokens: int = 0
    num_timed: int = 0
    """Chunks with a choice: the first stamps the time to the first token, each later one an inter-token latency."""
    num_empty: int = 0
    """Of those, chunks without text, which would stamp a token that is none."""
    got_done: bool = False


class Messages:
    """Server-sent events from stripped pieces of a socket: by blank lines, or once the rest is complete JSON."""

    def __init__(self) -> None:
        self._rest = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def add(self, piece: bytes) -> Iterator[str]:
        """The messages that are complete with `piece`."""
        self._rest += self._decoder.decode(piece)
        *complete, self._rest = self._rest.split("\n\n")
        yield from filter(None, map(str.strip, complete))
        payload = self._rest.removeprefix("data: ").strip()
        if self._rest.startswith("data: ") and (payload == "[DONE]" or is_json(payload)):
            yield self._rest.strip()
            self._rest = ""


def is_json(text: str) -> bool:
    """Whether this is all of a JSON text."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


async def send(session: aiohttp.ClientSession, path: str, body: dict[str, Any], request_id: str) -> Answer:
    """One request, read as the load tool reads it; raises RuntimeError where it would count a failure."""
    answer = Answer()
    headers = {"Authorization": "Bearer none", "x-request-id": request_id}
    async with session.post(f"{checks.url}{path}", json=body, headers=headers) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status} {response.reason}: {await response.text()}")
        messages = Messages()
        async for piece in response.content.iter_any():
            for message in messages.add(piece.strip()):
                if not message.startswith(":"):
                    note(answer, message.removeprefix("data: "))
    if not answer.num_timed:
        raise RuntimeError("never received a chunk that gives the time to the first token")
    return answer


def note(answer: Answer, payload: str) -> None:
    """Take one message in."""
    if payload == "[DONE]":
        answer.got_done = True
        return
    data = json.loads(payload)
    if choices := data.get("choices"):
        text = choices[0]["delta"].get("content") if "delta" in choices[0] else choices[0].get("text")
        answer.text += text or ""
        answer.num_timed += 1
        answer.num_empty += not text
    elif usage := data.get("usage"):
        answer.output_tokens = usage["completion_tokens"]
        answer.prompt_tokens = usage["prompt_tokens"]


def check(answer: Answer, prompt_tokens: int, whole_text: str) -> None:
    """What a report of the load tool rests on."""
    checks.that(answer.got_done, "the stream ends with [DONE]")
    checks.equal(answer.output_tokens, OUTPUT_LEN, "usage counts the tokens asked for")
    checks.equal(answer.prompt_tokens, prompt_tokens, "usage counts the prompt")
    checks.equal(answer.text, whole_text, "the streamed text is the plain one")
    checks.that(answer.num_empty <= 1, "only the chunk with finish_reason may come without text", answer.num_empty)


def completion_body() -> dict[str, Any]:
    """As sent with --ignore-eos, and --temperature 0, which goes in as an extra field. `logprobs` is null."""
    return {
        "model": checks.model,
        "prompt": PROMPT,
        "repetition_penalty": 1.0,
        "max_tokens": OUTPUT_LEN,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0.0,
    }


def chat_body() -> dict[str, Any]:
    """As sent by the chat backend: content as a list of parts."""
    return {
        "model": checks.model,
        "messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}],
        "max_completion_tokens": OUTPUT_LEN,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0.0,
    }


def plain(body: dict[str, Any]) -> dict[str, Any]:
    """The same request without a stream."""
    return {key: value for key, value in body.items() if not key.startswith("stream")}


async def load(path: str, body: dict[str, Any], count: int) -> list[Answer]:
    """A probe, then `count` requests at once."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        probe = await send(session, path, body, "bench-probe")
        rest = await asyncio.gather(*(send(session, path, body, f"bench-{i}") for i in range(count)))
        return [probe, *rest]


with checks.part("models, as for a run without --model"):
    checks.that(checks.model in [model["id"] for model in checks.get("/v1/models")["data"]], "the model is listed")

with checks.part("openai backend"):
    own = checks.post("/v1/completions", plain(completion_body()))
    for answer in asyncio.run(load("/v1/completions", completion_body(), 4)):
        check(answer, len(checks.tokenize(PROMPT)), own["choices"][0]["text"])

with checks.part("openai backend with --logprobs"):
    (answer,) = asyncio.run(load("/v1/completions", completion_body() | {"logprobs": 1}, 0))
    check(answer, len(checks.tokenize(PROMPT)), own["choices"][0]["text"])

with checks.part("openai-chat backend"):
    own = checks.post("/v1/chat/completions", plain(chat_body()))
    for answer in asyncio.run(load("/v1/chat/completions", chat_body(), 4)):
        check(answer, own["usage"]["prompt_tokens"], own["choices"][0]["message"]["content"])

checks.finish()
