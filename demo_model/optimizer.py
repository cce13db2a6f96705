"""Muon for the layers' matrices, beside AdamW for everything else.

Muon moves a matrix along the nearest semi-orthogonal matrix to its momentum (Jordan et al., "Muon: An
optimizer for hidden layers in neural networks", 2024). Matrices of one shape are handled in one batch,
which for a small model matters more than the arithmetic.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


def orthogonalised(matrix_NRC: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrices, roughly: a quintic Newton-Schulz iteration in bfloat16."""
    is_tall = matrix_NRC.shape[-2] > matrix_NRC.shape[-1]
    x = matrix_NRC.bfloat16()
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.mT if is_tall else x
    return result


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum with decoupled weight decay."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            by_shape[parameter.shape].append(parameter)
        super().__init__(
            [{"params": group} for group in by_shape.values()],
            {"lr": lr, "momentum": momentum, "weight_decay": weight_decay},
        )

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One update of every matrix that has a gradient."""
        for group in self.param_groups:
            parameters = group["params"]
            gradient_NRC = torch.stack([parameter.grad for parameter in parameters])
            state = self.state[parameters[0]]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(gradient_NRC)
            momentum = state["momentum"]
            momentum.lerp_(gradient_NRC, 1 - group["momentum"])
            update_NRC = orthogonalised(gradient_NRC.lerp(momentum, group["momentum"])).float()
            rows, columns = update_NRC.shape[-2:]
            scale = group["lr"] * max(1.0, rows / columns) ** 0.5
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(parameters, list(update_NRC.unbind(0)), alpha=-scale)


def make_optimizers(model: nn.Module, *, lr: float, muon_lr: float) -> list[torch.optim.Optimizer]:
    """Muon for matrices inside layers, AdamW for embeddings, heads and norms."""
    matrices = [p for name, p in model.named_parameters() if ".layers." in name and p.ndim == 2]
    chosen = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
    adam = torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.0, fused=None)
    return [Muon(matrices, lr=muon_lr, weight_decay=0.05), adam]


def learning_rate_factor(progress: float) -> float:
    """Of the peak rate: a short rise, level, then a straight fall to almost nothing. `progress` in [0, 1]."""
    return min(1.0, 0.02 + progress / 0.02, 0.01 + (1 - progress) / 0.6)
