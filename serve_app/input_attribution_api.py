"""POST /v1/attributions/input: which input tokens drove generated ones. POST /v1/traces/replay: a trace checked.

Positions in answers count as the trace's do, from the prompt's first token; `targets` counts from the first generated
token, as attributions of an answer's tokens do.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from engine import (
    Aborted,
    AttributeInputs,
    Commit,
    Committed,
    Event,
    Finished,
    GenerateRequest,
    InputAttribution,
    Output,
    Replay,
    ReplayTrace,
    TargetAttribution,
    Trace,
    Unsupported,
    limits,
    trace_of,
)

from .attribution import number
from .completions import Caller, EngineClient
from .errors import TOLD_ERRORS, UNSUPPORTED_FIELD, ApiError, http_param, to_api_error
from .rendering import require_text
from .schemas import ChatRequest, CompletionRequest
from .schemas.input_attribution import (
    InputAttributionAnswer,
    InputAttributionRequest,
    ReplayAnswer,
    ReplayRequest,
    Role,
)
from .service import QUEUE_HEADERS, Service, answer_of, caller_of, service_of, with_named_preset
from .translation import Checkpoint, check_model, make_jobs

router = APIRouter(tags=["attributions"])

_TRACE_FIELDS = frozenset(field.name for field in fields(Trace))


@router.post("/v1/attributions/input", openapi_extra=QUEUE_HEADERS, response_model=InputAttributionAnswer)
async def attribute_inputs(request: Request, body: InputAttributionRequest) -> Response:
    """Explain generated tokens by the tokens that the model saw when it chose them: integrated gradients."""
    service = service_of(request)
    check_model(body.model, service.checkpoint)
    return JSONResponse(await answer_of(request, _attributed(service, body, caller_of(request))))


@router.post("/v1/traces/replay", response_model=ReplayAnswer)
async def replay(request: Request, body: ReplayRequest) -> Response:
    """What the served model makes of each commit of a trace, beside what was recorded."""
    service = service_of(request)
    check_model(body.model, service.checkpoint)
    replayed = await answer_of(request, _replayed(service.client, body.trace))
    name = service.checkpoint.tokenizer.token_name
    return JSONResponse(
        {
            "object": "trace_replay",
            "model": service.checkpoint.model_id,
            "commits": [
                {
                    "position": commit.position,
                    "token": name(commit.token_id),
                    "token_id": commit.token_id,
                    "denoising_step": commit.denoising_step,
                    "logit": number(commit.target_logit),
                    "logprob": number(commit.logprob),
                    "rank": commit.rank,
                    "recorded_logit": commit.recorded_logit,
                }
                for commit in replayed.commits
            ],
            "num_likeliest": sum(commit.rank == 0 for commit in replayed.commits),
            "largest_difference": (
                None if replayed.largest_difference is None else number(replayed.largest_difference)
            ),
        }
    )


async def _replayed(client: EngineClient, raw_trace: dict[str, Any]) -> Replay:
    with _named_in_trace(), _unexplained():
        result = await client.analyze(ReplayTrace(trace=Trace.from_dict(raw_trace)))
    assert isinstance(result, Replay), result
    return result


async def _attributed(service: Service, body: InputAttributionRequest, caller: Caller) -> dict[str, Any]:
    with _named_in_trace() if body.trace is not None else nullcontext():
        trace, seed = await _trace(service, body, caller)
        targets = _targets(body.targets, trace, service.checkpoint)
        found = InputAttribution(targets=(), num_steps=body.n_steps)
        if targets:
            wanted = AttributeInputs(trace=trace, targets=targets, num_steps=body.n_steps)
            found = await _analyzed(service.client, wanted)
    answer = {
        "object": "input_attribution",
        "model": service.checkpoint.model_id,
        "tokens": [token.to_json(service.checkpoint) for token in _input_tokens(trace, service.checkpoint)],
        "targets": [_target(target, trace, service.checkpoint, body.top_k) for target in found.targets],
        "n_steps": found.num_steps,
        "trace": trace.to_dict(),
    }
    return answer if seed is None else answer | {"diffusion": {"seed": seed}}


async def _trace(service: Service, body: InputAttributionRequest, caller: Caller) -> tuple[Trace, int | None]:
    """The trace to explain, and the seed if it was generated for this."""
    if body.request is None:
        return Trace.from_dict(body.trace), None
    with _named_within("request"):
        engine_request = _engine_request(await with_named_preset(body.request, service), service)
        # With nothing to explain: what the engine never explains is refused before anything is generated.
        empty = Trace(
            prompt_token_ids=engine_request.prompt_token_ids,
            max_tokens=engine_request.max_tokens,
            commits=(),
            steering=engine_request.steering,
            cfg_scale=engine_request.sampling.cfg_scale,
        )
        await _analyzed(service.client, AttributeInputs(trace=empty))
    _check_targets(body.targets, engine_request.max_tokens)
    output = await _output(service.client.generate(engine_request, caller))
    return trace_of(engine_request, output), output.seed


def _engine_request(request: CompletionRequest | ChatRequest, service: Service) -> GenerateRequest:
    if request.stream:
        raise ApiError(400, "there is nothing to stream here; leave it out", code=UNSUPPORTED_FIELD, param="stream")
    only_one = service.limits.model_copy(update={"max_prompts": 1})
    (job,) = make_jobs(request, service.checkpoint, completion_id=f"attr-{uuid.uuid4().hex}", configured=only_one)
    if job.engine_request is None:
        message = "max_tokens is 0, so there is nothing to explain; at least 1"
        raise ApiError(400, message, code="invalid_value", param="max_tokens")
    # Neither concepts nor alternatives are returned.
    plain = replace(job.engine_request.sampling, num_logprobs=0)
    return replace(job.engine_request, sampling=plain, attribution=None)


def _check_targets(targets: list[int] | None, max_tokens: int) -> None:
    """Raise ApiError for what can be seen to be refused before anything is generated."""
    if targets is None and max_tokens > limits.MAX_TARGETS:
        message = (
            f"max_tokens is {max_tokens} and at most {limits.MAX_TARGETS} tokens are explained at once; name `targets`"
        )
        raise ApiError(400, message, code="invalid_value", param="targets")
    for index, target in enumerate(targets or ()):
        if not 0 <= target < max_tokens:
            message = f"targets[{index}] is {target}; generated tokens are counted from 0 to {max_tokens - 1}"
            raise ApiError(400, message, code="invalid_value", param=f"targets[{index}]")


def _targets(asked: list[int] | None, trace: Trace, checkpoint: Checkpoint) -> tuple[int, ...]:
    """Positions to explain, absolute: those asked for, or the text's. Raises ApiError for one that is not there."""
    start, end = len(trace.prompt_token_ids), _end(trace, checkpoint)
    committed = {commit.position for commit in trace.commits}
    if asked is None:
        return tuple(sorted(position for position in committed if end is None or position < end))
    for index, target in enumerate(asked):
        if start + target not in committed:
            message = f"targets[{index}] is {target}, where the generation chose no token"
            raise ApiError(400, message, code="invalid_value", param=f"targets[{index}]")
    return tuple(start + target for target in asked)


