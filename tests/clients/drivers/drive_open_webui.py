"""What Open WebUI sends for one conversation: models, a streamed answer, then title, tags and follow-ups.

The program itself is a web application too large for a test.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
from checks import Checks

checks = Checks(None)
USER_HEADERS = {
    "Authorization": "Bearer none",
    "X-OpenWebUI-User-Name": "Ada",
    "X-OpenWebUI-User-Id": "1",
    "X-OpenWebUI-User-Email": "ada@example.com",
    "X-OpenWebUI-User-Role": "user",
    "X-OpenWebUI-Chat-Id": "chat-1",
}
QUESTION = "an animal with wings"
UNKNOWN: dict[str, Any] = {
    "session_id": "session-1",
    "chat_id": "chat-1",
    "id": "message-2",
    "parent_id": "message-1",
    "user_message": {"id": "message-1", "role": "user", "content": QUESTION},
    "background_tasks": {"title_generation": True, "tags_generation": True, "follow_up_generation": True},
    "features": {"voice": False, "image_generation": False, "code_interpreter": False, "web_search": False},
    "variables": {"{{USER_NAME}}": "Ada", "{{CURRENT_DATE}}": "2026-11-30"},
    "model_item": {"id": checks.model, "object": "model", "owned_by": "openai"},
    "params": {},
    "tool_servers": [],
}
"""What a direct connection from the browser sends beside what the API knows."""


async def converse(body: dict[str, Any]) -> tuple[str, list[dict[str, Any]], list[str]]:
    """The streamed text, its chunks, and the lines that are none."""
    text, chunks, others = "", [], []
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session,
        session.post(f"{checks.url}/v1/chat/completions", json=body, headers=USER_HEADERS) as response,
    ):
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {await response.text()}")
        checks.that("text/event-stream" in response.headers["content-type"], "a stream says that it is one")
        async for line in response.content:
            payload = line.decode().strip()
            if payload.startswith("data: {"):
                chunks.append(json.loads(payload.removeprefix("data: ")))
                for choice in chunks[-1]["choices"]:
                    text += choice["delta"].get("content") or ""
            elif payload:
                others.append(payload)
    return text, chunks, others


with checks.part("models"):
    listed = checks.get("/v1/models")
    checks.equal(listed["object"], "list", "a list of models")
    found = {model["id"]: model for model in listed["data"]}
    checks.that(checks.model in found, "the model is listed", list(found))
    checks.equal(found[checks.model]["object"], "model", "it is a model")
    checks.that({"created", "owned_by"} <= set(found[checks.model]), "it has what the list shows", found[checks.model])

answer = ""
with checks.part("a streamed answer"):
    body = {
        "stream": True,
        "model": checks.model,
        "messages": [{"role": "user", "content": QUESTION}],
        "stream_options": {"include_usage": True},
        "max_tokens": 60,
        "seed": 7,
    }
    answer, chunks, others = asyncio.run(converse(body | UNKNOWN))
    checks.that(answer.strip(), "there is text", answer)
    checks.equal(others, ["data: [DONE]"], "nothing but data lines, [DONE] last")
    own = checks.post("/v1/chat/completions", {key: body[key] for key in body if not key.startswith("stream")})
    checks.equal(answer, own["choices"][0]["message"]["content"], "fields that the API does not know change nothing")
    checks.equal(chunks[-1]["usage"], own["usage"], "the usage that it shows is right")

with checks.part("the next turn"):
    turns = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": [{"type": "text", "text": "and one with fins"}]},
    ]
    text, _, _ = asyncio.run(converse(body | {"messages": turns} | UNKNOWN))
    checks.that(text.strip(), "a conversation goes on", text)

TASKS = {
    "title": "### Task:\nGive a title of 3 to 5 words for the chat, as JSON with the key title.\n<chat>{chat}</chat>",
    "tags": "### Task:\nGive 1 to 3 tags for the chat's subjects, as JSON with the key tags.\n<chat>{chat}</chat>",
    "follow-ups": "### Task:\nSuggest 3 questions that the user may ask next.\n<chat>{chat}</chat>",
}
for name, prompt in TASKS.items():
    with checks.part(f"{name}, in the background"):
        content = prompt.format(chat=f"USER: {QUESTION}\nASSISTANT: {answer}")
        request: dict[str, Any] = {
            "model": checks.model,
            "messages": [{"role": "user", "content": content}],
            "stream": False,
        }
        if name == "title":
            # What the model's settings there say; 1000 unless told otherwise, more than the demo's context leaves.
            request["max_completion_tokens"] = 64
        whole = checks.post("/v1/chat/completions", request)
        checks.that(isinstance(whole["choices"][0]["message"]["content"], str), "a whole answer", whole)
        checks.that(
            0 < whole["usage"]["completion_tokens"] <= request.get("max_completion_tokens", 256), "not too long"
        )

checks.finish()
