"""POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import uuid
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from .completions import Completion
from .disconnect import EventStream, until_disconnect
from .rendering import AnswerFormat, ChatFormat, CompletionFormat
from .schemas import ChatRequest, CompletionRequest, GenerateFields
from .schemas.answers import CHAT_RESPONSES, COMPLETION_RESPONSES
from .service import QUEUE_HEADERS, api_errors, caller_of, service_of, with_named_preset
from .translation import make_jobs

router = APIRouter(tags=["generate"])


@router.post("/v1/completions", openapi_extra=QUEUE_HEADERS, responses=COMPLETION_RESPONSES)
async def create_completion(request: Request, body: CompletionRequest) -> Response:
    """Continue prompts, plain or as server-sent events."""
    return await _generate(request, body, CompletionFormat(body, service_of(request).checkpoint.tokenizer))


@router.post("/v1/chat/completions", openapi_extra=QUEUE_HEADERS, responses=CHAT_RESPONSES)
async def create_chat_completion(request: Request, body: ChatRequest) -> Response:
    """Answer a conversation, plain or as server-sent events."""
    return await _generate(request, body, ChatFormat(body, service_of(request).checkpoint.tokenizer))


async def _generate(request: Request, body: GenerateFields, answer_format: AnswerFormat) -> Response:
    service = service_of(request)
    completion_id = f"{answer_format.id_prefix}{uuid.uuid4().hex}"
    with api_errors():
        body = await with_named_preset(body, service)
        jobs = make_jobs(body, service.checkpoint, completion_id=completion_id, configured=service.limits)
        completion = Completion(
            service.client, body, jobs, service.checkpoint, answer_format, completion_id, caller_of(request)
        )
        if body.stream:
            return EventStream(await until_disconnect(request.receive, _started(completion)))
        return JSONResponse(await until_disconnect(request.receive, _finished(completion)))


async def _finished(completion: Completion) -> dict[str, Any]:
    async with aclosing(completion):
        return await completion.answer()


async def _started(completion: Completion) -> Any:
    """The completion's events, once it has begun; what refuses it is raised here, while a status can still say it."""
    await completion.start()

    async def events() -> Any:
        async with aclosing(completion):
            async for event in completion.stream():
                yield event

    return events()
