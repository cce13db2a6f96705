"""What the model is trained to do: fill masks as in inference, name concepts, spell out their words.

Two copies of each sequence run side by side. Blocks of the noisy copy hold masks; each sees itself and the
clean blocks before it, exactly as a canvas does in inference, so every block of a sequence gives a loss in
one pass.

Shapes: B sequences, S positions of one copy, T = 2 S, D model width, V vocabulary, C concepts, L labels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from engine.model.steerling import SteerlingModel
from engine.model.transformer import Attend

from .sequences import Batch, SequenceSampler

COMPOSED_WEIGHT, KNOWN_WEIGHT, ALIGNMENT_WEIGHT = 0.2, 0.1, 2.0
BLANK_WEIGHT = 24.0
"""Weight of a text's first token on an empty canvas; an ordinary masked position has about 1."""
CONCEPT_SAMPLE = 4
"""Concept losses use one of so many sequences of a batch."""
CUT_SHARE = 0.15
"""Share of sequences whose blocks end early, as a text's last block does."""


class Noise(NamedTuple):
    """Which positions of the noisy copy are masked, and where its blocks end."""

    is_masked_BS: Tensor
    cut_B: Tensor
    """Positions of a block that exist in the noisy copy."""


def draw_noise(
    size: int, length: int, block_size: int, generator: torch.Generator, *, uniform_only: bool = False
) -> Noise:
    """Masks as a canvas has them: a random share of positions, or all from some position on.

    `uniform_only`: nothing but a share drawn uniformly for each block, to measure a loss.
    """

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, device=generator.device, generator=generator)

    blocks = (size, length // block_size, 1)
    place = torch.arange(block_size, device=generator.device)
    ratio = uniform(*blocks)
    kind = uniform(*blocks)
    # A prompt that does not fill its block leaves a fixed beginning.
    prefix = (uniform(*blocks) * block_size).long()
    has_prefix = (kind < 0.2) & (not uniform_only)
    ratio = torch.where(((kind < 0.1) | (kind > 0.93)) & (not uniform_only), 1.0, ratio)
    is_masked = (uniform(*blocks[:2], block_size) < ratio) & (~has_prefix | (place >= prefix))
    # Every block gives a loss: where chance masked nothing, its first position is masked.
    is_masked[..., 0] |= ~is_masked.any(-1)
    is_cut = (uniform(size) < CUT_SHARE) & (not uniform_only)
    cut = torch.where(is_cut, 8 + (uniform(size) * (block_size - 8)).long(), block_size)
    is_masked &= place < cut[:, None, None]
    return Noise(is_masked_BS=is_masked.flatten(1), cut_B=cut)


def two_copy_mask(length: int, block_size: int, cut_B: Tensor) -> Tensor:
    """Bool mask_B1TT of the clean copy followed by the noisy one."""
    index_T = torch.arange(2 * length, device=cut_B.device)
    allowed_TT = _may_attend(index_T[:, None], index_T[None, :], length, block_size)
    exists_BT = (index_T < length) | (index_T % block_size < cut_B[:, None])
    return (allowed_TT & exists_BT[:, None, :])[:, None]


def _may_attend(query: Tensor, key: Tensor, length: int, block_size: int) -> Tensor:
    query_block, key_block = query % length // block_size, key % length // block_size
    key_is_clean = key < length
    from_clean = key_is_clean & (key_block <= query_block)
    from_noisy = torch.where(key_is_clean, key_block < query_block, key_block == query_block)
    return torch.where(query < length, from_clean, from_noisy)


def dense_attend(length: int, block_size: int, cut_B: Tensor) -> Attend:
    """Attention under `two_copy_mask`, on any device."""
    mask_B1TT = two_copy_mask(length, block_size, cut_B)

    def attend(layer: int, q_BTHE: Tensor, k_BTGE: Tensor, v_BTGE: Tensor) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q_BTHE, k_BTGE, v_BTGE))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_B1TT, enable_gqa=True)
        return y.transpose(1, 2)

    return attend


