"""Paged attention against its slow twin, and against dense attention over the whole sequence."""

import pytest
import torch

from engine.model.attention import (
    block_causal_mask,
    dense_block_causal_attention,
    paged_attention,
    paged_attention_by_row,
)

BLOCK, HEADS, GROUPS, WIDTH = 16, 4, 2, 8


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40, 64])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_every_row_of_a_paged_sequence_equals_the_dense_one(length, groups):
    """Pages lie scattered, and everything that does not belong to the sequence is filled with garbage."""
    num_blocks = -(-length // BLOCK)
    q, k, v = (
        random(1, length, HEADS, WIDTH),
        random(1, length, groups, WIDTH, seed=1),
        random(1, length, groups, WIDTH, seed=2),
    )
    dense = dense_block_causal_attention(q, k, v, BLOCK)[0]
    pages = torch.randperm(num_blocks + 5, generator=torch.Generator().manual_seed(length))[:num_blocks]
    k_pages, v_pages = (
        50 * random(num_blocks + 5, BLOCK, groups, WIDTH, seed=3),
        torch.full((num_blocks + 5, BLOCK, groups, WIDTH), 1e6),
    )
    for position in range(length):
        k_pages[pages[position // BLOCK], position % BLOCK] = k[0, position]
        v_pages[pages[position // BLOCK], position % BLOCK] = v[0, position]
    for row in range(num_blocks):
        table = torch.full((1, num_blocks), int(pages[0]))
        table[0, : row + 1] = pages[: row + 1]
        stop = min((row + 1) * BLOCK, length)
        queries = torch.zeros(1, BLOCK, HEADS, WIDTH)
        queries[0, : stop - row * BLOCK] = q[0, row * BLOCK : stop]
        for attend in (paged_attention, paged_attention_by_row):
            y = attend(queries, k_pages, v_pages, table, torch.tensor([stop]))
            torch.testing.assert_close(y[0, : stop - row * BLOCK], dense[row * BLOCK : stop], atol=1e-5, rtol=0)


def test_rows_of_different_lengths_in_one_pass_equal_the_slow_twin():
    lengths = torch.tensor([3, 16, 17, 48, 41])
    table = torch.randint(12, (5, 3), generator=torch.Generator().manual_seed(7))
    case = (
        random(5, BLOCK, HEADS, WIDTH),
        random(12, BLOCK, GROUPS, WIDTH, seed=1),
        random(12, BLOCK, GROUPS, WIDTH, seed=2),
    )
    torch.testing.assert_close(
        paged_attention(*case, table, lengths), paged_attention_by_row(*case, table, lengths), atol=1e-5, rtol=0
    )


def test_the_mask_lets_a_position_see_its_own_block_and_all_earlier_ones():
    mask = block_causal_mask(7, 3)
    assert [int(row.sum()) for row in mask] == [3, 3, 3, 6, 6, 6, 7]
    assert all(bool(row[: int(row.sum())].all()) for row in mask)
