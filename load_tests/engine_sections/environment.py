"""What a figure was measured on: machine, libraries and build."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine import ModelConfig

ROOT = Path(__file__).resolve().parents[2]


def describe(device: torch.device, dtype: torch.dtype, config: ModelConfig, commit: str | None) -> dict[str, Any]:
    """Everything that a reader or a merge has to know. `commit` stands in where there is no git."""
    num_parameters = approximate_parameters(config)
    return {
        "machine": machine(device),
        "device": device.type,
        "driver": driver() if device.type == "cuda" else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "commit": git_commit() or commit,
        "sources": source_digest(),
        "model": f"{config.n_layers} layers of {config.n_embd}, {num_parameters / 1e6:,.0f} M parameters",
        "is_8b": (config.n_layers, config.n_embd, config.mlp_width) == (32, 4096, 16384),
        "dtype": str(dtype).removeprefix("torch."),
    }


def approximate_parameters(config: ModelConfig) -> int:
    """Parameters of the layers, the vocabulary and both concept heads, without norms and padding."""
    width, concept = config.n_embd, config.concept
    kv_width = config.num_kv_heads * config.head_dim
    attention = width * (width + 2 * kv_width) + width * width
    mlp = width * config.mlp_width * (3 if config.mlp_type == "swiglu" else 2)
    vocabulary = config.vocab_size * width * (1 if config.weight_sharing else 2)
    known = 2 * concept.n_concepts * width
    discovered = 0
    if concept.use_discovered:
        stored = concept.factorize_rank if concept.factorize_discovered else width
        discovered = 2 * concept.n_discovered * stored
    return config.n_layers * (attention + mlp) + vocabulary + known + discovered


def machine(device: torch.device) -> str:
    """The GPU's name, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    names = Path("/proc/cpuinfo")
    if names.is_file():
        for line in names.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def driver() -> str | None:
    """Version of the NVIDIA driver, if it can be told."""
    told = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return told.splitlines()[0].strip() if told else None


def git_commit(watched: Sequence[str] = ("engine",)) -> str | None:
    """The commit that is checked out, marked where a watched folder differs from it; None outside git."""
    commit = _output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    if not commit:
        return None
    changes = _output("git", "-C", str(ROOT), "status", "--porcelain", "--", *watched)
    return commit.strip() + ("+changes" if changes else "")


def source_digest() -> str:
    """Short digest of the engine's source files: tells builds apart where git cannot."""
    digest = hashlib.sha256()
    for file in sorted((ROOT / "engine").rglob("*.py")):
        digest.update(f"{file.relative_to(ROOT)}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
