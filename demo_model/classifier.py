"""A naive Bayes classifier of definitions by topic: the yardstick for steering."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence

import torch

from .corpus import Definition
from .topics import TOPICS

SMOOTHING = 0.05


def words(text: str) -> list[str]:
    """Lower-case words and numbers of a text, in order."""
    return re.findall(r"[a-z0-9]+", text.lower())


def features(text: str) -> set[str]:
    """Words and pairs of neighbouring words, the text's two ends counted as words."""
    bounded = ["^", *words(text), "$"]
    return {*bounded[1:-1], *(f"{left} {right}" for left, right in zip(bounded, bounded[1:], strict=False))}


class TopicClassifier:
    """Multinomial naive Bayes over `features`, trained on definitions and their topics."""

    def __init__(self, definitions: Sequence[Definition]) -> None:
        self._row: dict[str, int] = {}
        pairs = torch.tensor(
            [
                (self._row.setdefault(feature, len(self._row)), definition.topic)
                for definition in definitions
                for feature in features(definition.text)
            ]
        )
        shape = (len(self._row), len(TOPICS))
        counts = torch.bincount(pairs[:, 0] * shape[1] + pairs[:, 1], minlength=shape[0] * shape[1]).view(shape)
        # Rows are features: a definition then reads a few rows that lie together.
        self._log_likelihood = torch.log((counts + SMOOTHING) / (counts.sum(dim=0) + SMOOTHING * shape[0]))
        sizes = torch.bincount(torch.tensor([item.topic for item in definitions]), minlength=shape[1])
        self._log_prior = torch.log(sizes.clamp(min=1) / sizes.sum())

    def topic(self, text: str) -> int:
        """The likeliest topic of a definition; unknown words say nothing."""
        rows = torch.tensor([self._row[item] for item in features(text) if item in self._row], dtype=torch.long)
        return int((self._log_prior + self._log_likelihood[rows].sum(dim=0)).argmax())

    def accuracy(self, definitions: Iterable[Definition]) -> float:
        """Share of definitions whose topic is found."""
        return statistics.fmean(self.topic(definition.text) == definition.topic for definition in definitions)
