"""Which device and dtype an engine runs on, and where its compiled kernels are kept."""

from __future__ import annotations

import torch

from ..config import EngineConfig
from ..errors import InvalidConfig
from ..model.fused_support import HAS_TRITON
from ..model.quantization import check_float8

if HAS_TRITON:
    import triton


def keep_compiled_kernels(directory: str | None) -> None:
    """Have Triton keep what it compiles in this folder, for every engine of the process; None changes nothing."""
    if HAS_TRITON and directory is not None:
        triton.knobs.cache.dir = directory


def choose_device(engine: EngineConfig) -> tuple[torch.device, torch.dtype]:
    """The device, and the dtype to load weights in: what `auto` stands for here, bfloat16 for fp8.

    Raises InvalidConfig for a device that is not there, or that cannot run fp8 where this is asked for.
    """
    name = engine.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidConfig(f"device is {engine.device!r}; it must be auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise InvalidConfig(f"device is {engine.device!r}; it must be auto, cpu or cuda")
    if device.index:
        # Events and kernels would go to the first one.
        raise InvalidConfig(
            f"device is {engine.device!r}, but an engine runs on the first GPU that its process sees; "
            f"set CUDA_VISIBLE_DEVICES={device.index} and take cuda"
        )
    if device.type == "cuda" and not torch.cuda.device_count():
        raise InvalidConfig(f"device is {engine.device!r}, but torch sees no GPU; try auto")
    if engine.dtype == "fp8":
        check_float8(device)
    if engine.dtype == "auto":
        return device, torch.bfloat16 if device.type == "cuda" else torch.float32
    return device, {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": torch.bfloat16}[engine.dtype]
