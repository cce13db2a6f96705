"""Which tokens are words of a concept: the target that known embeddings are fitted to.

Shapes: C concepts, V vocabulary, P (concept, token) pairs.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

_FUNCTION_WORDS = """
about above after again all also and any are around been before being below between but can certain did each etc few
first for forth from had has have his her into its just like made may more most not off one only onto other out over
same some such than that the their them then there these they this those through too two under until upon used very was
were when where which who whose will with within without would you your
"""
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())
"""Words that belong to no topic."""


def word_association(
    token_rows: list[list[int]], labels: list[tuple[int, ...]], num_concepts: int, is_word_V: Tensor
) -> Tensor:
    """association_CV: log p(token | concept) - log p(token), shrunk to 0 where counts are small.

    Token frequency cancels, so the largest entries of a concept are its own words rather than frequent ones.
    Tokens outside `is_word_V` are held at 0 or below: a reader could not tell their topic.
    """
    vocab_size = is_word_V.shape[0]
    pairs = [
        (concept, token) for row, ids in zip(token_rows, labels, strict=True) for token in set(row) for concept in ids
    ]
    pair_P2 = torch.tensor(pairs)
    counts_CV = torch.bincount(pair_P2[:, 0] * vocab_size + pair_P2[:, 1], minlength=num_concepts * vocab_size)
    counts_CV = counts_CV.view(num_concepts, vocab_size).float()
    # Every definition has exactly one topic, so topic counts add up to the whole.
    all_V = torch.bincount(torch.tensor([token for row in token_rows for token in set(row)]), minlength=vocab_size)
    num_C = torch.bincount(torch.tensor([concept for ids in labels for concept in ids]), minlength=num_concepts)
    expected_CV = num_C[:, None] / len(labels) * all_V
    ratio_CV = torch.log((counts_CV + 0.5) / (expected_CV + 0.5))
    # One and a half standard errors of a count's logarithm are taken off.
    doubt_CV = 1.5 * (torch.maximum(counts_CV, expected_CV) + 0.5).rsqrt()
    association_CV = ratio_CV.sign() * (ratio_CV.abs() - doubt_CV).clamp(min=0)
    # What only a few of a concept's definitions say is no word of the concept.
    association_CV = association_CV * (1 - torch.exp(-200.0 * counts_CV / num_C[:, None])).where(ratio_CV > 0, 1.0)
    return torch.where(is_word_V, association_CV, association_CV.clamp(max=0.0)).clamp(-3.0, 4.0)


def content_words(token_rows: list[list[int]], token_texts: list[str]) -> Tensor:
    """is_word_V: tokens that begin with a space, mostly stand for a whole word, and are no function word."""
    begins_word = [not text[:1].isalpha() for text in token_texts]
    whole, used = Counter[int](), Counter[int]()
    for row in token_rows:
        for token, following in zip(row, row[1:], strict=False):
            used[token] += 1
            whole[token] += begins_word[following]
    return torch.tensor(
        [
            text[:1] == " "
            and text[1:].isalpha()
            and len(text) > 3
            and text[1:].lower() not in FUNCTION_WORDS
            and 2 * whole[token] > used[token]
            for token, text in enumerate(token_texts)
        ]
    )
