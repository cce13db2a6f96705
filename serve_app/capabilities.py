"""What a server and its checkpoint can do, so that a client need not find out by being refused."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import ValidationError

from engine import (
    EmbeddingKind,
    GenerateRequest,
    InvalidRequest,
    ModelConfig,
    Policy,
    Pooling,
    SamplingParams,
    SteeringParams,
    WeightOverride,
    check_request,
    limits,
)

from . import __version__
from .config import Limits
from .schemas import (
    MAX_CHOICES,
    MAX_INTERVENTIONS,
    MAX_MESSAGES,
    MAX_STEERED_CONCEPTS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STRENGTH,
    DiffusionSpec,
)
from .schemas.answers import Answer
from .translation import Checkpoint

API_VERSION = "1"
"""Rises when something that clients rely on changes its meaning."""


class ModelFacts(Answer):
    """The served checkpoint."""

    id: str
    context_length: int
    """Tokens of prompt and text together."""
    block_length: int
    """Positions that are denoised together."""
    n_layers: int
    width: int
    """Of hidden states and embeddings."""
    vocab_size: int


class HeadFacts(Answer):
    """One set of concepts."""

    num_concepts: int
    num_steerable: int
    first_id: int
    """Catalogue ids lie in [first_id, first_id + num_concepts)."""
    reported: int
    """Most concepts that a token's attribution holds."""


class Heads(Answer):
    """The sets of concepts that the checkpoint has."""

    known: HeadFacts
    discovered: HeadFacts | None


class PolicyFacts(Answer):
    """One way to choose which positions a denoising step commits."""

    parameter: str | None
    """The field of `diffusion` that belongs to it alone."""
    default: float | None
    """What that is where it is absent."""
    tokens_per_step: int | None
    """Most commits of a step where `diffusion.tokens_per_step` is absent; None: a whole block."""


class LimitFacts(Answer):
    """What one request may ask for."""

    max_body_bytes: int
    max_prompts: int
    max_tokens: int
    max_embedding_inputs: int
    max_choices: int
    max_logprobs: int
    max_stop_strings: int
    max_stop_length: int
    """Characters of one stop string."""
    max_stop_token_ids: int
    max_messages: int
    max_interventions: int
    max_suppressions: int
    max_overrides: int
    max_concepts_per_intervention: int
    max_steering_groups: int
    """Different combinations of layer, schedule and cutoff that interventions may have."""
    max_strength: float
    """Either way; of a weight too."""
    max_likelihood_samples: int
    max_input_attribution_targets: int
    max_input_attribution_steps: int


class EmbeddingFacts(Answer):
    """What /v1/embeddings can give."""

    types: list[str]
    poolings: list[str]
    encoding_formats: list[str]
    dimensions: int


class Capabilities(Answer):
    """Answer of GET /v1/capabilities."""

    object: Literal["capabilities"]
    api_version: str
    version: str
    model: ModelFacts
    heads: Heads
    policies: dict[str, PolicyFacts]
    default_policy: str
    limits: LimitFacts
    embeddings: EmbeddingFacts
    analyses: list[str]
    """Paths of what may be asked beside generating and embedding."""
    has_chat_template: bool
    """Whether /v1/chat/completions and messages elsewhere are served."""
    has_guidance: bool
    """Whether `diffusion.cfg_scale` is served."""
    has_overrides: bool
    """Whether `steering.overrides` is served."""
    has_presets: bool
    """Whether named steering is kept."""


