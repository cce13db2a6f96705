"""The key that the `glassblock` command sends. By itself, so that the command starts without what a server needs."""

from __future__ import annotations

import os

KEY_VARIABLE = "GLASSBLOCK_API_KEY"


def api_key_from_environment() -> str | None:
    """The value of GLASSBLOCK_API_KEY, None if it is absent or empty."""
    return os.environ.get(KEY_VARIABLE) or None