async def _analyzed(client: EngineClient, analysis: AttributeInputs) -> InputAttribution:
    with _unexplained():
        result = await client.analyze(analysis)
    assert isinstance(result, InputAttribution), result
    return result


@contextmanager
def _unexplained() -> Iterator[None]:
    """Give what no gradient and no replay is served for a code of its own: no single field of the body is at fault."""
    try:
        yield
    except Unsupported as error:
        known = to_api_error(error)
        raise ApiError(400, known.message, code="attribution_unsupported", param=known.param) from error


async def _output(source: AsyncGenerator[tuple[Event, ...], None]) -> Output:
    """A generation's output with its commits, once it has ended. Raises Aborted or RequestFailed if it has failed."""
    commits: list[Commit] = []
    async with aclosing(source) as batches:
        async for events in batches:
            # Finished has none: each has come with a Committed.
            commits += (commit for event in events if isinstance(event, Committed) for commit in event.commits)
            if isinstance(last := events[-1], Finished):
                require_text(last.output)
                return replace(last.output, commits=tuple(commits))
    raise Aborted("the engine's events ended before the generation did")


@contextmanager
def _named_within(field: str) -> Iterator[None]:
    """Let errors name the field of an object in the body as such."""
    try:
        yield
    except TOLD_ERRORS as error:
        known = to_api_error(error)
        # What the engine says of the trace is the caller's request.
        # A trace has cfg_scale at its top, a body in `diffusion`.
        inner = http_param("sampling." + (known.param or "").removeprefix("trace").lstrip(".")) or ""
        raise known.with_param(f"{field}.{inner}" if inner else field) from error


