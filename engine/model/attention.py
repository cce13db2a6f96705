"""Attention over blocks: dense over whole sequences, and over the pages of single rows.

Tile, block and page are the same C positions, so a row needs no mask inside its keys: it sees every
position of its pages below its key length and nothing else.

Shapes: R rows, C canvas positions, S sequence positions, H query heads, G KV heads, E head width,
P pages, B blocks in a row's page table.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

PAGES_PER_SPLIT = 16
"""Pages one program of the attention kernel walks, at least: 1,024 keys of Steerling-8B. A shorter row is whole."""

MAX_SPLITS = 8
"""Splits of a row, at most: each is a partial result to write and read again. Beyond 128 pages splits grow instead."""


def num_splits_for(num_pages: int) -> int:
    """The most splits that a row of so many pages or fewer can have.

    A row is cut into splits of max(PAGES_PER_SPLIT, its pages / MAX_SPLITS, rounded up) pages. That depends on the
    row's own length only, so its result does too.
    """
    return max(1, min(MAX_SPLITS, -(-num_pages // PAGES_PER_SPLIT)))


def block_causal_mask(length: int, block_size: int, device: torch.device | None = None) -> Tensor:
    """Bool mask_SS: True where query position i may attend key position j, block(j) <= block(i)."""
    block_S = torch.arange(length, device=device) // block_size
    return block_S[:, None] >= block_S[None, :]


def dense_block_causal_attention(q_RSHE: Tensor, k_RSGE: Tensor, v_RSGE: Tensor, block_size: int) -> Tensor:
    """Attention of complete sequences to themselves, block-causal. Returns y_RSHE. Differentiable."""
    mask_SS = block_causal_mask(q_RSHE.shape[1], block_size, q_RSHE.device)
    # Heads are repeated, not shared by enable_gqa: with a mask, that leaves only a kernel which holds all S x S scores.
    num_sharing = q_RSHE.shape[2] // k_RSGE.shape[2]
    k_RSHE, v_RSHE = (x.repeat_interleave(num_sharing, dim=2) for x in (k_RSGE, v_RSGE))
    y_RHSE = F.scaled_dot_product_attention(
        q_RSHE.transpose(1, 2), k_RSHE.transpose(1, 2), v_RSHE.transpose(1, 2), attn_mask=mask_SS
    )
    return y_RHSE.transpose(1, 2)


def paged_attention(
    q_RCHE: Tensor, k_PCGE: Tensor, v_PCGE: Tensor, page_table_RB: Tensor, key_length_R: Tensor
) -> Tensor:
    """Attention of each row to its own pages. Returns y_RCHE.

    `page_table_RB` (int64) holds the page of each block in order; entries past a row's key length may be
    any valid page. `key_length_R` (int64) is how many keys exist, counted from position 0.
    """
    num_blocks = page_table_RB.shape[1]
    page_size = k_PCGE.shape[1]
    k_RSGE = k_PCGE[page_table_RB].flatten(1, 2)
    v_RSGE = v_PCGE[page_table_RB].flatten(1, 2)
    key_position_S = torch.arange(num_blocks * page_size, device=q_RCHE.device)
    exists_RS = key_position_S[None, :] < key_length_R[:, None]
    y_RHCE = F.scaled_dot_product_attention(
        q_RCHE.transpose(1, 2),
        k_RSGE.transpose(1, 2),
        v_RSGE.transpose(1, 2),
        attn_mask=exists_RS[:, None, None, :],
        enable_gqa=True,
    )
    return y_RHCE.transpose(1, 2)


def paged_attention_by_row(
    q_RCHE: Tensor, k_PCGE: Tensor, v_PCGE: Tensor, page_table_RB: Tensor, key_length_R: Tensor
) -> Tensor:
    """The slow twin of `paged_attention`: one row and one head at a time, softmax written out."""
    y_RCHE = torch.empty_like(q_RCHE)
    heads_per_group = q_RCHE.shape[2] // k_PCGE.shape[2]
    for row in range(q_RCHE.shape[0]):
        num_keys = int(key_length_R[row])
        k_SGE = k_PCGE[page_table_RB[row]].flatten(0, 1)[:num_keys].float()
        v_SGE = v_PCGE[page_table_RB[row]].flatten(0, 1)[:num_keys].float()
        for head in range(q_RCHE.shape[2]):
            k_SE, v_SE = k_SGE[:, head // heads_per_group], v_SGE[:, head // heads_per_group]
            scores_CS = q_RCHE[row, :, head].float() @ k_SE.T / k_SE.shape[-1] ** 0.5
            y_RCHE[row, :, head] = (scores_CS.softmax(dim=-1) @ v_SE).to(y_RCHE.dtype)
    return y_RCHE
