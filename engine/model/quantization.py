"""The layers' linear maps and lm_head in float8, by torchao's quantisation: `dtype: fp8`.

Weights are float8_e4m3fn with a float32 scale for each output feature, made once; activations get a scale for each
position, made in every pass. Embedding, norms and concept heads stay bfloat16, and so do the rows of lm_head that
steering and attribution read.

Shapes: M positions, N output features, K input features.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InvalidConfig
from .fused_support import HAS_TRITON
from .steerling import SteerlingModel

if HAS_TRITON:
    from .kernels.float8 import quantize_rows

_LIBRARY = "torchao"
_TESTED = "0.18.0"
_LEAST_CAPABILITY = (8, 9)
_MULTIPLE = 16
"""What the sizes of a float8 product must be multiples of."""
_SMALLEST_PEAK = 1e-12
"""A row's largest magnitude counts as at least this: the scale of a row of zeros would be zero, its values NaN."""


def check_float8(device: torch.device) -> None:
    """Raise InvalidConfig, naming what is missing, where `dtype: fp8` cannot run."""
    if device.type != "cuda":
        raise InvalidConfig(f"dtype is fp8, which needs a GPU, and device is {device}; use dtype float32 or bfloat16")
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        raise InvalidConfig(
            f"dtype is fp8, which needs a GPU of compute capability {_shown(_LEAST_CAPABILITY)} or more, and "
            f"{torch.cuda.get_device_name(device)} has {_shown(capability)}; use dtype bfloat16"
        )
    _library()


def quantize(model: SteerlingModel) -> None:
    """Replace the layers' linear maps and lm_head by Float8Linear, in place; one bfloat16 weight after the other goes.

    The model's weights must be bfloat16; one that is quantised already stays as it is. Raises InvalidConfig without
    torchao, or for sizes that float8 products do not have.
    """
    if is_quantized(model):
        return
    library = _library()
    found = _layer_linears(model)
    lm_head = model.transformer.lm_head
    for linear in (*(linear for _, _, linear in found), lm_head):
        _check_linear(linear)
    while found:
        parent, name, linear = found.pop()
        parent.add_module(name, Float8Linear(linear, library))
        del linear
    model.transformer.add_module("lm_head", Float8Linear(lm_head, library, keeps_weight=True))


def quantized_bytes(model: SteerlingModel) -> int:
    """Bytes of the parameters of a bfloat16 model once `quantize` has been there; any device will do, meta too."""
    linears = [linear for _, _, linear in _layer_linears(model)]
    lm_head = model.transformer.lm_head
    values = sum(linear.weight.numel() for linear in (*linears, lm_head))
    scales = sum(linear.out_features for linear in (*linears, lm_head)) * torch.float32.itemsize
    replaced = {id(linear.weight) for linear in linears}
    # lm_head keeps its rows beside their float8 values.
    kept = sum(p.numel() for p in model.parameters() if id(p) not in replaced) * torch.bfloat16.itemsize
    return values * torch.float8_e4m3fn.itemsize + scales + kept


def _layer_linears(model: SteerlingModel) -> list[tuple[nn.Module, str, nn.Linear]]:
    """(parent, its name there, linear map) of every one in the layers."""
    return [
        (parent, name, linear)
        for parent in model.transformer.layers.modules()
        for name, linear in parent.named_children()
        if isinstance(linear, nn.Linear)
    ]


def is_quantized(model: SteerlingModel) -> bool:
    """Whether `quantize` has been there."""
    return isinstance(model.transformer.lm_head, Float8Linear)


