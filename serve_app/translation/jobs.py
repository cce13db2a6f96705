"""One job a choice: the prompt's ids and what the engine is asked to add to them."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from engine import (
    AttributionParams,
    GenerateRequest,
    InvalidRequest,
    ModelConfig,
    PromptTooLong,
    SamplingParams,
    SteeringParams,
    check_request,
)

from ..chat_template import Turn, encode_chat
from ..config import Limits
from ..errors import ApiError
from ..schemas import AttributionSpec, ChatRequest, CompletionRequest, GenerateFields, Message, Prompt, SteeringSpec
from .checkpoint import Checkpoint, check_model
from .steering import steering_params

_REFERENCE_PENALTY = 1.1
"""The repetition penalty that belongs to entropy-adaptive sampling."""
_SEED_LIMIT = 2**53
"""Seeds drawn here stay below it: the answer tells them, and JavaScript has no larger exact numbers."""


@dataclass(frozen=True, slots=True)
class ChoiceJob:
    """What one choice of an answer is made from."""

    index: int
    prompt_token_ids: tuple[int, ...]
    engine_request: GenerateRequest | None
    """None: nothing is generated."""
    shares_prompt: bool
    """True for all but the first choice of a prompt."""


def make_jobs(
    request: GenerateFields, checkpoint: Checkpoint, *, completion_id: str, configured: Limits
) -> list[ChoiceJob]:
    """`n` jobs a prompt, in the order of prompts. Raises ApiError or InvalidRequest that names the field at fault."""
    check_model(request.model, checkpoint)
    _check_token_limit(request, configured)
    prompts = list(_prompts(request, checkpoint, max_prompts=configured.max_prompts))
    asked = GenerateRequest(
        prompt_token_ids=(),
        sampling=_sampling(request),
        steering=_steering(request.steering, checkpoint),
        attribution=_attribution(request.attribution, checkpoint.config),
        priority=request.priority,
    )
    jobs: list[ChoiceJob] = []
    for param, token_ids in prompts:
        with _naming(param):
            max_tokens = _max_tokens(request, len(token_ids), checkpoint.config, configured)
            of_prompt = replace(asked, prompt_token_ids=token_ids, max_tokens=max_tokens)
            _check(of_prompt, checkpoint.config, generates=request.token_limit > 0)
        for choice_index in range(request.n):
            engine_request = replace(
                of_prompt,
                sampling=replace(asked.sampling, choice_index=choice_index),
                # Not the client's own id: two clients may send the same one.
                request_id=f"{completion_id}-{len(jobs)}",
            )
            generates = engine_request if request.token_limit > 0 else None
            jobs.append(ChoiceJob(len(jobs), tuple(token_ids), generates, shares_prompt=choice_index > 0))
    return jobs


def _check_token_limit(request: GenerateFields, configured: Limits) -> None:
    field, most = request.token_limit_field, configured.max_tokens
    if field is not None and most is not None and request.token_limit > most:
        message = f"{field} is {request.token_limit}; this server allows {most}"
        raise ApiError(400, message, code="invalid_value", param=field)


def _max_tokens(request: GenerateFields, num_prompt_tokens: int, config: ModelConfig, configured: Limits) -> int:
    """What is asked for; the default as far as there is room for it, since nobody has asked for that much."""
    # The engine has no word for nothing.
    most = max(request.token_limit, 1)
    if request.token_limit_field is not None:
        return most
    if num_prompt_tokens >= config.block_size:
        raise PromptTooLong(
            f"the prompt has {num_prompt_tokens} tokens; at most {config.block_size - 1}, so that one can follow",
            param="prompt_token_ids",
        )
    return min(most, configured.max_tokens or most, config.block_size - num_prompt_tokens)


def turns_of(messages: Iterable[Message]) -> list[Turn]:
    """A conversation as chat templates take it."""
    return [Turn(message.role, message.text, message.name) for message in messages]


def _prompts(
    request: GenerateFields, checkpoint: Checkpoint, *, max_prompts: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(the field that an error should name, ids) for each prompt."""
    assert isinstance(request, CompletionRequest | ChatRequest)
    num_prompts = len(request.prompts) if isinstance(request, CompletionRequest) else 1
    num_choices = num_prompts * request.n
    if num_choices > max_prompts:
        message = f"{num_prompts} prompts with n {request.n} make {num_choices} choices; at most {max_prompts} fit one"
        param = "prompt" if num_prompts > max_prompts else "n"
        raise ApiError(400, f"{message} request", code="invalid_value", param=param)
    if isinstance(request, ChatRequest):
        yield "messages", _encode_messages(request, checkpoint)
        return
    for index, prompt in enumerate(request.prompts):
        param = "prompt" if num_prompts == 1 else f"prompt[{index}]"
        with _naming(param):
            yield param, _encode(prompt, checkpoint)


