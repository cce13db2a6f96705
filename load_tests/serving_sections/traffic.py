"""The bodies that are sent: a mix that is drawn from a seed, request by request."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

LEAST_ID, MOST_ID = 256, 4096
"""Token ids of prompts: ordinary ones in every vocabulary that is served here."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What requests look like. Shares are from 0 to 1."""

    prompt_tokens: tuple[int, int] = (60, 250)
    """Fewest and most tokens of a prompt, without what it shares with others."""
    new_tokens: tuple[int, int] = (64, 256)
    policies: Sequence[str] = ("confidence",)
    """One is drawn for each request; twice the name, twice as often."""
    steered_share: float = 0.5
    attributed_share: float = 0.5
    concepts: Sequence[int] = (3,)
    """Ids to steer by."""
    shared_share: float = 0.5
    """Share of requests whose prompt begins with one of the system prompts."""
    num_shared: int = 4
    shared_tokens: int = 128
    """Tokens of a system prompt."""
    include_diffusion: str = "blocks"
    seed: int = 0

    def body(self, index: int) -> dict[str, Any]:
        """The request with this number; always the same."""
        drawn = random.Random(f"{self.seed}/{index}")
        prompt = drawn.choices(range(LEAST_ID, MOST_ID), k=drawn.randint(*self.prompt_tokens))
        if drawn.random() < self.shared_share:
            prompt = self._shared(drawn.randrange(self.num_shared)) + prompt
        body: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": drawn.randint(*self.new_tokens),
            "seed": index,
            # Texts of their full length, whatever the weights would say.
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "include_diffusion": self.include_diffusion},
            "diffusion": {"policy": drawn.choice(self.policies)},
        }
        if drawn.random() < self.steered_share:
            body["steering"] = {"interventions": [{"concepts": [drawn.choice(self.concepts)], "strength": 4.0}]}
        if drawn.random() < self.attributed_share:
            body["attribution"] = {"level": "token", "top_k": 8}
        return body

    def bodies(self, first: int = 0) -> Iterator[dict[str, Any]]:
        """Requests without end, from number `first` on."""
        index = first
        while True:
            yield self.body(index)
            index += 1

    def _shared(self, number: int) -> list[int]:
        drawn = random.Random(f"{self.seed}/shared/{number}")
        return drawn.choices(range(LEAST_ID, MOST_ID), k=self.shared_tokens)
