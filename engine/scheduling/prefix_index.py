"""Which page holds the keys and values of which token prefix.

Knows hashes and page ids. Must not know sequences, reference counts or the order of eviction:
the page pool decides when a page goes and says so with `forget`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

KEY_SIZE = 32
ROOT_KEY = bytes(KEY_SIZE)
"""Parent key of a sequence's first block."""


def prefix_key(parent_key: bytes, block_token_ids: Sequence[int]) -> bytes:
    """Key under which a sealed block's page is shared: it stands for all tokens up to the block's end.

    `parent_key` is the key of the block before, or ROOT_KEY. The same on every machine and in
    every process. A key of 32 bytes puts collisions out of reach even for someone who looks for them.
    """
    # Steering is no part of the key: injection touches masked positions only, and a sealed block
    # has none, so its keys and values are the same under every steering setting. Sampling settings
    # choose tokens, and the tokens are in the key.
    return blake2b(
        parent_key + struct.pack(f"<{len(block_token_ids)}q", *block_token_ids), digest_size=KEY_SIZE
    ).digest()


def prefix_keys(token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Keys of the complete blocks of `token_ids`, from block 0 on: the same that the index finds pages by."""
    keys: list[bytes] = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        keys.append(prefix_key(keys[-1] if keys else ROOT_KEY, token_ids[start : start + block_size]))
    return keys


@dataclass(frozen=True, slots=True)
class PrefixChanges:
    """What an index offers that it did not before, and no longer offers."""

    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    is_everything: bool = False
    """`added` is all that it offers, and nothing told before counts."""


class PrefixIndex:
    """A map between prefix keys and pages, one page a key and one key a page."""

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        # True: offered since changes were last taken; False: no longer offered. A key that came and went is in
        # neither state, so this never holds more than what is offered and what was offered then.
        self._is_new: dict[bytes, bool] = {}

    def __len__(self) -> int:
        return len(self._key_of)

    def __contains__(self, page_id: int) -> bool:
        return page_id in self._key_of

    @property
    def page_ids(self) -> frozenset[int]:
        """Every page that is indexed."""
        return frozenset(self._key_of)

    def register(self, key: bytes, page_id: int) -> None:
        """Offer a sealed page to everyone whose tokens lead to `key`. Neither may be registered yet."""
        assert key not in self._page_of, f"page {page_id}: its prefix is already on page {self._page_of[key]}"
        assert page_id not in self._key_of, f"page {page_id} already stands for another prefix"
        self._page_of[key] = page_id
        self._key_of[page_id] = key
        self._note(key, is_new=True)

    def find(self, key: bytes) -> int | None:
        """Page of exactly this prefix, or None."""
        return self._page_of.get(key)

    def longest_match(self, keys: Iterable[bytes]) -> list[int]:
        """Pages of the leading keys, up to the first that is missing.

        `keys` are a sequence's, from block 0 on. They are taken one by one, so a generator that
        hashes as it goes hashes no further than one block past the match.
        """
        # A block whose parent was forgotten is not reached. Should the parent be computed again, the
        # block is found again, rightly: its key names all tokens before it, wherever they are stored.
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def forget(self, page_id: int) -> None:
        """Stop offering the page, if it was offered."""
        key = self._key_of.pop(page_id, None)
        if key is not None:
            del self._page_of[key]
            self._note(key, is_new=False)

    def take_changes(self, *, everything: bool = False) -> PrefixChanges:
        """What changed since changes were last taken, or all that is offered now; either way the next begin here."""
        changes, self._is_new = self._is_new, {}
        if everything:
            return PrefixChanges(added=tuple(self._page_of), is_everything=True)
        return PrefixChanges(
            added=tuple(key for key, is_new in changes.items() if is_new),
            removed=tuple(key for key, is_new in changes.items() if not is_new),
        )

    def _note(self, key: bytes, *, is_new: bool) -> None:
        if self._is_new.pop(key, is_new) == is_new:
            self._is_new[key] = is_new

    def check_integrity(self) -> None:
        """Assert that the two directions of the map agree."""
        assert len(self._page_of) == len(self._key_of)
        for page_id, key in self._key_of.items():
            assert self._page_of[key] == page_id, f"page {page_id} and its key disagree"