class Float8Linear(nn.Module):
    """A linear map with torchao's weight: float8 in, bfloat16 out. Takes and gives what nn.Linear does."""

    weight: Tensor | None

    def __init__(self, linear: nn.Linear, library: ModuleType, *, keeps_weight: bool = False) -> None:
        """`keeps_weight` leaves the bfloat16 rows under `weight`; with tied weights they are the embedding's own."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.quantized = nn.Parameter(_quantized(linear.weight, library), requires_grad=False)
        """torchao's Float8Tensor, which does the whole product itself in `forward_slow`."""
        self.bias = linear.bias
        self.weight = linear.weight if keeps_weight else None

    @property
    def values_NK(self) -> Tensor:
        """float8_e4m3fn."""
        values: Tensor = self.quantized.qdata  # type: ignore[attr-defined]
        return values

    @property
    def scale_N1(self) -> Tensor:
        """float32, one for each output feature."""
        scale: Tensor = self.quantized.scale  # type: ignore[attr-defined]
        return scale

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N], in x's dtype."""
        if not (HAS_TRITON and x.is_cuda):
            return self.forward_slow(x)
        values_MK, scale_M1 = quantize_rows(x.reshape(-1, self.in_features))
        return self.multiply(values_MK, scale_M1).view(*x.shape[:-1], self.out_features)

    def forward_slow(self, x: Tensor) -> Tensor:
        """The slow twin of `forward`: torchao's own, which quantises activations in several kernels."""
        return F.linear(x, self.quantized, self.bias)

    def multiply(self, values_MK: Tensor, scale_M1: Tensor) -> Tensor:
        """y_MN (bfloat16) from activations that are quantised already, as by `kernels.float8`."""
        y_MN: Tensor = torch._scaled_mm(
            values_MK,
            self.values_NK.T,
            scale_a=scale_M1,
            scale_b=self.scale_N1.T,
            bias=self.bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        return y_MN


def _library() -> ModuleType:
    """torchao.quantization; raises InvalidConfig where it is not installed."""
    # Imported when asked for: it is an option, and takes a second.
    if importlib.util.find_spec(_LIBRARY) is None:
        raise InvalidConfig(
            f"dtype is fp8, which needs the package {_LIBRARY}, and it is not installed; "
            "install it with `pip install 'glassblock[fp8]'`, or use dtype bfloat16"
        )
    return importlib.import_module(f"{_LIBRARY}.quantization")


def _quantized(weight_NK: Tensor, library: ModuleType) -> Tensor:
    """The weight in float8 by the library's own rule; raises InvalidConfig where another release has another one."""
    try:
        return _by_library(weight_NK, library)
    except (ImportError, AttributeError, TypeError) as error:
        raise InvalidConfig(
            f"dtype is fp8, and the installed {_LIBRARY} {importlib.metadata.version(_LIBRARY)} is not made like the "
            f"tested one, {_TESTED}: {error!r}; install that one, or use dtype bfloat16"
        ) from error


def _by_library(weight_NK: Tensor, library: ModuleType) -> Tensor:
    workflows = importlib.import_module(f"{library.__name__}.quantize_.workflows")
    common = importlib.import_module(f"{library.__name__}.quantize_.common")
    rule = {
        "granularity": library.PerRow(),
        "hp_value_lb": _SMALLEST_PEAK,
        # Others depend on what else is installed.
        "kernel_preference": common.KernelPreference.TORCH,
    }
    quantized: Tensor = library.Float8Tensor.from_hp(
        weight_NK.detach(),
        mm_config=library.Float8MMConfig(use_fast_accum=True),
        act_quant_kwargs=workflows.QuantizeTensorToFloat8Kwargs(**rule),
        **rule,
    )
    return quantized


def _check_linear(linear: nn.Linear) -> None:
    if linear.weight.dtype != torch.bfloat16:
        raise InvalidConfig(f"weights are {linear.weight.dtype}; fp8 is made from bfloat16")
    sizes = (linear.out_features, linear.in_features)
    if any(size % _MULTIPLE for size in sizes):
        raise InvalidConfig(
            f"dtype is fp8, but a linear map of this checkpoint is {sizes[0]} x {sizes[1]}; both sizes must be "
            f"multiples of {_MULTIPLE}; use dtype bfloat16"
        )


def _shown(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
