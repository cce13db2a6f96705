"""For all tests: threads, the tokenizer's file, and no GPU tests without a GPU."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch


def pytest_configure() -> None:
    # Results do not depend on it; tiny matrices are only slower with more threads.
    torch.set_num_threads(1)
    # tiktoken looks here before it downloads, and litellm ships the file it looks for.
    litellm = importlib.util.find_spec("litellm")
    if litellm is not None and litellm.origin is not None:
        ranks = Path(litellm.origin).parent / "litellm_core_utils" / "tokenizers"
        os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(ranks))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
