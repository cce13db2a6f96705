"""What the engine's memory goes to: planned at start, shown as a table, before the first request comes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_GIB = 1024**3


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Bytes of one engine on its device."""

    weights: int
    lanes: int
    num_lanes: int
    concepts_per_lane: int
    """Of a lane, what steering and attribution need: directions, suppression, kept hidden states."""
    page: int
    """One page: keys and values of a block in all layers."""
    num_pages: int
    num_spare_pages: int
    """Pages of nobody: scratch, and one for each draft that a pass may have."""
    pass_reserve: int
    """Kept free for the tensors of a pass, captured or not, and of an explanation."""
    replay_reserve: int
    """Kept free for a slice of a trace's replay and attribution to its inputs; 0 where traces are refused."""
    graphs: int
    """What captured graphs hold of that; 0 without graphs."""
    total: int | None
    """The device's memory; None on a CPU, where nothing is planned for."""

    def table(self) -> str:
        """For people: one line a purpose, in GiB."""
        pages = self.page * (self.num_pages + self.num_spare_pages)
        lanes_note = f"{self.num_lanes} lanes, {self.concepts_per_lane / 2**20:.2f} MiB each for concepts"
        rows = [
            ("weights", self.weights, ""),
            ("lanes", self.lanes, lanes_note),
            ("pages", pages, f"{self.num_pages} pages of {self.page / 2**20:.2f} MiB"),
            ("passes", self.pass_reserve, f"kept free; captured graphs hold {self.graphs / _GIB:.2f} GiB"),
            ("traces", self.replay_reserve, "kept free for replaying them and attributing to inputs"),
        ]
        used = self.weights + self.lanes + pages + self.pass_reserve + self.replay_reserve
        if self.total is not None:
            rows.append(("unused", self.total - used, f"of {self.total / _GIB:.2f} GiB"))
        return "\n".join(f"{name:<8} {size / _GIB:8.2f} GiB  {note}".rstrip() for name, size, note in rows)


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, shared ones once. Of a quantised weight it counts the values and scales that it consists of."""
    sizes = {part.data_ptr(): part.nbytes for tensor in tensors for part in _parts(tensor)}
    return sum(sizes.values())


def _parts(tensor: Tensor) -> list[Tensor]:
    # The protocol of tensors that are made of others and own no memory: they claim their unquantised size.
    flatten = getattr(tensor, "__tensor_flatten__", None)
    return [tensor] if flatten is None else [part for name in flatten()[0] for part in _parts(getattr(tensor, name))]


def module_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers."""
    return tensor_bytes([*module.parameters(), *module.buffers()])


def device_memory(device: torch.device) -> int | None:
    """Bytes of the device; None on a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def reserved_bytes(device: torch.device) -> int:
    """Bytes that torch's allocator holds on the device; 0 on a CPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
