"""What lets a kernel's start overlap the end of the one before it: programmatic dependent launch.

It changes when something happens, never what is computed. It compiles to Hopper instructions, so a caller turns it on
only where the device has them, and never in Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def allow_next(OVERLAPS: tl.constexpr):
    """Let the next kernel's programs take their places once all programs of this one have theirs."""
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(OVERLAPS: tl.constexpr):
    """Wait until all earlier kernels are done and their writes visible. Before it nothing may be read or written.

    Every program has to call it, also one that then finds nothing to do: the next kernel takes the end of this one
    for the end of all before it.
    """
    if OVERLAPS:
        gdc_wait()


def launch_options(overlaps: bool) -> dict[str, Any]:
    """Arguments of every kernel that calls `allow_next` and `wait_for_previous`."""
    return {"OVERLAPS": True, "launch_pdl": True} if overlaps else {"OVERLAPS": False}
