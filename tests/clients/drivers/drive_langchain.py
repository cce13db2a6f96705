"""langchain-openai: ChatOpenAI, OpenAI and OpenAIEmbeddings."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import tiktoken
from checks import Checks
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

checks = Checks("langchain-openai")
SERVER: dict[str, Any] = {"base_url": f"{checks.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 120}
EXTRA: dict[str, Any] = {"ignore_eos": True, "diffusion": {"tokens_per_step": 8}}
COMMON: dict[str, Any] = {"model": checks.model, "seed": 7, "max_tokens": 70, "extra_body": EXTRA}
PROMPT = "a small animal that"
QUESTION = [("system", "Define words."), ("human", "an animal with wings")]

with checks.part("ChatOpenAI"):
    chat = ChatOpenAI(**COMMON, **SERVER)
    answer = chat.invoke(QUESTION)
    checks.that(str(answer.content).strip(), "there is text", answer.content)
    checks.equal((answer.usage_metadata or {}).get("output_tokens"), 70, "usage counts the tokens")
    checks.equal(answer.response_metadata.get("finish_reason"), "length", "max_tokens ends it")
    pieces = list(chat.stream(QUESTION, stream_usage=True))
    checks.equal("".join(str(piece.content) for piece in pieces), answer.content, "streamed text is equal")
    whole = pieces[0]
    for piece in pieces[1:]:
        whole = whole + piece
    checks.equal((whole.usage_metadata or {}).get("output_tokens"), 70, "the stream's usage counts the tokens")
    checks.equal(whole.response_metadata.get("finish_reason"), "length", "the stream says why it ended")
    batch = asyncio.run(chat.abatch([QUESTION, [("human", "a plant")]]))
    checks.equal(len({str(item.content) for item in batch}), 2, "a batch has an answer each")
    scored = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    checks.equal(len(scored.response_metadata["logprobs"]["content"]), 70, "log probabilities, one entry a token")
    stop = str(answer.content)[30:34]
    stopped = chat.invoke(QUESTION, stop=[stop])
    checks.equal(stopped.content, str(answer.content).partition(stop)[0], "the text ends before the stop string")

with checks.part("OpenAI"):
    # Sends `logprobs: null, seed: null` and penalties that ask for nothing, unless told otherwise.
    bare = OpenAI(model=checks.model, max_tokens=8, temperature=0, **SERVER)
    checks.equal(bare.invoke(PROMPT), bare.invoke(PROMPT), "temperature 0 gives the same text again")
    model = OpenAI(**COMMON, **SERVER)
    text = model.invoke(PROMPT)
    checks.that(text.strip(), "there is text", text)
    checks.equal("".join(model.stream(PROMPT)), text, "streamed text is equal")
    generated = model.generate([PROMPT, "a plant with"])
    checks.equal(len({item[0].text for item in generated.generations}), 2, "two prompts in one request, a text each")
    usage = (generated.llm_output or {}).get("token_usage", {})
    checks.equal(usage.get("completion_tokens"), 140, "usage counts both")


def served_vocabulary() -> tiktoken.Encoding:
    """The served model's byte-level vocabulary as tiktoken's, for a client that knows tiktoken only.

    A published Steerling has a vocabulary that tiktoken has too; the demo's is its own.
    """
    content = json.loads((Path(checks.checkpoint) / "tokenizer.json").read_text(encoding="utf-8"))
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}
    special = {token["content"]: token["id"] for token in content["added_tokens"]}
    ranks = {
        bytes(alphabet[letter] for letter in token): rank
        for token, rank in content["model"]["vocab"].items()
        if token not in special
    }
    pattern = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
    return tiktoken.Encoding("served", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


with checks.part("OpenAIEmbeddings"):
    # By default it cuts texts with OpenAI's vocabulary; `check_embedding_ctx_length=False` sends them as they are.
    embeddings = OpenAIEmbeddings(model=checks.model, check_embedding_ctx_length=False, **SERVER)
    vectors = embeddings.embed_documents([PROMPT, "a plant"])
    own = checks.post("/v1/embeddings", {"model": checks.model, "input": [PROMPT, "a plant"]})["data"]
    off = [
        abs(x - y)
        for theirs, ours in zip(vectors, own, strict=True)
        for x, y in zip(theirs, ours["embedding"], strict=True)
    ]
    checks.that(max(off) < 1e-5, "the vectors are the server's", max(off))
    single = embeddings.embed_query(PROMPT)
    checks.that(max(abs(x - y) for x, y in zip(single, vectors[0], strict=True)) < 1e-4, "one text alone is alike")

with checks.part("OpenAIEmbeddings as token ids"):
    encoding = served_vocabulary()
    checks.equal(encoding.encode_ordinary(PROMPT), checks.tokenize(PROMPT), "the client cuts texts as the server does")
    tiktoken.registry.ENCODINGS[encoding.name] = encoding
    tiktoken.model.MODEL_TO_ENCODING[checks.model] = encoding.name
    by_ids = OpenAIEmbeddings(model=checks.model, **SERVER).embed_documents([PROMPT, "a plant"])
    off = [abs(x - y) for a, b in zip(by_ids, vectors, strict=True) for x, y in zip(a, b, strict=True)]
    checks.that(max(off) < 1e-4, "arrays of token ids give what their texts give", max(off))

checks.finish()
