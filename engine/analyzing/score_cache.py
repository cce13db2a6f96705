"""Scores of complete blocks, kept in host memory for texts that begin alike.

Knows prefix keys, scores, and which blocks somebody is computing. Must not know texts, pages or devices. A score
depends on nothing that follows, so the tokens up to a block's end, which are its key, decide all of the block's scores;
no setting of a request changes them. A cache belongs to one engine, so to one model, and to that engine's thread.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..runner.text_passes import TokenScore

_OBJECT_BYTES = 704
"""What an entry takes beside its numbers: key, three arrays' heads, its place in the order. Measured, rounded up."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A block's scores, packed: as objects they would take ten times as much."""

    num_logprobs: int
    """Alternatives that were asked for; a small vocabulary has fewer."""
    logprobs: array[float]
    """One a position."""
    top_ids: array[int]
    """Of each position the same number, best first."""
    top_logprobs: array[float]

    @property
    def num_bytes(self) -> int:
        numbers = (self.logprobs, self.top_ids, self.top_logprobs)
        return _OBJECT_BYTES + sum(values.itemsize * len(values) for values in numbers)

    def scores(self, num_logprobs: int) -> list[TokenScore]:
        """As they were, with no more alternatives than asked for."""
        width = len(self.top_ids) // len(self.logprobs)
        found = []
        for index, logprob in enumerate(self.logprobs):
            part = slice(index * width, index * width + min(num_logprobs, width))
            found.append(TokenScore(logprob, tuple(zip(self.top_ids[part], self.top_logprobs[part], strict=True))))
        return found


class ScoreCache:
    """Scores by prefix key, up to a number of bytes; the least recently used go first.

    It also knows who is at work: a block that one analysis is computing can be waited for instead of computed again.
    """

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: 0 keeps nothing and promises nothing."""
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._num_bytes = 0
        self._promised: dict[bytes, tuple[int, object]] = {}  # (alternatives, who computes it) by key
        self._num_found = 0
        self._num_computed = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """What the entries take, never more than the limit."""
        return self._num_bytes

    def find(self, key: bytes, num_logprobs: int) -> list[TokenScore] | None:
        """The block's scores with so many alternatives each, or None; a find is a use."""
        entry = self._entries.get(key)
        if entry is None or entry.num_logprobs < num_logprobs:
            return None
        self._entries.move_to_end(key)
        self._num_found += len(entry.logprobs)
        return entry.scores(num_logprobs)

    def add(self, key: bytes, num_logprobs: int, scores: Sequence[TokenScore]) -> None:
        """Keep a block's scores (at least one).

        Where they are kept with as many alternatives already, that counts as a use.
        """
        old = self._entries.get(key)
        if old is not None and old.num_logprobs >= num_logprobs:
            self._entries.move_to_end(key)
            return
        tops = [pair for score in scores for pair in score.top]
        entry = _Entry(
            num_logprobs,
            array("d", [score.logprob for score in scores]),
            array("i", [token_id for token_id, _ in tops]),
            array("d", [logprob for _, logprob in tops]),
        )
        if entry.num_bytes > self._max_bytes:
            # It would drive out all others and not even stay.
            return
        self.forget([key])
        self._entries[key] = entry
        self._num_bytes += entry.num_bytes
        while self._num_bytes > self._max_bytes:
            self.forget([next(iter(self._entries))])

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop what is kept under these keys."""
        for key in keys:
            if (entry := self._entries.pop(key, None)) is not None:
                self._num_bytes -= entry.num_bytes

    def promise(self, key: bytes, num_logprobs: int, by: object) -> None:
        """Tell that `by` computes the block and will `release` it, with or without having added it."""
        if self._max_bytes:
            self._promised[key] = (num_logprobs, by)

    def is_promised(self, key: bytes, num_logprobs: int) -> bool:
        """True while somebody computes the block with as many alternatives."""
        return key in self._promised and self._promised[key][0] >= num_logprobs

    def release(self, key: bytes, by: object) -> None:
        """Take back a promise, if `by` has given the last one."""
        if key in self._promised and self._promised[key][1] is by:
            del self._promised[key]

    def count_computed(self, number: int) -> None:
        """So many positions are being scored on the device."""
        self._num_computed += number

    def take_counts(self) -> tuple[int, int]:
        """(found, computed) positions since last asked."""
        counts = self._num_found, self._num_computed
        self._num_found = self._num_computed = 0
        return counts

    def check_integrity(self, *, is_idle: bool) -> None:
        """Assert that the bytes are those of the entries, and that an idle engine has promised nothing."""
        assert not (is_idle and self._promised), f"{len(self._promised)} blocks are promised and nobody is at work"
        assert self._num_bytes == sum(entry.num_bytes for entry in self._entries.values()) <= self._max_bytes
