"""Classifier-free guidance: away from what a text would be without its prompt.

Shapes: R rows, C canvas positions, W padded vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def guide(logits_RCW: Tensor, masked_RC: Tensor, shadow_R: Tensor, guidance_R: Tensor) -> None:
    """Write guided logits over those of guided rows' masked positions: uncond + guidance * (cond - uncond).

    Row `shadow_R[r]` (int64) has the unconditional logits of row r's positions; a row that is its own shadow is not
    guided and stays as it is, as do all shadows. `guidance_R` (float32) is cfg_scale + 1. The arithmetic is float32,
    whatever the logits are; one that is not finite in either row gives one that is not finite. The formula is that of
    Ho and Salimans, Classifier-Free Diffusion Guidance, 2022, in the form of the reference.
    """
    cond_RCW, uncond_RCW = logits_RCW.float(), logits_RCW[shadow_R].float()
    guided_RCW = uncond_RCW + guidance_R[:, None, None] * (cond_RCW - uncond_RCW)
    is_guided_R = shadow_R != torch.arange(len(shadow_R), device=shadow_R.device)
    is_guided_RC = is_guided_R[:, None] & masked_RC
    logits_RCW.copy_(torch.where(is_guided_RC[:, :, None], guided_RCW, cond_RCW))
