"""Folders that describe a model without weights: what the ingress reads, with a vocabulary that needs no download.

Token i of the vocabulary is a byte for i < 256 and else the number i - 256 and a space, so that a text tells ids. With
the vocabulary of the 8B shape there are NUM_NUMBERS numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..engine_sections.bench import EIGHT_B

NUM_BYTES, NUM_NUMBERS = 256, 100_000
SHAPES: dict[str, dict[str, Any]] = {
    "8b": EIGHT_B,
    "tiny": {
        "vocab_size": 6144,
        "eos_token_id": 6140,
        "pad_token_id": 6141,
        "mask_token_id": 6143,
        "n_layers": 2,
        "n_embd": 64,
        "n_head": 4,
        "n_kv_heads": 2,
        "intermediate_size": 128,
        "block_size": 1024,
        "n_concepts": 32,
        "n_unknown_concepts": 64,
        "concept_dim": 64,
        "topk_known": 4,
        "topk_known_features": 4,
        "factorize_rank": 8,
        "unknown_topk": 8,
    },
}
"""What config.json says of each: the shape of Steerling-8B, and one that a CPU runs."""


def write_description(folder: Path, shape: str) -> Path:
    """Write config.json and tokenizer.json of a shape; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "steerling", **SHAPES[shape]}), encoding="utf-8")
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(SHAPES[shape]["eos_token_id"])), encoding="utf-8")
    return folder


def number_token(number: int) -> int:
    """The id of the token whose text is the number, modulo how many there are."""
    return NUM_BYTES + number % NUM_NUMBERS


def _tokenizer(num_ordinary: int) -> dict[str, Any]:
    """A byte-level vocabulary without merges: nothing but bytes can come from a text. Special tokens are left out."""
    alphabet = _byte_alphabet()
    vocabulary = {character: byte for byte, character in enumerate(alphabet)}
    numbers = range(min(num_ordinary - NUM_BYTES, NUM_NUMBERS))
    vocabulary |= {f"{number}{alphabet[32]}": number_token(number) for number in numbers}
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }


def _byte_alphabet() -> list[str]:
    """How byte-level BPE spells each byte: printable ones as themselves, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