@contextmanager
def _named_in_trace() -> Iterator[None]:
    """Let errors name a part of a trace as such: the engine checks a trace as the request that it was made by."""
    try:
        yield
    except TOLD_ERRORS as error:
        known = to_api_error(error)
        param = "prompt_token_ids" if known.param == "prompt" else known.param or ""
        if re.split(r"[.\[]", param, maxsplit=1)[0] in _TRACE_FIELDS:
            raise known.with_param(f"trace.{param}") from error
        raise


@dataclass(frozen=True, slots=True)
class _Read:
    """An input token, before it is spelled."""

    position: int
    token_id: int
    role: Role

    def to_json(self, checkpoint: Checkpoint) -> dict[str, Any]:
        return {
            "position": self.position,
            **checkpoint.tokenizer.spelled(self.token_id),
            "token_id": self.token_id,
            "role": self.role,
        }


def _end(trace: Trace, checkpoint: Checkpoint) -> int | None:
    """Position of the token that ended the text."""
    ends = checkpoint.config.end_token_ids(trace.stop_token_ids, ignore_eos=trace.ignore_eos)
    return min((commit.position for commit in trace.commits if commit.token_id in ends), default=None)


def _input_tokens(trace: Trace, checkpoint: Checkpoint) -> list[_Read]:
    """What the model read in the end, by position; positions that were never filled are left out."""
    config, start, end = checkpoint.config, len(trace.prompt_token_ids), _end(trace, checkpoint)
    found = [_Read(position, token_id, "prompt") for position, token_id in enumerate(trace.prompt_token_ids)]
    token_at = {commit.position: commit.token_id for commit in trace.commits}
    past_end = range(0)
    if end is not None:
        block_stop = (end // config.diff_block_size + 1) * config.diff_block_size
        past_end = range(end + 1, min(block_stop, trace.limit))
    for position in range(start, trace.limit):
        if position in past_end:
            found.append(_Read(position, config.eos_token_id, "end_of_text"))
        elif position in token_at:
            found.append(_Read(position, token_at[position], "generated"))
    return found


def _target(target: TargetAttribution, trace: Trace, checkpoint: Checkpoint, top_k: int | None) -> dict[str, Any]:
    return {
        "position": target.position - len(trace.prompt_token_ids),
        "token": checkpoint.tokenizer.token_name(target.token_id),
        "token_id": target.token_id,
        "logit": number(target.target_logit),
        "baseline_logit": number(target.baseline_logit),
        "contributions": _chosen(target.contributions, top_k),
        "completeness_error": number(target.completeness_error),
    }


def _chosen(contributions: Sequence[float], top_k: int | None) -> list[list[float]]:
    pairs = [(position, value) for position, value in enumerate(contributions) if value]
    if top_k is not None:
        pairs = sorted(pairs, key=lambda pair: -abs(pair[1]))[:top_k]
    return [[position, number(value) or 0.0] for position, value in pairs]