def _encode(prompt: Prompt, checkpoint: Checkpoint) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        return tuple(prompt)
    _check_length(len(prompt.encode()), checkpoint)
    return tuple(checkpoint.tokenizer.encode(prompt))


def _encode_messages(request: ChatRequest, checkpoint: Checkpoint) -> tuple[int, ...]:
    """A conversation's ids by the checkpoint's template.

    Raises ApiError where there is none or it refuses, PromptTooLong before time is spent on what no context holds.
    """
    turns = turns_of(request.messages)
    with _naming("messages"):
        _check_length(sum(len(turn.content.encode()) for turn in turns), checkpoint)
    token_ids = encode_chat(
        checkpoint.chat_template,
        turns,
        model_id=checkpoint.model_id,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
    )
    return tuple(token_ids)


def _check_length(num_bytes: int, checkpoint: Checkpoint) -> None:
    """Raise PromptTooLong before time is spent on a text that no context could hold."""
    context = checkpoint.config.block_size
    if num_bytes > context * checkpoint.tokenizer.longest_token:
        raise PromptTooLong(
            f"the prompt has {num_bytes} bytes, which cannot be fewer than {context} tokens, the model's context",
            param="prompt_token_ids",
        )


def _check(request: GenerateRequest, config: ModelConfig, *, generates: bool) -> None:
    """The engine checks again. Here it costs no call, and no traceback of a remote error in the log."""
    if generates:
        check_request(request, config)
        return
    num_prompt = len(request.prompt_token_ids)
    if num_prompt > config.block_size:
        raise PromptTooLong(
            f"the prompt has {num_prompt} tokens; at most {config.block_size}", param="prompt_token_ids"
        )
    # Nothing follows the prompt, so it may be one token longer than where one does.
    check_request(replace(request, prompt_token_ids=request.prompt_token_ids[:-1]), config)
    check_request(replace(request, prompt_token_ids=request.prompt_token_ids[-1:]), config)


@contextmanager
def _naming(param: str) -> Iterator[None]:
    """Let errors about a prompt name the field that held it, and which of several it was."""
    try:
        yield
    except InvalidRequest as error:
        is_about_prompt = error.param in ("prompt_token_ids", "max_tokens")
        message = re.sub(r"^prompt_token_ids\b", param, str(error))
        if is_about_prompt and param.startswith("prompt[") and not message.startswith(param):
            message = f"{param}: {message}"
        named = param if error.param == "prompt_token_ids" and param != "prompt" else error.param
        raise type(error)(message, param=named) from error


def _sampling(request: GenerateFields) -> SamplingParams:
    sampling = SamplingParams(
        policy=request.diffusion.policy,
        tokens_per_step=request.diffusion.tokens_per_step,
        threshold=request.diffusion.threshold,
        factor=request.diffusion.factor,
        entropy_bound=request.diffusion.entropy_bound,
        temperature=request.temperature,
        top_p=request.top_p,
        # -1 is the other common way to say that it is off.
        top_k=None if request.top_k == -1 else request.top_k,
        min_p=request.min_p,
        entropy_sampling=request.diffusion.entropy_sampling,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        logit_bias=request.logit_bias,
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        min_tokens=request.min_tokens,
        cfg_scale=request.diffusion.cfg_scale or 0.0,
        seed=secrets.randbelow(_SEED_LIMIT) if request.seed is None else request.seed,
        num_logprobs=0 if request.is_scoring else request.num_logprobs or 0,
    )
    if request.repetition_penalty is None and sampling.uses_entropy:
        return replace(sampling, repetition_penalty=_REFERENCE_PENALTY)
    return sampling


def _steering(spec: SteeringSpec | None, checkpoint: Checkpoint) -> SteeringParams | None:
    if spec is None:
        return None
    return steering_params(spec, checkpoint.catalogue, num_layers=checkpoint.config.n_layers)


def _attribution(spec: AttributionSpec, config: ModelConfig) -> AttributionParams | None:
    if spec.level == "off":
        return None
    if "heads" in spec.model_fields_set and "discovered" in spec.heads and not config.concept.use_discovered:
        message = "heads names discovered, a head that this checkpoint does not have; leave it out"
        raise ApiError(400, message, code="attribution_unsupported", param="attribution.heads")
    # A chunk's scores are sums over every reported concept, so all of them have to come.
    return AttributionParams(top_k=spec.top_k if spec.level == "token" else None)
