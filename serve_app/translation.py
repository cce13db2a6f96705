"""From a request as JSON spells it to the engine's: text to ids, names to concepts, defaults to values."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine import (
    AttributionParams,
    GenerateRequest,
    InvalidRequest,
    ModelConfig,
    PromptTooLong,
    SamplingParams,
    SteeringParams,
    Suppression,
    check_request,
)
from engine import Intervention as EngineIntervention

from .concepts import Concept, ConceptCatalogue
from .errors import ApiError
from .schemas import MAX_STEERED_CONCEPTS, AttributionSpec, CompletionRequest, ConceptItem, InterventionSpec
from .tokenizer import Tokenizer

_REFERENCE_PENALTY = 1.1
"""The repetition penalty that belongs to entropy-adaptive sampling."""
_SEED_LIMIT = 2**53
"""Seeds drawn here stay below it: the answer tells them, and JavaScript has no larger exact numbers."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What HTTP needs to know of the served checkpoint."""

    model_id: str
    config: ModelConfig
    tokenizer: Tokenizer
    catalogue: ConceptCatalogue


def check_model(model: str | None, checkpoint: Checkpoint) -> None:
    """Raise a 404 unless `model` is absent or the served one."""
    if model is not None and model != checkpoint.model_id:
        message = f"no model is called {model!r}; this server has {checkpoint.model_id!r}"
        raise ApiError(404, message, code="model_not_found", param="model")


def to_engine(
    request: CompletionRequest, checkpoint: Checkpoint, *, completion_id: str, max_prompts: int
) -> list[GenerateRequest]:
    """One engine request a prompt. Raises ApiError or InvalidRequest that names the field at fault."""
    check_model(request.model, checkpoint)
    prompts = request.prompts
    if len(prompts) > max_prompts:
        message = f"prompt holds {len(prompts)} prompts; at most {max_prompts} fit one request"
        raise ApiError(400, message, code="invalid_value", param="prompt")
    sampling = _sampling(request)
    steering = _steering(request, checkpoint)
    attribution = _attribution(request.attribution)
    engine_requests = [
        GenerateRequest(
            prompt_token_ids=_encode(prompt, checkpoint) if isinstance(prompt, str) else prompt,
            max_tokens=request.max_tokens,
            sampling=sampling,
            steering=steering,
            attribution=attribution,
            priority=request.priority,
            # Not the client's own id: two clients may send the same one.
            request_id=f"{completion_id}-{index}",
        )
        for index, prompt in enumerate(prompts)
    ]
    for item in engine_requests:
        # The engine checks again. Here it costs no call, and no traceback of a remote error in the log.
        check_request(item, checkpoint.config)
    return engine_requests


def _encode(prompt: str, checkpoint: Checkpoint) -> list[int]:
    """The prompt's ids. Raises PromptTooLong before it spends time on a text that no context could hold."""
    num_bytes, context = len(prompt.encode()), checkpoint.config.block_size
    if num_bytes > context * checkpoint.tokenizer.longest_token:
        raise PromptTooLong(
            f"the prompt has {num_bytes} bytes, which cannot be fewer than {context} tokens, the model's context",
            param="prompt_token_ids",
        )
    return checkpoint.tokenizer.encode(prompt)


def end_token_ids(request: CompletionRequest, config: ModelConfig) -> set[int]:
    """Tokens at which the text ends."""
    ends = set(request.stop_token_ids)
    if config.eot_id is not None and not request.ignore_eos:
        ends.add(config.eot_id)
    return ends


def _sampling(request: CompletionRequest) -> SamplingParams:
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
        seed=secrets.randbelow(_SEED_LIMIT) if request.seed is None else request.seed,
    )
    if request.repetition_penalty is None and sampling.uses_entropy:
        return replace(sampling, repetition_penalty=_REFERENCE_PENALTY)
    return sampling


def _attribution(spec: AttributionSpec) -> AttributionParams | None:
    if spec.level == "off":
        return None
    # A chunk's scores are sums over every reported concept, so all of them have to come.
    return AttributionParams(top_k=spec.top_k if spec.level == "token" else None)


def _steering(request: CompletionRequest, checkpoint: Checkpoint) -> SteeringParams | None:
    spec = request.steering
    if spec is None:
        return None
    catalogue = checkpoint.catalogue
    interventions = [
        _intervention(item, catalogue, f"steering.interventions[{i}]") for i, item in enumerate(spec.interventions)
    ]
    if spec.concepts is not None and spec.strength is not None:
        short_form = InterventionSpec(
            concepts=spec.concepts,
            strength=spec.strength,
            layer=-(-checkpoint.config.n_layers // 4),
            schedule="hard_cutoff",
            group=spec.group,
        )
        # Last, so that an error's index counts the caller's own list.
        interventions.append(_intervention(short_form, catalogue, "steering"))
    suppress = []
    for i, item in enumerate(spec.suppress):
        concept = catalogue.steerable(item.concept, param=f"steering.suppress[{i}].concept")
        suppress.append(Suppression(concept_id=catalogue.local_id(concept), strength=item.strength))
    return SteeringParams(interventions=tuple(interventions), suppress=tuple(suppress))


def _intervention(spec: InterventionSpec, catalogue: ConceptCatalogue, path: str) -> EngineIntervention:
    weights = _weights(spec.concepts, catalogue, path, with_groups=spec.group)
    concept_ids = tuple(catalogue.local_id(concept) for concept in weights)
    are_equal = len(set(weights.values())) == 1 and next(iter(weights.values())) > 0
    try:
        return EngineIntervention(
            concept_ids=concept_ids,
            weights=None if are_equal else tuple(weights.values()),
            strength=spec.strength,
            unit=spec.unit,
            layer=spec.layer,
            schedule=spec.schedule,
            cutoff_tokens=spec.cutoff_tokens,
        )
    except InvalidRequest as error:
        field = (error.param or "").rpartition(".")[2]
        raise ApiError(400, str(error), code="invalid_value", param=f"{path}.{field}") from error


def _weights(
    items: Sequence[ConceptItem], catalogue: ConceptCatalogue, path: str, *, with_groups: bool
) -> dict[Concept, float]:
    """Concept -> weight, each concept once: naming one twice adds its weights up, as adding its embedding twice would.

    The members that a group adds take the weight of the concept that brought them and are not added up.
    """
    weights: dict[Concept, float] = {}
    for i, item in enumerate(items):
        concept = catalogue.steerable(item.id, param=f"{path}.concepts[{i}]")
        weights[concept] = weights.get(concept, 0.0) + item.weight
    if with_groups:
        for concept, weight in list(weights.items()):
            for member in catalogue.group(concept):
                weights.setdefault(member, weight)
    if len(weights) > MAX_STEERED_CONCEPTS:
        message = f"{len(weights)} concepts in one intervention; at most {MAX_STEERED_CONCEPTS}"
        raise ApiError(400, message, code="invalid_value", param=f"{path}.concepts")
    if not any(weights.values()):
        raise ApiError(400, "the weights add up to nothing", code="invalid_value", param=f"{path}.concepts")
    return weights
