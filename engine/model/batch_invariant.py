"""Linear maps whose results do not depend on how many positions they are given at once: `deterministic: true`.

Shapes: M positions, N output features, K input features.
"""

from __future__ import annotations

import copy
import dataclasses

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from ..errors import InvalidConfig
from . import fused_support
from .fused_support import HAS_TRITON
from .quantization import is_quantized
from .steerling import SteerlingModel

if HAS_TRITON:
    from .kernels.matmul import Plan, is_multipliable, matmul, plan_for

_ROW = 64
"""Positions compared when a plan is checked."""


def check_deterministic(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Raise InvalidConfig, naming what is missing, where `deterministic: true` cannot be kept."""
    if device.type != "cuda" or not HAS_TRITON:
        raise InvalidConfig(
            f"deterministic is true, which needs a GPU with Triton, and device is {device}; leave it out: on a CPU the "
            "last bits of float32 numbers depend on the batch, and tokens only where these decide"
        )
    if not fused_support.is_supported(config):
        raise InvalidConfig(
            "deterministic is true, but this checkpoint's configuration has no fused layers: they need post-norm "
            "RMSNorm, qk-norm, full-precision rotary, SwiGLU and no biases, with heads and blocks of 16 to 256, powers "
            "of two; leave it out"
        )
    if config.needs_heads_for_tokens:
        raise InvalidConfig(
            "deterministic is true, but this checkpoint chooses tokens from concept features (use_epsilon_correction "
            "is false), whose sums depend on the batch; leave it out"
        )
    widths = {"n_embd": config.n_embd, "intermediate_size": config.mlp_width}
    if config.concept.use_discovered and config.concept.factorize_discovered:
        widths["factorize_rank"] = config.concept.factorize_rank
    for name, width in widths.items():
        if not is_multipliable(width, dtype):
            raise InvalidConfig(
                f"deterministic is true, but {name} is {width}; its rows must be multiples of 16 bytes; leave it out"
            )


def make_batch_invariant(model: SteerlingModel) -> SteerlingModel:
    """A model of the same weights, with a BatchInvariantLinear for every linear map of layers, lm_head and heads.

    `model` stays as it is. Weights are the tensors they were, tied ones tied. Each shape is tried once, which takes a
    moment on the device. Raises InvalidConfig for a model in float8.
    """
    if is_quantized(model):
        raise InvalidConfig(
            "deterministic is true and the model's weights are float8, whose products depend on the batch; load it "
            "anew with dtype bfloat16"
        )
    made = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    plans: dict[tuple[int, int], Plan] = {}
    found = [
        (parent, name, linear)
        for parent in made.modules()
        for name, linear in parent.named_children()
        if type(linear) is nn.Linear
    ]
    for parent, name, linear in found:
        shape = (linear.out_features, linear.in_features)
        if shape not in plans:
            plans[shape] = _checked_plan(linear.weight)
        parent.add_module(name, BatchInvariantLinear(linear, plans[shape]))
    for head in (made.known_head, made.discovered_head):
        if head is not None:
            head.product = float32_product
    return made


class BatchInvariantLinear(nn.Linear):
    """nn.Linear, with `kernels.matmul` for the product."""

    counters: Tensor

    def __init__(self, linear: nn.Linear, plan: Plan) -> None:
        """Shares the weight and bias of `linear`."""
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight = linear.weight
        self.bias = linear.bias
        self.has_bias = linear.bias is not None
        self.plan = plan
        counters = torch.zeros(plan.num_counters(linear.out_features), dtype=torch.int32, device=linear.weight.device)
        self.register_buffer("counters", counters, persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] -> [..., N]; the bits of [m] depend on the input's [m] only."""
        x_MK = input.reshape(-1, self.in_features)
        y_MN = matmul(x_MK, self.weight, self.plan, counters=self.counters)
        # Kernels that read it want rows without gaps, which it has where N is no multiple of 16 bytes.
        y = y_MN.contiguous().view(*input.shape[:-1], self.out_features)
        return y + self.bias if self.has_bias else y


def float32_product(x_MK: Tensor, w_NK: Tensor) -> Tensor:
    """x @ w.T as float32 y_MN whose bits do not depend on M; what a concept head ranks by."""
    plan = plan_for(w_NK.shape[0], w_NK.shape[1], w_NK.dtype, w_NK.device)
    return matmul(x_MK.contiguous(), w_NK.contiguous(), plan, out_dtype=torch.float32)


def _checked_plan(weight_NK: Tensor) -> Plan:
    """The plan for a weight; without its tall tile if this device gives other bits with it."""
    plan = plan_for(weight_NK.shape[0], weight_NK.shape[1], weight_NK.dtype, weight_NK.device)
    if plan.tall is None:
        return plan
    num_rows = max(plan.tall_from, 2 * plan.tall.rows)
    # Their own generator: sampling must not depend on what was checked.
    generator = torch.Generator(weight_NK.device).manual_seed(0)
    x_MK = torch.randn(num_rows, weight_NK.shape[1], generator=generator, device=weight_NK.device).to(weight_NK.dtype)
    with_tall = matmul(x_MK, weight_NK, plan)
    without = dataclasses.replace(plan, tall=None)
    is_same = all(
        torch.equal(with_tall[start : start + _ROW], matmul(x_MK[start : start + _ROW], weight_NK, without))
        for start in range(0, num_rows, _ROW)
    )
    return plan if is_same else without