def flex_attend_factory(length: int, block_size: int, device: torch.device) -> Callable[[Tensor], Attend]:
    """The fast twin of `dense_attend`: block-sparse, compiled. Returns cut_B -> Attend."""

    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return _may_attend(query, key, length, block_size)

    block_mask = create_block_mask(allowed, None, None, 2 * length, 2 * length, device=device)

    def make(cut_B: Tensor) -> Attend:
        def cut_off(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            is_absent = (key >= length) & (key % block_size >= cut_B[batch])
            return torch.where(is_absent, -float("inf"), score)

        def attend(layer: int, q_BTHE: Tensor, k_BTGE: Tensor, v_BTGE: Tensor) -> Tensor:
            q, k, v = (tensor.transpose(1, 2) for tensor in (q_BTHE, k_BTGE, v_BTGE))
            y = flex_attention(q, k, v, score_mod=cut_off, block_mask=block_mask, enable_gqa=True)
            assert isinstance(y, Tensor)
            return y.transpose(1, 2)

        return attend

    return make


def injections(model: SteerlingModel, concept_B: Tensor, strength_B: Tensor) -> Tensor:
    """alpha * direction of each sequence, injection_BD: the formula that inference uses."""
    with torch.no_grad():
        direction_BD = F.normalize(model.known_head.embedding(concept_B).float(), dim=-1)
        peak_B = (direction_BD @ model.transformer.token_vectors_VD.float().T).amax(-1).clamp(min=1e-6)
        return direction_BD * (strength_B / peak_B)[:, None]


def noisy_hidden(model: SteerlingModel, batch: Batch, noise: Noise, attend: Attend, *, dropout: float = 0.0) -> Tensor:
    """Hidden states hidden_BSD of the noisy copy; `dropout` is applied to the residual stream after each layer."""
    mask_token_id, block_size = model.config.mask_token_id, model.config.diff_block_size
    clean_BS = batch.token_ids_BS
    noisy_BS = torch.where(noise.is_masked_BS, mask_token_id, clean_BS)
    position_S = torch.arange(clean_BS.shape[1], device=clean_BS.device)
    positions_BT = position_S.repeat(2).expand(clean_BS.shape[0], -1)
    is_steered_BS = noise.is_masked_BS & (position_S // block_size >= batch.steered_from_B[:, None])
    receives_BT = torch.cat((torch.zeros_like(is_steered_BS), is_steered_BS), dim=1).float()
    injection_BD = injections(model, batch.concept_B, batch.strength_B)
    added_BTD = receives_BT[:, :, None] * injection_BD[:, None, :]
    first = model.config.n_layers // 2

    def inject(layer: int, x_BTD: Tensor) -> Tensor:
        x_BTD = F.dropout(x_BTD, dropout) if dropout else x_BTD
        return x_BTD + added_BTD.to(x_BTD.dtype) if layer + 1 >= first else x_BTD

    token_ids_BT = torch.cat((clean_BS, noisy_BS), dim=1)
    hidden_BTD = model.transformer(token_ids_BT, positions_BT, attend, inject)
    hidden_BSD: Tensor = hidden_BTD[:, clean_BS.shape[1] :]
    return hidden_BSD


def masked_cross_entropy(
    model: SteerlingModel, hidden_BSD: Tensor, batch: Batch, noise: Noise, block_size: int
) -> tuple[Tensor, Tensor]:
    """(training loss, plain mean over masked positions) of the noisy copy's predictions."""
    logits_BSV = model.transformer.logits(hidden_BSD)
    loss_BS = F.cross_entropy(logits_BSV.float().flatten(0, 1), batch.token_ids_BS.flatten(), reduction="none")
    is_masked_BS = noise.is_masked_BS.float()
    loss_BS = loss_BS.view_as(is_masked_BS) * is_masked_BS
    # Between one weight a position and one a block: late, nearly complete canvases count for more than their masks.
    share_BN = is_masked_BS.view(is_masked_BS.shape[0], -1, block_size).mean(-1)
    # Early blocks weigh more, since most texts are short.
    place_N = torch.arange(share_BN.shape[1], device=share_BN.device)
    weight_BN = share_BN.clamp(min=0.1).rsqrt() * (place_N + 1.0).rsqrt()
    weight_BS = weight_BN.repeat_interleave(block_size, dim=1)
    # An empty canvas without a prompt looks alike at every position, and ties go to the first one: what
    # counts there is how a text begins.
    is_blank_B = is_masked_BS[:, :block_size].sum(-1) == noise.cut_B
    begins_S = torch.arange(weight_BS.shape[1], device=weight_BS.device)
    weight_BS = torch.where(is_blank_B[:, None] & (begins_S < block_size), BLANK_WEIGHT * (begins_S == 0), weight_BS)
    weighted = (loss_BS * weight_BS).sum() / (is_masked_BS * weight_BS).sum()
    return weighted, loss_BS.sum() / is_masked_BS.sum()


@torch.no_grad()
def mean_masked_loss(model: SteerlingModel, data: SequenceSampler, batches: int = 16, size: int = 16) -> float:
    """Mean cross-entropy of masked tokens, every block masked at a uniformly drawn ratio, no steering."""
    generator = torch.Generator(data.device).manual_seed(1)
    total = 0.0
    for _ in range(batches):
        batch = data.draw(size, generator, plain_only=True)
        noise = draw_noise(size, data.length, data.block_size, generator, uniform_only=True)
        attend = dense_attend(data.length, data.block_size, noise.cut_B)
        hidden_BSD = noisy_hidden(model, batch, noise, attend)
        total += masked_cross_entropy(model, hidden_BSD, batch, noise, data.block_size)[1].item()
    return total / batches


def concept_losses(model: SteerlingModel, hidden_BSD: Tensor, batch: Batch, noise: Noise) -> tuple[Tensor, Tensor]:
    """(composed, known): tokens from concepts alone, and the labels from the hidden state."""
    labels_ML = batch.labels_BSL[::CONCEPT_SAMPLE].flatten(0, 1)
    hidden_MD = hidden_BSD[::CONCEPT_SAMPLE].flatten(0, 1).float()
    weight_M = noise.is_masked_BS[::CONCEPT_SAMPLE].flatten().float()
    total = weight_M.sum()
    known_logits_MC = model.known_head.logits(hidden_MD)
    target_MC = torch.zeros_like(known_logits_MC)
    target_MC.scatter_add_(1, labels_ML.clamp(min=0), (labels_ML >= 0).to(target_MC.dtype))
    known = F.binary_cross_entropy_with_logits(known_logits_MC, target_MC, reduction="none").sum(-1)
    # The known embeddings stay what the alignment loss makes them; the discovered ones learn the rest.
    embedding_CD = model.known_head.embedding(torch.arange(target_MC.shape[1], device=hidden_MD.device)).detach()
    known_MD = target_MC.to(embedding_CD.dtype) @ embedding_CD
    discovered_MD = model.discovered_features(hidden_MD.detach())
    token_vectors_VD = model.transformer.token_vectors_VD.detach()
    logits_MV = (known_MD + discovered_MD) @ token_vectors_VD.T
    token_ids_M = batch.token_ids_BS[::CONCEPT_SAMPLE].flatten()
    composed = F.cross_entropy(logits_MV.float(), token_ids_M, reduction="none")
    return (composed * weight_M).sum() / total, (known * weight_M).sum() / total


def alignment_loss(model: SteerlingModel, association_CV: Tensor) -> Tensor:
    """Distance of each concept's logit contributions from `word_association`; padded tokens of no concern."""
    concept_C = torch.arange(association_CV.shape[0], device=association_CV.device)
    aligned_CV = model.known_head.embedding(concept_C).float() @ model.transformer.token_vectors_VD.float().T
    # Words that a concept promotes weigh more than the many that it leaves alone.
    weight_CV = 1 + 4 * association_CV.clamp(min=0)
    return (weight_CV * (aligned_CV - association_CV).square()).mean()
