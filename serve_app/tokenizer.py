"""Text to token ids, and token ids to the exact bytes they stand for.

Two vocabularies are known: a `tokenizer.json` in the checkpoint's folder (byte-level BPE), and the published one of
Steerling, which is tiktoken's cl100k_base with special tokens of its own. Both become one table of bytes a token, so
that text is put together from bytes: a token may hold only a part of a character.

Special tokens, the end of a chunk among them, have no text, as in the reference implementation; token ids and
attributions keep them under their names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tiktoken
import tokenizers

from engine import CheckpointError, ModelConfig

_SPECIAL_FIELDS = {
    "eos_token_id": "<|endoftext|>",
    "pad_token_id": "<|pad|>",
    "bos_token_id": "<|bos|>",
    "endofchunk_token_id": "<|endofchunk|>",
    "mask_token_id": "<|mask|>",
    "start_header_id": "<|start_header_id|>",
    "end_header_id": "<|end_header_id|>",
    "eot_id": "<|eot_id|>",
}


class Tokenizer:
    """One vocabulary.

    `encode` maps text to ids and must not look for special tokens in it; `token_bytes[id]` are an ordinary token's
    bytes; `special_names` names the special ones, whose bytes here do not count.
    """

    def __init__(
        self,
        encode: Callable[[str], Sequence[int]],
        token_bytes: Sequence[bytes],
        special_names: Mapping[int, str],
    ) -> None:
        self._encode = encode
        self._special_names = dict(special_names)
        self._ids_by_name = {name: i for i, name in special_names.items()}
        # Of two names that begin alike the longer one counts.
        names = sorted(self._ids_by_name, key=len, reverse=True)
        self._special_pattern = re.compile(f"({'|'.join(map(re.escape, names))})" if names else "($^)")
        self._text_bytes = [b"" if i in special_names else spelled for i, spelled in enumerate(token_bytes)]
        self.longest_token = max(map(len, self._text_bytes))
        """Bytes in the longest token: n tokens hold at most n times as many."""

    @classmethod
    def from_checkpoint(cls, folder: str | Path, config: ModelConfig) -> Tokenizer:
        """The vocabulary of the checkpoint in `folder`. Raises CheckpointError if it does not fit the model."""
        file = Path(folder) / "tokenizer.json"
        return _from_tokenizer_json(file, config) if file.is_file() else _from_cl100k(config)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(self._text_bytes)

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Name -> id of every special token."""
        return MappingProxyType(self._ids_by_name)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without any token added. Text that spells a special token is ordinary text."""
        return list(self._encode(text))

    def split_special(self, text: str) -> list[str]:
        """The text in parts, each a special token's name or text without one; some may be empty."""
        return self._special_pattern.split(text)

    def encode_with_special(self, text: str) -> list[int]:
        """Ids of `text`, where the name of a special token stands for that token. Not for what a user wrote."""
        ids: list[int] = []
        for part in self.split_special(text):
            special = self._ids_by_name.get(part)
            ids += self.encode(part) if special is None else [special]
        return ids

    def text_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text, perhaps nothing and perhaps only a part of a character."""
        return self._text_bytes[token_id]

    def token_name(self, token_id: int) -> str:
        """The token for people to read: a special token's name, else its text, with U+FFFD for parts of characters."""
        name = self._special_names.get(token_id)
        return self._text_bytes[token_id].decode("utf-8", "replace") if name is None else name

    def spelled(self, token_id: int) -> dict[str, Any]:
        """The token as answers show it: its name, and the bytes that it adds to the text."""
        return {"token": self.token_name(token_id), "bytes": list(self.text_bytes(token_id))}

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of `token_ids`; bytes that are no character become U+FFFD."""
        return b"".join(map(self.text_bytes, token_ids)).decode("utf-8", "replace")

    def decode_with_special(self, token_ids: Iterable[int]) -> str:
        """The same with special tokens under their names, so that `encode_with_special` finds them again."""
        named = self._special_names
        parts = (named[i].encode() if i in named else self._text_bytes[i] for i in token_ids)
        return b"".join(parts).decode("utf-8", "replace")


def _from_tokenizer_json(file: Path, config: ModelConfig) -> Tokenizer:
    description: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    decoder = (description.get("decoder") or {}).get("type")
    if decoder != "ByteLevel":
        raise CheckpointError(f"{file} has decoder {decoder!r}; only byte-level BPE ('ByteLevel') is supported")
    backend = tokenizers.Tokenizer.from_file(str(file))
    # Despite its name this makes the text of a special token an ordinary text.
    backend.encode_special_tokens = True
    added = {int(token["id"]): token for token in description.get("added_tokens", ())}
    special = {i: str(token["content"]) for i, token in added.items() if token.get("special")}
    special |= {i: special.get(i, name) for i, name in _special_ids(config).items()}
    token_bytes = [b""] * config.vocab_size
    for spelled, i in backend.get_vocab(with_added_tokens=True).items():
        if i >= config.vocab_size:
            raise CheckpointError(f"{file} holds token id {i}; the model's vocabulary has {config.vocab_size}")
        if i not in special:
            token_bytes[i] = spelled.encode("utf-8") if i in added else _spelled_bytes(spelled)

    def encode(text: str) -> list[int]:
        return backend.encode(text, add_special_tokens=False).ids

    for i, name in special.items():
        if i in encode(name):
            raise CheckpointError(f"{file} does not mark token {i} {name!r} as special, so text could spell it")
    return Tokenizer(encode, token_bytes, special)


def _from_cl100k(config: ModelConfig) -> Tokenizer:
    encoding = tiktoken.get_encoding("cl100k_base")
    ordinary = encoding.n_vocab - len(encoding.special_tokens_set)
    if config.vocab_size < ordinary:
        raise CheckpointError(
            f"the checkpoint has no tokenizer.json and a vocabulary of {config.vocab_size}; "
            f"Steerling's own has at least {ordinary} tokens"
        )
    special = _special_ids(config)
    token_bytes = [b""] * config.vocab_size
    # Ids between the last ordinary token and the special ones stand for nothing.
    for i in range(encoding.max_token_value + 1):
        try:
            token_bytes[i] = encoding.decode_single_token_bytes(i)
        except KeyError:
            special.setdefault(i, f"<|unused_{i}|>")
    for name in encoding.special_tokens_set:
        special.setdefault(encoding.encode_single_token(name), name)
    return Tokenizer(encoding.encode_ordinary, token_bytes, special)


def _special_ids(config: ModelConfig) -> dict[int, str]:
    ids = {getattr(config, field): name for field, name in _SPECIAL_FIELDS.items()}
    return {i: name for i, name in ids.items() if i is not None}


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE spells every byte as one printable character: itself, or one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _spelled_bytes(spelled: str) -> bytes:
    return bytes(_BYTES[character] for character in spelled)
