"""A client's process: offline, without this machine's settings, and ended with all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
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


def run_client(
    command: list[str], *, environment: dict[str, str], folder: Path, timeout_s: float, text: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder` with `text` as its input; raises TimeoutExpired once nothing of it runs any more."""
    # A group of its own: load tools start processes that outlive them.
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(text, timeout=timeout_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, out, err)
