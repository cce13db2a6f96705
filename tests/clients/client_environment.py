"""The environment variables of a client's process: offline, and without what belongs to the machine's other users."""

from __future__ import annotations

import os
from pathlib import Path

KEPT = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")


def client_environment(program: Path, scratch: Path) -> dict[str, str]:
    """No keys and settings of this machine, a home that is empty, no hub, and one thread for arithmetic."""
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    return {
        **kept,
        "PATH": os.pathsep.join([str(program.parent), kept.get("PATH", os.defpath)]),
        "HOME": str(scratch),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(scratch / "hf"),
        "TRANSFORMERS_VERBOSITY": "error",
        "OMP_NUM_THREADS": "1",
        "OPENAI_API_KEY": "none",
        "NO_COLOR": "1",
        "COLUMNS": "160",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "NO_PROXY": "127.0.0.1",
    }
