"""The whole generation, written plainly: what the engine must equal.

One sequence, dense forward passes over everything that exists, one position after another. Blocks lie on
the absolute grid; prompt tokens that do not fill a block stay fixed in the first canvas; positions past
prompt + max_tokens do not exist. No cache, no batch, no lanes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.output import FinishReason
from engine.request import GenerateRequest, SamplingParams, SteeringParams
from tests.oracle import Choice, Oracle, Overrides, guided

Uniform = Callable[[int, int, int], float]
"""(seed, absolute position, choice index) -> a number in [0, 1)."""

NEVER = -math.inf
ROUNDING = 1e-5


@dataclass
class Generation:
    """What one request came to."""

    choices: list[Choice] = field(default_factory=list)
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason = FinishReason.LENGTH
    num_steps: int = 0


def generate(model: Oracle, request: GenerateRequest, uniform: Uniform | None = None) -> Generation:
    """Run a request to its end. `uniform` and a seed are needed unless the request is greedy."""
    prompt, sampling = list(request.prompt_token_ids), request.sampling
    total = len(prompt) + request.max_tokens
    ids = prompt + [model.mask_id] * request.max_tokens
    ends = end_token_ids(model, sampling)
    result, end = Generation(), total
    steering, suppression_V = resolve_steering(model, request), suppression(model, request)
    overrides = weight_overrides(request)
    for start in range(len(prompt) // model.block * model.block, total, model.block):
        stop = min(start + model.block, total)
        while masked := [p for p in range(start, stop) if ids[p] == model.mask_id]:
            num_committed = len(result.choices)
            injections = [
                (layer, alpha * direction_D)
                for layer, alpha, direction_D, cutoff in steering
                if cutoff is None or num_committed < cutoff
            ]
            # Later blocks are invisible to this one, so leaving them out changes nothing.
            seen = model.forward(ids[:stop], injections, overrides)
            if sampling.cfg_scale:
                # The copy knows what has been generated, but masks stand where the prompt was, and they are injected.
                copied = [model.mask_id] * len(prompt) + ids[len(prompt) : stop]
                seen = guided(seen, model.forward(copied, injections, overrides), sampling.cfg_scale)
            present = set(ids)
            scores = {p: adjusted(seen.logits_SV[p], model, request, p, present, ends, suppression_V) for p in masked}
            confidence = {p: float(scores[p].softmax(dim=-1).max()) for p in masked}
            # Masked positions that nothing tells apart are equally likely; what remains is rounding.
            is_tie = model.has_no_positions or set(ids[:stop]) == {model.mask_id}
            ranked = by_confidence(confidence, ROUNDING if is_tie else 0.0)
            chosen = ranked[: num_together([scores[p] for p in ranked], sampling)]
            for p in chosen:
                token = choose(scores[p], sampling, lambda p=p: draw(uniform, sampling, p))
                result.choices.append(model.choice(seen, p, token, result.num_steps, confidence[p]))
                ids[p] = token
            # The commits of one pass do not see each other; only then does an end take effect.
            end = min([end, *(p for p in chosen if ids[p] in ends)])
            if end < stop:
                ids[end + 1 : stop] = [model.eos_id] * (stop - end - 1)
            result.num_steps += 1
        if end < stop:
            result.finish_reason = FinishReason.STOP
            break
    result.token_ids = tuple(ids[len(prompt) : end])
    return result


def by_confidence(confidence: dict[int, float], tolerance: float) -> list[int]:
    """Positions from the most confident on; equal ones, up to the tolerance, from the lowest on."""
    left, ranked = dict(confidence), []
    while left:
        best = max(left.values())
        ranked.append(min(p for p, value in left.items() if value >= best - tolerance))
        del left[ranked[-1]]
    return ranked


def num_together(ranked_logits: list[Tensor], sampling: SamplingParams) -> int:
    """How many of the positions, given by their logits in order of confidence, one step commits."""
    if sampling.policy == "confidence":
        return sampling.tokens_per_step or 1
    limit = sampling.policy_parameter
    assert limit is not None
    count, entropies = 0, []
    for logits_V in ranked_logits:
        probs_V = logits_V.double().softmax(dim=-1)
        confidence, n = float(probs_V.max()), count + 1
        entropies.append(-sum(p * math.log(p) for p in probs_V.tolist() if p > 0))
        match sampling.policy:
            case "threshold":
                fits = confidence > limit
            case "factor":
                fits = (n + 1) * (1 - confidence) < limit
            case "entropy_bound":
                fits = sum(entropies) - max(entropies) <= limit
        if count and not fits:
            break
        count = n
    return min(count, sampling.tokens_per_step or count)


def draw(uniform: Uniform | None, sampling: SamplingParams, position: int) -> float:
    """The request's random number at a position."""
    assert uniform is not None and sampling.seed is not None, "sampling needs a seed and a uniform function"
    return uniform(sampling.seed, position, sampling.choice_index)


