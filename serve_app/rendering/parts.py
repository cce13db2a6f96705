"""The parts of an answer that are about all of its choices: usage, and what OpenAI's API does not have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine import ResolvedIntervention, SteeringParams

from ..attribution import number
from ..concepts import ConceptCatalogue
from ..schemas import GenerateFields
from ..translation import Checkpoint
from .choice import Choice


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """OpenAI's `usage`, over all choices: each prompt once, and the tokens that were returned."""
    prompt, completion, cached = (sum(counts) for counts in zip(*(choice.usage for choice in choices), strict=True))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def additions(choices: Sequence[Choice], request: GenerateFields, checkpoint: Checkpoint) -> dict[str, Any]:
    """The top-level parts of an answer that OpenAI's API does not have: what was steered, run and attributed."""
    engine_request = choices[0].job.engine_request
    if engine_request is None:
        return {}
    parts: dict[str, Any] = {}
    started = choices[0].started
    if engine_request.steering is not None:
        parts["steering"] = _steering(engine_request.steering, started.steering, checkpoint.catalogue)
        if request.steering is not None and request.steering.preset is not None:
            parts["steering"]["preset"] = request.steering.preset
    sampling = engine_request.sampling
    blocks, steps, passes = zip(*(choice.work for choice in choices), strict=True)
    parts["diffusion"] = {
        "blocks": sum(blocks),
        "denoising_steps": sum(steps),
        "forward_passes": None if None in passes else sum(passes),
        "policy": sampling.policy,
        **({} if sampling.policy_parameter is None else {sampling.policy: sampling.policy_parameter}),
        "tokens_per_step": sampling.max_commits(checkpoint.config.diff_block_size),
        "sampler": sampling.sampler,
        "repetition_penalty": sampling.repetition_penalty,
        **({"cfg_scale": sampling.cfg_scale} if sampling.cfg_scale else {}),
        "seed": started.seed,
    }
    if request.attribution.level != "off":
        parts["attribution"] = [choice.attribution() for choice in choices]
    return parts


def _steering(
    params: SteeringParams, resolved: Sequence[ResolvedIntervention], catalogue: ConceptCatalogue
) -> dict[str, Any]:
    overrides = [
        {"concept": catalogue.named(item.head, item.concept_id), "head": item.head, "weight": item.weight}
        for item in params.overrides
    ]
    return {
        "resolved": [
            {
                "concepts": [
                    {**catalogue.named("known", concept_id), "weight": weight}
                    for concept_id, weight in zip(item.concept_ids, item.weights, strict=True)
                ],
                "alpha": number(item.alpha),
                "peak_logit": number(item.peak),
                "layer": item.layer,
                "schedule": item.schedule,
                **({"cutoff_tokens": item.cutoff_tokens} if item.schedule == "hard_cutoff" else {}),
            }
            for item in resolved
        ],
        "suppress": [
            {"concept": catalogue.named("known", item.concept_id), "strength": item.strength}
            for item in params.suppress
        ],
        **({"overrides": overrides, "override_mode": params.override_mode} if overrides else {}),
    }
