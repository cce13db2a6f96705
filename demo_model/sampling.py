"""A plain batched sampler over complete sequences: what training uses to look at its own text.

It follows the engine's rules (one block after another on the absolute grid, most confident position first,
repetition penalty over prompt, text and mask, end of text and mask never chosen) without pages or lanes. Its
random numbers are torch's, so its texts differ from the engine's; their statistics do not.

Shapes: B sequences, S positions, C positions of a canvas, D model width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.steerling import SteerlingModel

from .objective import injections


@dataclass(frozen=True, slots=True)
class SamplerSettings:
    """How tokens are chosen; one position a pass."""

    temperature: float = 0.6
    top_p: float = 0.9
    repetition_penalty: float = 1.1


@dataclass(frozen=True, slots=True)
class Job:
    """One text to write."""

    prompt_token_ids: tuple[int, ...] = ()
    max_tokens: int = 128
    concept: int = 0
    strength: float = 0.0
    """In logit units; 0 steers nothing."""
    suppression: float = 0.0
    """Strength of relu suppression of `concept`."""


@torch.no_grad()
def sample(
    model: SteerlingModel, jobs: list[Job], settings: SamplerSettings, generator: torch.Generator
) -> list[list[int]]:
    """New token ids of each job. All jobs need equally long prompts and equal `max_tokens`."""
    device = generator.device
    prompt_length, max_tokens = len(jobs[0].prompt_token_ids), jobs[0].max_tokens
    if any((len(job.prompt_token_ids), job.max_tokens) != (prompt_length, max_tokens) for job in jobs):
        raise ValueError("the jobs of one call must share prompt length and max_tokens")
    config = model.config
    total = prompt_length + max_tokens
    tokens_BS = torch.full((len(jobs), total), config.mask_token_id, device=device)
    if prompt_length:
        tokens_BS[:, :prompt_length] = torch.tensor([job.prompt_token_ids for job in jobs], device=device)
    concept_B = torch.tensor([job.concept for job in jobs], device=device)
    strength_B = torch.tensor([job.strength for job in jobs], device=device)
    injection_BD = injections(model, concept_B, strength_B)
    vectors_VD = model.transformer.token_vectors_VD.float()
    suppression_B1 = torch.tensor([[job.suppression] for job in jobs], device=device)
    suppression_BV = suppression_B1 * (model.known_head.embedding(concept_B).float() @ vectors_VD.T).relu()
    for start in range(prompt_length // config.diff_block_size * config.diff_block_size, total, config.diff_block_size):
        end = min(start + config.diff_block_size, total)
        for _ in range(max(start, prompt_length), end):
            ids_BS = tokens_BS[:, :end]
            is_masked_BS = ids_BS == config.mask_token_id
            hidden_BSD = model.hidden_dense(ids_BS, is_masked_BS[:, :, None] * injection_BD[:, None, :])
            logits_BCV = model.transformer.logits(hidden_BSD[:, start:end]).float() - suppression_BV[:, None]
            _commit(
                tokens_BS, is_masked_BS[:, start:end], logits_BCV, start, config.banned_token_ids, settings, generator
            )
    return tokens_BS[:, prompt_length:].tolist()


def _commit(
    tokens_BS: Tensor,
    is_masked_BC: Tensor,
    logits_BCV: Tensor,
    start: int,
    banned: tuple[int, ...],
    settings: SamplerSettings,
    generator: torch.Generator,
) -> None:
    """Choose one token of each canvas, which begins at `start`, and write it to `tokens_BS`."""
    ids_BS = tokens_BS[:, : start + is_masked_BC.shape[1]]
    batch_B = torch.arange(ids_BS.shape[0], device=ids_BS.device)
    is_seen_BV = torch.zeros(logits_BCV.shape[0], logits_BCV.shape[2], dtype=torch.bool, device=ids_BS.device)
    is_seen_BV.scatter_(1, ids_BS, True)
    penalty = settings.repetition_penalty
    penalised_BCV = torch.where(logits_BCV > 0, logits_BCV / penalty, logits_BCV * penalty)
    logits_BCV = torch.where(is_seen_BV[:, None], penalised_BCV, logits_BCV)
    logits_BCV[..., list(banned)] = -float("inf")
    confidence_BC = logits_BCV.softmax(-1).amax(-1).masked_fill(~is_masked_BC, -1.0)
    position_B = confidence_BC.argmax(-1)
    probability_BV = (logits_BCV[batch_B, position_B] / settings.temperature).softmax(-1)
    sorted_BV, order_BV = probability_BV.sort(dim=-1, descending=True)
    keep_BV = sorted_BV.cumsum(-1) - sorted_BV <= settings.top_p
    pick_B1 = torch.multinomial(sorted_BV * keep_BV, 1, generator=generator)
    tokens_BS[batch_B, start + position_B] = order_BV.gather(1, pick_B1)[:, 0]
