"""Requests and when they arrive.

Chosen by what is served, before anything was measured:
- Half of the requests go one token a step, the engine's default; the rest two or four, as its faster policies do.
- Answers have 1 to 6 blocks of 64 tokens, evenly. Half of the callers ask for just what they get; the others leave the
  limit at 6 blocks and their text ends sooner, which no router can know.
- Prompts have 32 to 512 tokens, evenly, so the first block is filled from any position on.
- With shared system prompts, each request begins with one of many prompts of 1,024 tokens.
- Bursty arrivals: for half a second on average twice the mean rate, for one and a half two thirds of it.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from math import ceil

BLOCK_SIZE = 64
MOST_BLOCKS = 6
_PACES = ((1, 0.5), (2, 0.3), (4, 0.2))
_PROMPT_TOKENS = (32, 512)
_BURST_S, _CALM_S = 0.5, 1.5
_BURST_RATE, _CALM_RATE = 2.0, 2 / 3


@dataclass(frozen=True, kw_only=True)
class SystemPrompts:
    """Prompts that many requests begin with."""

    num_prompts: int
    num_blocks: int = 16
    zipf: float = 0.0
    """How unequal their popularity is: the k-th is asked for in proportion to 1 / k^zipf."""

    def chooser(self) -> Callable[[random.Random], int]:
        """A function that draws a prompt."""
        sums = list(accumulate((k + 1) ** -self.zipf for k in range(self.num_prompts)))
        return lambda rng: bisect_left(sums, rng.random() * sums[-1])


@dataclass(eq=False, kw_only=True, slots=True)
class SimRequest:
    """A request, and what became of it."""

    number: int
    arrival_s: float
    num_prompt_tokens: int
    num_blocks: int
    """Blocks that it will really write."""
    max_blocks: int
    """Blocks that it may write: what the router can know."""
    tokens_per_step: int
    system_prompt: int | None = None
    num_shared_blocks: int = 0
    num_found_blocks: int = 0
    """Of its prompt, cached where it came to."""
    num_refusals: int = 0
    first_block_s: float | None = None
    finished_s: float | None = None

    @property
    def num_prompt_blocks(self) -> int:
        return self.num_prompt_tokens // BLOCK_SIZE

    @property
    def num_first_tokens(self) -> int:
        """Positions of its first canvas that are not prompt."""
        return BLOCK_SIZE - self.num_prompt_tokens % BLOCK_SIZE

    @property
    def num_tokens(self) -> int:
        """Tokens that it really writes."""
        return self.num_first_tokens + (self.num_blocks - 1) * BLOCK_SIZE

    @property
    def max_tokens(self) -> int:
        return self.num_first_tokens + (self.max_blocks - 1) * BLOCK_SIZE

    def num_passes(self, block: int) -> int:
        """Denoise passes of its block-th block."""
        return ceil((self.num_first_tokens if block == 0 else BLOCK_SIZE) / self.tokens_per_step)

    def num_passes_after(self, block: int) -> int:
        """Denoise passes of all its blocks behind one."""
        return (self.num_blocks - 1 - block) * ceil(BLOCK_SIZE / self.tokens_per_step)


def draw_request(
    rng: random.Random, number: int, arrival_s: float, draw_prompt: Callable[[random.Random], int] | None, shared: int
) -> SimRequest:
    """One request of the mix."""
    num_blocks = rng.randint(1, MOST_BLOCKS)
    (pace,) = rng.choices([pace for pace, _ in _PACES], [share for _, share in _PACES])
    return SimRequest(
        number=number,
        arrival_s=arrival_s,
        num_prompt_tokens=rng.randint(*_PROMPT_TOKENS) + (shared * BLOCK_SIZE if draw_prompt else 0),
        num_blocks=num_blocks,
        max_blocks=num_blocks if rng.random() < 0.5 else MOST_BLOCKS,
        tokens_per_step=pace,
        system_prompt=draw_prompt(rng) if draw_prompt else None,
        num_shared_blocks=shared if draw_prompt else 0,
    )


def draw_requests(
    seed: int, rate: float, until_s: float, *, is_bursty: bool = False, system: SystemPrompts | None = None
) -> list[SimRequest]:
    """All requests of a run: `rate` a second on average, until then. The same seed gives the same ones."""
    rng = random.Random(seed)
    draw_prompt = system.chooser() if system else None
    requests: list[SimRequest] = []
    now_s, is_burst, changes_s = 0.0, False, float("inf")
    if is_bursty:
        changes_s = rng.expovariate(1 / _CALM_S)
    while True:
        factor = 1.0 if not is_bursty else _BURST_RATE if is_burst else _CALM_RATE
        next_s = now_s + rng.expovariate(rate * factor)
        if next_s > changes_s:
            # Memoryless: what was drawn at the old rate is drawn again at the new one.
            now_s, is_burst = changes_s, not is_burst
            changes_s = now_s + rng.expovariate(1 / (_BURST_S if is_burst else _CALM_S))
            if now_s > until_s:
                return requests
            continue
        now_s = next_s
        if now_s > until_s:
            return requests
        requests.append(draw_request(rng, len(requests), now_s, draw_prompt, system.num_blocks if system else 0))
