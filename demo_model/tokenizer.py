"""The demo's own byte-level BPE tokenizer, in the files that transformers reads."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<|endoftext|>", "<|pad|>", "<|bos|>", "<|endofchunk|>", "<|mask|>")
SPECIAL_ID_NAMES = ("eos_token_id", "pad_token_id", "bos_token_id", "endofchunk_token_id", "mask_token_id")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A BPE tokenizer of exactly `vocab_size` tokens; the special ones have the last ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"the text gives {tokenizer.get_vocab_size()} tokens, not vocab_size {vocab_size}; ask for fewer"
        )
    return tokenizer


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """The special tokens' ids under their names in config.json."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    return {name: vocabulary[token] for name, token in zip(SPECIAL_ID_NAMES, SPECIAL_TOKENS, strict=True)}


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    eos, pad, bos, endofchunk, mask = SPECIAL_TOKENS
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "eos_token": eos,
        "pad_token": pad,
        "bos_token": bos,
        "mask_token": mask,
        "extra_special_tokens": {"endofchunk_token": endofchunk},
    }
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