def end_token_ids(model: Oracle, sampling: SamplingParams) -> set[int]:
    """Tokens that end the text where they stand."""
    own = {model.eot_id} if model.eot_id is not None and not sampling.ignore_eos else set()
    return own | set(sampling.stop_token_ids)


def adjusted(
    logits_V: Tensor,
    model: Oracle,
    request: GenerateRequest,
    position: int,
    present: set[int],
    ends: set[int],
    suppression_V: Tensor,
) -> Tensor:
    """Logits of one position after suppression, bias, repetition penalty and bans, in this order."""
    sampling = request.sampling
    logits_V = logits_V.float() - suppression_V
    for token, bias in sampling.logit_bias.items():
        logits_V[token] += bias
    seen, penalty = sorted(present), sampling.repetition_penalty
    values = logits_V[seen]
    logits_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
    banned = {model.eos_id, model.mask_id, model.pad_id}
    if position < len(request.prompt_token_ids) + sampling.min_tokens:
        banned |= ends
    logits_V[sorted(banned)] = NEVER
    return logits_V


def distribution(logits_V: Tensor, sampling: SamplingParams) -> Tensor:
    """Probabilities (V,) from which the token of one position is drawn: temperature, min-p, top-k, top-p."""
    temperature = entropy_temperature(logits_V, sampling) if sampling.uses_entropy else sampling.effective_temperature
    probs_V = (logits_V.double() / temperature).softmax(dim=-1)
    if sampling.min_p:
        probs_V = torch.where(probs_V >= sampling.min_p * probs_V.max(), probs_V, 0.0)
    order = probs_V.sort(descending=True, stable=True).indices
    if sampling.top_k:
        probs_V[order[sampling.top_k :]] = 0.0
    probs_V = probs_V / probs_V.sum()
    sorted_V = probs_V[order]
    keep_V = sorted_V.cumsum(dim=-1) - sorted_V <= sampling.effective_top_p
    keep_V |= sampling.effective_top_p >= 1
    probs_V[order[~keep_V]] = 0.0
    return probs_V / probs_V.sum()


def entropy_temperature(logits_V: Tensor, sampling: SamplingParams) -> float:
    """0.3 for a certain position to 0.7 for one as uncertain as its nucleus allows."""
    probs_V = logits_V.double().softmax(dim=-1)
    mass_V = probs_V.sort(descending=True).values.cumsum(dim=-1)
    effective_k = max(int((mass_V <= sampling.effective_top_p).sum()) + 1, 2)
    entropy = -float((probs_V * (probs_V + 1e-10).log()).sum())
    return 0.3 + 0.4 * min(1.0, entropy / math.log(effective_k))


def choose(logits_V: Tensor, sampling: SamplingParams, number: Callable[[], float]) -> int:
    """The likeliest token if greedy, else the first id whose cumulative probability exceeds the number."""
    if sampling.is_greedy:
        return int((logits_V == logits_V.max()).nonzero()[0])
    cumulative_V = distribution(logits_V, sampling).cumsum(dim=-1)
    return int((cumulative_V > number() * cumulative_V[-1]).nonzero()[0])


def resolve_steering(model: Oracle, request: GenerateRequest) -> list[tuple[int, float, Tensor, int | None]]:
    """(layer, alpha, direction (D,), cutoff or None) of each intervention."""
    resolved = []
    for one in request.steering.interventions if request.steering else ():
        weights = one.weights or (1.0,) * len(one.concept_ids)
        total_D = sum(w * model.embedding(c) for w, c in zip(weights, one.concept_ids, strict=True))
        assert isinstance(total_D, Tensor)
        direction_D = total_D / total_D.norm()
        peak = max(float((model.lm_head_VD @ direction_D).max()), 1e-6)
        alpha = one.strength / peak if one.unit == "logits" else one.strength
        layer = model.num_layers // 2 if one.layer is None else one.layer
        resolved.append((layer, alpha, direction_D, one.cutoff_tokens if one.schedule == "hard_cutoff" else None))
    return resolved


def suppression(model: Oracle, request: GenerateRequest) -> Tensor:
    """What is subtracted from every position's logits (V,)."""
    total_V = torch.zeros(len(model.lm_head_VD))
    for one in request.steering.suppress if request.steering else ():
        total_V += one.strength * (model.lm_head_VD @ model.embedding(one.concept_id)).clamp_min(0.0)
    return total_V


def weight_overrides(request: GenerateRequest) -> Overrides:
    """The weights that the request sets, by head."""
    steering = request.steering or SteeringParams()
    known, discovered = (
        {one.concept_id: one.weight for one in steering.overrides if one.head == head}
        for head in ("known", "discovered")
    )
    is_by_package = steering.override_mode == "reference" and bool(steering.overrides)
    return Overrides(known, discovered, is_by_package)
