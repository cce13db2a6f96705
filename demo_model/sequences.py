"""Training sequences: definitions laid end to end, and the steering that goes with them.

A sequence is made of definitions, each followed by a newline and the end-of-chunk token. Three kinds:

- plain: a topic is drawn, and most definitions come from it, so that context carries topic;
- steered towards a concept with strength s: from some block on, each definition comes from that concept
  with probability `follow_probability(s)` and from anywhere otherwise. A model that fits this text follows
  a direction as far as its strength says, which is what makes the dose real;
- steered away from a concept: the context is about it, and from some block on definitions avoid it with
  probability `follow_probability(|s|)`.

Everything is drawn with tensor operations on one device, from one generator.

Shapes: B sequences, S positions, K definitions laid out in a sequence, N definitions, L labels, C concepts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .corpus import Corpus, Definition
from .tokenizer import special_ids
from .topics import TOPICS

MAX_STRENGTH = 12.0
"""Strengths seen in training; the dose is flat beyond."""
DOSE_SCALE = 4.0
"""Strength at which a steered definition follows its concept with probability 1 - 1/e."""
PLAIN_SHARE, AWAY_SHARE = 0.45, 0.08
COHERENCE = 0.8
"""Probability that a definition of a plain sequence comes from the sequence's topic."""
MIXED_SHARE = 0.2
"""Share of plain sequences that keep to no topic."""
LATE_START_SHARE = 0.3
"""Share of steered sequences whose first blocks are plain context."""
FIELD_SHARE = 0.25
"""Share of steered sequences that steer towards a field (a domain) instead of a topic."""


def follow_probability(strength: Tensor) -> Tensor:
    """How often a definition follows its concept at this strength."""
    return 1 - torch.exp(-strength.abs() / DOSE_SCALE)


class Batch(NamedTuple):
    """Sequences with their labels and steering."""

    token_ids_BS: Tensor
    labels_BSL: Tensor
    """Concept ids of the definition that holds the position, padded with -1."""
    concept_B: Tensor
    """Concept whose direction is injected."""
    strength_B: Tensor
    """Signed strength; 0 for plain sequences."""
    steered_from_B: Tensor
    """First steered block."""