def capabilities(checkpoint: Checkpoint, configured: Limits, *, has_presets: bool) -> dict[str, Any]:
    """The answer of GET /v1/capabilities, as JSON."""
    config = checkpoint.config
    return {
        "object": "capabilities",
        "api_version": API_VERSION,
        "version": __version__,
        "model": {
            "id": checkpoint.model_id,
            "context_length": config.block_size,
            "block_length": config.diff_block_size,
            "n_layers": config.n_layers,
            "width": config.n_embd,
            "vocab_size": config.vocab_size,
        },
        "heads": _heads(checkpoint),
        "policies": {name: _policy(name) for name in get_args(Policy)},
        "default_policy": SamplingParams().policy,
        "limits": _limits(configured, config),
        "embeddings": {
            "types": list(get_args(EmbeddingKind)),
            "poolings": list(get_args(Pooling)),
            "encoding_formats": ["float", "base64"],
            "dimensions": config.n_embd,
        },
        "analyses": ["/v1/concepts/inspect", "/v1/likelihoods", *_of_traces(config)],
        "has_chat_template": checkpoint.chat_template is not None,
        "has_guidance": _has_guidance(config),
        "has_overrides": _is_taken(
            config, steering=SteeringParams(overrides=(WeightOverride(concept_id=0, weight=1.0),))
        ),
        "has_presets": has_presets,
    }


def _limits(configured: Limits, config: ModelConfig) -> dict[str, float]:
    return {
        "max_body_bytes": configured.max_body_bytes,
        "max_prompts": configured.max_prompts,
        "max_tokens": min(configured.max_tokens or config.block_size, config.block_size),
        "max_embedding_inputs": configured.max_embedding_inputs,
        "max_choices": min(MAX_CHOICES, configured.max_prompts),
        "max_logprobs": limits.MAX_LOGPROBS,
        "max_stop_strings": MAX_STOP_STRINGS,
        "max_stop_length": MAX_STOP_LENGTH,
        "max_stop_token_ids": limits.MAX_END_TOKENS,
        "max_messages": MAX_MESSAGES,
        "max_interventions": MAX_INTERVENTIONS,
        "max_suppressions": MAX_INTERVENTIONS,
        "max_overrides": limits.MAX_OVERRIDES,
        "max_concepts_per_intervention": MAX_STEERED_CONCEPTS,
        "max_steering_groups": limits.MAX_STEERING_GROUPS,
        "max_strength": MAX_STRENGTH,
        "max_likelihood_samples": limits.MAX_SAMPLES,
        "max_input_attribution_targets": limits.MAX_TARGETS,
        "max_input_attribution_steps": limits.MAX_INTEGRATION_STEPS,
    }


def _of_traces(config: ModelConfig) -> list[str]:
    # Where tokens are chosen from concept features, no gradient leads to the inputs.
    return ["/v1/traces/replay"] if config.needs_heads_for_tokens else ["/v1/attributions/input", "/v1/traces/replay"]


def _heads(checkpoint: Checkpoint) -> dict[str, Any]:
    concept, catalogue = checkpoint.config.concept, checkpoint.catalogue
    known = {
        "num_concepts": concept.n_concepts,
        "num_steerable": len(catalogue.search(head="known", steerable=True)),
        "first_id": 0,
        "reported": concept.num_reported_known,
    }
    if not concept.use_discovered:
        return {"known": known, "discovered": None}
    discovered = {
        "num_concepts": concept.n_discovered,
        "num_steerable": len(catalogue.search(head="discovered", steerable=True)),
        "first_id": concept.n_concepts,
        "reported": concept.num_reported_discovered,
    }
    return {"known": known, "discovered": discovered}


def _policy(name: Policy) -> dict[str, Any]:
    sampling = SamplingParams(policy=name)
    default, whole_block = sampling.policy_parameter, 2**30
    most = sampling.max_commits(whole_block)
    return {
        "parameter": None if default is None else name,
        "default": default,
        "tokens_per_step": None if most == whole_block else most,
    }


def _has_guidance(config: ModelConfig) -> bool:
    try:
        DiffusionSpec.model_validate({"cfg_scale": 1.0})
    except ValidationError:
        return False
    return _is_taken(config, sampling=SamplingParams(cfg_scale=1.0))


def _is_taken(config: ModelConfig, **fields: Any) -> bool:
    """Whether the engine takes a request with these fields: asked of the check itself, so that both always agree."""
    try:
        check_request(GenerateRequest(prompt_token_ids=(), max_tokens=1, **fields), config)
    except InvalidRequest:
        return False
    return True
