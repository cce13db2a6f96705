"""The sequence that a request becomes on one checkpoint."""

from __future__ import annotations

from ..config import ModelConfig
from ..request import GenerateRequest
from .sequence import Sequence
from .shadow import Shadow


def make_sequence(request: GenerateRequest, config: ModelConfig, *, id: str, arrival: int) -> Sequence:
    """A waiting sequence; `arrival` is its place in the order of arrival."""
    sampling = request.sampling
    return Sequence(
        id=id,
        priority=request.priority,
        arrival=arrival,
        block_size=config.diff_block_size,
        prompt_token_ids=request.prompt_token_ids,
        max_tokens=request.max_tokens,
        mask_token_id=config.mask_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        end_token_ids=config.end_token_ids(sampling.stop_token_ids, ignore_eos=sampling.ignore_eos),
        tokens_per_step=sampling.max_commits(config.diff_block_size),
        is_adaptive=sampling.is_adaptive,
        has_drafts=sampling.has_drafts,
        shadow=Shadow(cutoffs=_cutoffs(request)) if request.is_guided else None,
    )


def _cutoffs(request: GenerateRequest) -> tuple[int, ...]:
    """Numbers of commits from which on some intervention no longer acts, ascending."""
    interventions = request.steering.interventions if request.steering is not None else ()
    return tuple(sorted({one.cutoff for one in interventions if one.cutoff is not None}))