class SequenceSampler:
    """Draws sequences of definitions from one set of definitions."""

    def __init__(
        self,
        corpus: Corpus,
        definitions: Sequence[Definition],
        tokenizer: Tokenizer,
        length: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        """`length` is S, a multiple of `block_size`."""
        self.length, self.block_size, self.device = length, block_size, device
        self.num_topics = len(TOPICS)
        end = special_ids(tokenizer)["endofchunk_token_id"]
        rows = [[*ids, end] for ids in encode_lines(definitions, tokenizer)]
        lengths = torch.tensor([len(row) for row in rows])
        self.flat = torch.tensor([token for row in rows for token in row], device=device)
        self.length_N = lengths.to(device)
        self.start_N = (lengths.cumsum(0) - lengths).to(device)
        labels = corpus.labels(definitions)
        most = max(len(row) for row in labels)
        self.labels_NL = torch.tensor([[*row, *[-1] * (most - len(row))] for row in labels], device=device)
        num_concepts = len(corpus.concepts)
        members: list[list[int]] = [[] for _ in range(num_concepts)]
        for index, row in enumerate(labels):
            for concept in row:
                members[concept].append(index)
        counts = torch.tensor([len(member) for member in members])
        self.members = torch.tensor([index for member in members for index in member], device=device)
        self.count_C = counts.to(device)
        self.first_C = (counts.cumsum(0) - counts).to(device)
        self.strides = torch.tensor(primes(int(counts.max()), 256), device=device)
        is_topic = torch.arange(num_concepts) < self.num_topics
        self.plain_weight_C = (counts * is_topic).float().to(device)
        self.topic_weight_C = (counts.float().pow(0.6) * is_topic).to(device)
        self.field_weight_C = (counts.float().pow(0.5) * ~is_topic).to(device)

    def draw(self, size: int, generator: torch.Generator, *, plain_only: bool = False) -> Batch:
        """`size` sequences with labels and steering; `plain_only` leaves steering out."""
        kind = self._uniform(generator, size)
        is_plain = kind < PLAIN_SHARE
        is_away = (kind >= PLAIN_SHARE) & (kind < PLAIN_SHARE + AWAY_SHARE)
        if plain_only:
            is_plain, is_away = torch.ones_like(is_plain), torch.zeros_like(is_away)
        context_B = self._draw_concepts(self.plain_weight_C, size, generator)
        topic_B = self._draw_concepts(self.topic_weight_C, size, generator)
        field_B = self._draw_concepts(self.field_weight_C, size, generator)
        target_B = torch.where(self._uniform(generator, size) < FIELD_SHARE, field_B, topic_B)
        concept_B = torch.where(is_away, context_B, target_B)
        size_B = self._uniform(generator, size) * MAX_STRENGTH
        strength_B = torch.where(is_plain, 0.0, torch.where(is_away, -size_B, size_B))
        num_blocks = self.length // self.block_size
        late_B = 1 + (self._uniform(generator, size) * (num_blocks - 1)).long()
        is_late = self._uniform(generator, size) < LATE_START_SHARE
        # Steering away needs a context to leave, most of the time.
        is_late |= is_away & (self._uniform(generator, size) < 0.7)
        from_B = torch.where(is_late, late_B, 0)
        before_BK = self._plain_definitions(context_B, generator)
        after_BK = self._steered_definitions(concept_B, context_B, strength_B, is_away, generator)
        after_BK = torch.where(is_plain[:, None], before_BK, after_BK)
        token_ids_BS, labels_BSL = self._lay_out(before_BK, after_BK, from_B * self.block_size)
        return Batch(token_ids_BS, labels_BSL, concept_B, strength_B, from_B)

    def _plain_definitions(self, context_B: Tensor, generator: torch.Generator) -> Tensor:
        size = context_B.shape[0]
        is_mixed = self._uniform(generator, size) < MIXED_SHARE
        shape = (size, self._num_definitions())
        keeps_topic = (self._uniform(generator, *shape) < COHERENCE) & ~is_mixed[:, None]
        return torch.where(keeps_topic, self._members_of(context_B, shape, generator), self._any(shape, generator))

    def _steered_definitions(
        self, concept_B: Tensor, context_B: Tensor, strength_B: Tensor, is_away: Tensor, generator: torch.Generator
    ) -> Tensor:
        shape = (concept_B.shape[0], self._num_definitions())
        obeys_BK = self._uniform(generator, *shape) < follow_probability(strength_B)[:, None]
        anything_BK = self._any(shape, generator)
        towards_BK = torch.where(obeys_BK, self._members_of(concept_B, shape, generator), anything_BK)
        # Away from the topic: another definition, drawn again once should it be of the topic.
        again_BK = self._any(shape, generator)
        is_hit = (self.labels_NL[anything_BK] == concept_B[:, None, None]).any(-1)
        other_BK = torch.where(is_hit, again_BK, anything_BK)
        keeps_BK = self._uniform(generator, *shape) < COHERENCE
        stays_BK = torch.where(keeps_BK, self._members_of(context_B, shape, generator), again_BK)
        away_BK = torch.where(obeys_BK, other_BK, stays_BK)
        return torch.where(is_away[:, None], away_BK, towards_BK)

    def _lay_out(self, before_BK: Tensor, after_BK: Tensor, change_B: Tensor) -> tuple[Tensor, Tensor]:
        """Definitions of `before` until position `change_B`, of `after` from there on, cut at `length`."""
        size, num = before_BK.shape
        length_BK = self.length_N[before_BK]
        num_before_B = ((length_BK.cumsum(1) - length_BK) < change_B[:, None]).sum(1)
        index_K = torch.arange(num, device=self.device)
        shifted_BK = (index_K[None, :] - num_before_B[:, None]).clamp(min=0)
        definition_BK = torch.where(index_K < num_before_B[:, None], before_BK, after_BK.gather(1, shifted_BK))
        length_BK = self.length_N[definition_BK]
        end_BK = length_BK.cumsum(1)
        position_BS = torch.arange(self.length, device=self.device).expand(size, -1).contiguous()
        which_BS = torch.searchsorted(end_BK, position_BS, right=True).clamp(max=num - 1)
        chosen_BS = definition_BK.gather(1, which_BS)
        inside_BS = position_BS - (end_BK - length_BK).gather(1, which_BS)
        # A sequence of very short definitions may run out: its end then repeats the last token.
        inside_BS = torch.minimum(inside_BS, self.length_N[chosen_BS] - 1)
        return self.flat[self.start_N[chosen_BS] + inside_BS], self.labels_NL[chosen_BS]

    def _num_definitions(self) -> int:
        return self.length // 4

    def _uniform(self, generator: torch.Generator, *shape: int) -> Tensor:
        return torch.rand(*shape, device=self.device, generator=generator)

    def _draw_concepts(self, weight_C: Tensor, size: int, generator: torch.Generator) -> Tensor:
        return torch.multinomial(weight_C, size, replacement=True, generator=generator)

    def _any(self, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
        return torch.randint(self.length_N.shape[0], shape, device=self.device, generator=generator)

    def _members_of(self, concept_B: Tensor, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
        """Different definitions of each sequence's concept; any others once a small concept has no more."""
        count_B1 = self.count_C[concept_B][:, None]
        first_B1 = (self._uniform(generator, shape[0], 1) * count_B1).long()
        # A prime stride larger than any count visits every member once before it returns to the first.
        stride_B1 = self.strides[
            torch.randint(len(self.strides), (shape[0], 1), device=self.device, generator=generator)
        ]
        place_K = torch.arange(shape[1], device=self.device)
        offset_BK = (first_B1 + place_K * stride_B1) % count_B1.clamp(min=1)
        index_BK = (self.first_C[concept_B][:, None] + offset_BK).clamp(max=self.members.shape[0] - 1)
        return torch.where(place_K < count_B1, self.members[index_BK], self._any(shape, generator))


def primes(above: int, count: int) -> list[int]:
    """The first `count` primes larger than `above`."""
    found: list[int] = []
    candidate = above + 1
    while len(found) < count:
        if all(candidate % divisor for divisor in range(2, int(candidate**0.5) + 1)):
            found.append(candidate)
        candidate += 1
    return found


def encode_lines(definitions: Sequence[Definition], tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of each definition and the newline after it."""
    return [encoding.ids for encoding in tokenizer.encode_batch([f"{item.text}\n" for item in definitions])]
