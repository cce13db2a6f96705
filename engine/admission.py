"""Checks a request against the checkpoint and the page pool, before anything of it enters the engine."""

from __future__ import annotations

from collections.abc import Iterable

from .checks import is_whole, shown
from .config import ModelConfig
from .errors import ConceptNotFound, InvalidValue, PromptTooLong, RequestTooLarge, Unsupported
from .limits import MAX_END_TOKENS, MAX_STEERING_GROUPS
from .request import GenerateRequest, SteeringParams


def check_request(
    request: GenerateRequest, config: ModelConfig, *, num_pages: int | None = None, num_lanes: int | None = None
) -> None:
    """Raise an InvalidRequest that names the field if the request can never be served.

    `num_pages` and `num_lanes` None leave pages and lanes out, for callers that know the checkpoint but no engine.
    """
    if not isinstance(request, GenerateRequest):
        raise InvalidValue(f"the request is {shown(request)}; it must be a GenerateRequest")
    # Before the tokens are looked at one by one: a prompt of any length would hold up everybody else.
    _check_size(request, config, num_pages)
    check_token_ids(request.prompt_token_ids, config, name="prompt_token_ids")
    _check_sampling(request, config)
    _check_guidance(request, num_lanes)
    _check_steering(request, config)


def check_token_ids(token_ids: Iterable[object], config: ModelConfig, *, name: str) -> None:
    """Raise InvalidValue for the field `name` if one is no token id, or is the mask token."""
    for index, token_id in enumerate(token_ids):
        if not is_whole(token_id, 0, config.vocab_size - 1):
            raise InvalidValue(
                f"{name}[{index}] is {shown(token_id)}; it must be a token id, an int in [0, {config.vocab_size})",
                param=name,
            )
        if token_id == config.mask_token_id:
            # It would be taken for a position to fill, and the text would not be what was given.
            raise InvalidValue(
                f"{name}[{index}] is the mask token {token_id}; what is given may not contain it", param=name
            )


def _check_size(request: GenerateRequest, config: ModelConfig, num_pages: int | None) -> None:
    num_prompt = len(request.prompt_token_ids)
    total = num_prompt + request.max_tokens
    if total > config.block_size:
        raise PromptTooLong(
            f"the prompt has {num_prompt} tokens and max_tokens is {request.max_tokens}; "
            f"together at most {config.block_size}",
            param="max_tokens" if num_prompt < config.block_size else "prompt_token_ids",
        )
    num_needed = request.num_lanes * -(-total // config.diff_block_size)
    if num_pages is not None and num_needed > num_pages:
        largest = num_pages // request.num_lanes * config.diff_block_size
        guided = ", half of them for its unconditional copy (sampling.cfg_scale)" if request.is_guided else ""
        raise RequestTooLarge(
            f"the request needs {num_needed} pages of {config.diff_block_size} tokens{guided}, and the engine has "
            f"{num_pages}; shorten the prompt or max_tokens to {largest} tokens in all, or raise num_pages",
            param="max_tokens",
        )


def _check_sampling(request: GenerateRequest, config: ModelConfig) -> None:
    sampling = request.sampling
    if len(sampling.stop_token_ids) > MAX_END_TOKENS:
        raise InvalidValue(
            f"stop_token_ids has {len(sampling.stop_token_ids)} entries; at most {MAX_END_TOKENS}",
            param="sampling.stop_token_ids",
        )
    for name, ids in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
        for token_id in ids:
            if not 0 <= token_id < config.vocab_size:
                raise InvalidValue(
                    f"{name} names token {shown(token_id)}; token ids lie in [0, {config.vocab_size})",
                    param=f"sampling.{name}",
                )
    if sampling.min_tokens > request.max_tokens:
        raise InvalidValue(
            f"min_tokens is {sampling.min_tokens}; it may not exceed max_tokens {request.max_tokens}",
            param="sampling.min_tokens",
        )
    if sampling.tokens_per_step is not None and sampling.tokens_per_step > config.diff_block_size:
        raise InvalidValue(
            f"tokens_per_step is {sampling.tokens_per_step}; a block has {config.diff_block_size} positions",
            param="sampling.tokens_per_step",
        )


def _check_guidance(request: GenerateRequest, num_lanes: int | None) -> None:
    sampling = request.sampling
    if sampling.cfg_scale and sampling.has_drafts:
        raise Unsupported(
            f"cfg_scale is {sampling.cfg_scale:g} and the policy {sampling.policy!r}, whose drafts are not guided; "
            "choose policy 'confidence', which gives the same commits, or leave cfg_scale out",
            param="sampling.cfg_scale",
        )
    if request.is_guided and num_lanes is not None and num_lanes < 2:
        raise Unsupported(
            f"cfg_scale is {sampling.cfg_scale:g}, which takes two lanes, and the engine has {num_lanes}; "
            "leave it out, or raise max_lanes",
            param="sampling.cfg_scale",
        )


def _check_steering(request: GenerateRequest, config: ModelConfig) -> None:
    if request.steering is None:
        return
    _check_overrides(request.steering, config)
    _check_groups(request.steering, config)
    num_concepts = config.concept.n_concepts
    for index, intervention in enumerate(request.steering.interventions):
        path = f"steering.interventions[{index}]"
        for concept_id in intervention.concept_ids:
            if not 0 <= concept_id < num_concepts:
                raise ConceptNotFound(
                    f"concept {shown(concept_id)} does not exist; known concepts lie in [0, {num_concepts})",
                    param=f"{path}.concept_ids",
                )
        if intervention.layer is not None and intervention.layer > config.n_layers:
            raise InvalidValue(
                f"layer is {intervention.layer}; the model has {config.n_layers} layers, counted from 1",
                param=f"{path}.layer",
            )
    for index, item in enumerate(request.steering.suppress):
        if not 0 <= item.concept_id < num_concepts:
            raise ConceptNotFound(
                f"concept {shown(item.concept_id)} does not exist; known concepts lie in [0, {num_concepts})",
                param=f"steering.suppress[{index}].concept_id",
            )


def _check_groups(steering: SteeringParams, config: ModelConfig) -> None:
    """Raise InvalidValue for more combinations of layer and cutoff than a lane holds."""
    groups = {(one.first_layer(config.n_layers), one.cutoff) for one in steering.interventions}
    if len(groups) > MAX_STEERING_GROUPS:
        raise InvalidValue(
            f"steering has {len(groups)} different combinations of layer, schedule and cutoff_tokens; "
            f"a request may have at most {MAX_STEERING_GROUPS}",
            param="steering.interventions",
        )


def _check_overrides(steering: SteeringParams, config: ModelConfig) -> None:
    concept = config.concept
    if steering.overrides and steering.override_mode == "reference" and concept.topk_on_logits:
        # There the package weighs every concept outside the top k 0.5, the sigmoid of its cut-off logit.
        raise Unsupported(
            "override_mode is 'reference', which is not served for checkpoints with topk_on_logits; use 'delta'",
            param="steering.override_mode",
        )
    for index, item in enumerate(steering.overrides):
        path = f"steering.overrides[{index}]"
        if item.head == "discovered" and not concept.use_discovered:
            raise Unsupported(
                "head is 'discovered', and this checkpoint has no discovered head; name known concepts",
                param=f"{path}.head",
            )
        num_concepts = concept.n_concepts if item.head == "known" else concept.n_discovered
        if not 0 <= item.concept_id < num_concepts:
            raise ConceptNotFound(
                f"concept {shown(item.concept_id)} does not exist; {item.head} concepts lie in [0, {num_concepts})",
                param=f"{path}.concept_id",
            )
