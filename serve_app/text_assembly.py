"""Commits, which come in any order, become text that only grows and never shows what a stop string takes back."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine import Commit

from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Match:
    """Where a stop string was completed."""

    stop: str
    end: int
    """Characters of the text up to its end."""


class StopFinder:
    """Looks for stop strings in text that comes piece by piece; how it is cut makes no difference.

    Of several the one that is complete first counts, and of those that end together the longest.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        # How many characters of each stop string the text ends with.
        self._matched = [0] * len(self._stops)
        self._num_seen = 0

    @property
    def num_held(self) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        return max(self._matched, default=0)

    def feed(self, text: str, *, is_counted: bool = True) -> Match | None:
        """Take the next piece; the first match in it, after which nothing more may be fed.

        Without `is_counted` what is complete in this piece does not count.
        """
        if not self._stops:
            return None
        # Knuth, Morris and Pratt's search, a character at a time for all strings.
        for character in text:
            self._num_seen += 1
            found: str | None = None
            for index, stop in enumerate(self._stops):
                matched = self._advance(index, character)
                if matched == len(stop):
                    found = found or stop
                    matched = self._fallbacks[index][matched]
                self._matched[index] = matched
            if found is not None and is_counted:
                return Match(found, self._num_seen)
        return None

    def _advance(self, index: int, character: str) -> int:
        stop, fallbacks, matched = self._stops[index], self._fallbacks[index], self._matched[index]
        while matched > 0 and stop[matched] != character:
            matched = fallbacks[matched]
        return matched + 1 if stop[matched] == character else 0


def _fallbacks(stop: str) -> list[int]:
    """For each n: how long the longest proper beginning of `stop` is that its first n characters end with."""
    table = [0, 0]
    for character in stop[1:]:
        length = table[-1]
        while length > 0 and stop[length] != character:
            length = table[length]
        table.append(length + 1 if stop[length] == character else 0)
    return table


class TextAssembler:
    """Puts commits into text.

    A token is taken once all its left neighbours are committed, and text is given out in whole characters. The text
    ends for good at the first of `end_ids`, or where a stop string is complete, even where tokens right of it were
    committed earlier; what may be the beginning of a stop string is held back until more is known.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        start: int,
        end_ids: Iterable[int] = (),
        stops: Sequence[str] = (),
        keeps_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`start` is the position of the first generated token; within `min_tokens` no stop string counts."""
        self._tokenizer = tokenizer
        self._next = start
        self._end_ids = frozenset(end_ids)
        self._keeps_stop, self._min_tokens = keeps_stop, min_tokens
        self._finder = StopFinder(stops)
        self._waiting: dict[int, int] = {}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoded = ""
        """Text of all tokens taken that was not given out."""
        self._num_given = 0
        self._num_told = 0
        self.is_ended = False
        """No more text comes."""
        self.end_reason: str | int | None = None
        """The stop string or the end token that ended it; None while it goes on."""
        self.token_ids: list[int] = []
        """Tokens of the text so far, the one that completed a stop string included."""
        self.offsets: list[int] = []
        """For each token, how many characters the text had before it."""

    def add(self, commits: Sequence[Commit]) -> str:
        """Take `commits`; return the text that became certain, often none."""
        self._waiting |= {commit.position: commit.token_id for commit in commits}
        while not self.is_ended and self._next in self._waiting:
            token_id = self._waiting.pop(self._next)
            if token_id in self._end_ids:
                self.is_ended, self.end_reason = True, token_id
                break
            self._next += 1
            self.offsets.append(self._num_given + len(self._decoded))
            self.token_ids.append(token_id)
            self._take(self._decoder.decode(self._tokenizer.text_bytes(token_id)))
        return self._give(self._finder.num_held)

    def finish(self) -> str:
        """What is left when nothing more comes: what was held back, and U+FFFD for an incomplete character."""
        if not isinstance(self.end_reason, str):
            self._take(self._decoder.decode(b"", final=True))
        self.is_ended = True
        return self._give(0)

    def take_tokens(self) -> range:
        """Indices of the tokens whose text has been given out since the last call; after the end, of all others."""
        first = self._num_told
        if self.is_ended and not self._decoded:
            self._num_told = len(self.token_ids)
        else:
            # A token's text ends where the next one's begins.
            while self._num_told + 1 < len(self.offsets) and self.offsets[self._num_told + 1] <= self._num_given:
                self._num_told += 1
            is_last = self._num_told + 1 == len(self.offsets)
            if is_last and not self._decoded and self._num_given > self.offsets[-1]:
                self._num_told += 1
        return range(first, self._num_told)

    def _take(self, text: str) -> None:
        self._decoded += text
        match = self._finder.feed(text, is_counted=len(self.token_ids) > self._min_tokens)
        if match is not None:
            self.is_ended, self.end_reason = True, match.stop
            end = match.end if self._keeps_stop else match.end - len(match.stop)
            self._decoded = self._decoded[: end - self._num_given]

    def _give(self, num_held: int) -> str:
        """All but the last `num_held` characters; all of them once the text has ended."""
        end = len(self._decoded) if self.is_ended else len(self._decoded) - num_held
        text, self._decoded = self._decoded[:end], self._decoded[end:]
        self._num_given += len(text)
        return text
