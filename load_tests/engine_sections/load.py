"""The requests that are sent, and the check of what comes back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine import (
    AttributionParams,
    FinishReason,
    GenerateRequest,
    Intervention,
    ModelConfig,
    Output,
    SamplingParams,
    SteeringParams,
)

STEERED = SteeringParams(interventions=(Intervention(concept_ids=(3,), strength=4.0),))
EXPLAINED = AttributionParams(top_k=8)


class WrongOutput(Exception):
    """A figure of wrong answers would mean nothing."""


@dataclass(frozen=True)
class Load:
    """Draws requests; the same arguments always draw the same."""

    config: ModelConfig
    prompt_tokens: tuple[int, int]
    """Fewest and most prompt tokens of a served request."""
    new_tokens: tuple[int, int]

    def block_request(self, row: int, keys: int, **choices: Any) -> GenerateRequest:
        """Fills the last block of `keys` positions. A row's longer prompts begin like its shorter ones."""
        block_size = self.config.diff_block_size
        return self.request(self.tokens(row, keys - block_size), block_size, row, **choices)

    def served(self, count: int, seed: int, tokens_per_step: Sequence[int] = (1,)) -> list[GenerateRequest]:
        """Prompts and texts of lengths as in the GSM8K benchmark."""
        drawn = random.Random(seed)
        requests = []
        for index in range(count):
            num_prompt, num_new = drawn.randint(*self.prompt_tokens), drawn.randint(*self.new_tokens)
            sampling = SamplingParams(seed=index, tokens_per_step=drawn.choice(tokens_per_step))
            prompt = self.tokens(seed * 100_000 + index, num_prompt)
            requests.append(self.request(prompt, num_new, index, sampling=sampling))
        return requests

    def tokens(self, seed: int, count: int) -> list[int]:
        """Random token ids, none of the special ones."""
        drawn = random.Random(seed)
        special = {self.config.mask_token_id, self.config.eos_token_id, self.config.pad_token_id, self.config.eot_id}
        ordinary = [token_id for token_id in range(min(4096, self.config.vocab_size)) if token_id not in special]
        return drawn.choices(ordinary, k=count)

    def request(
        self,
        prompt: list[int],
        max_tokens: int,
        seed: int,
        *,
        sampling: SamplingParams | None = None,
        steering: SteeringParams | None = STEERED,
        attribution: AttributionParams | None = EXPLAINED,
    ) -> GenerateRequest:
        """Steered, explained and sampled with the defaults, unless it is told otherwise."""
        return GenerateRequest(
            prompt_token_ids=prompt,
            max_tokens=max_tokens,
            # Texts of their full length: random weights would end them anywhere.
            sampling=replace(sampling or SamplingParams(seed=seed), ignore_eos=True),
            steering=steering,
            attribution=attribution,
        )


def check(output: Output, request: GenerateRequest) -> None:
    """Raise WrongOutput unless the text is complete and, where it was asked for, every commit explained."""
    name = output.request_id
    if output.error is not None or output.finish_reason is not FinishReason.LENGTH:
        raise WrongOutput(f"{name} ended with {output.finish_reason} ({output.error})")
    if len(output.commits) != request.max_tokens or len(output.token_ids) != request.max_tokens:
        raise WrongOutput(f"{name} has {len(output.commits)} commits for max_tokens {request.max_tokens}")
    if request.attribution is None:
        return
    for commit in output.commits:
        parts = commit.attribution
        if parts is None:
            raise WrongOutput(f"{name}: position {commit.position} was committed and not explained")
        total = parts.known_total + parts.discovered_total + parts.epsilon
        if not abs(total - commit.target_logit) <= 1e-2 + 1e-3 * abs(commit.target_logit):
            raise WrongOutput(f"{name}: parts sum to {total}, the logit is {commit.target_logit}")
