"""The application as an operator starts it, on a port of its own, for clients that know its URL and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import yaml

from tests.processes import free_port

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 180.0
END_TIMEOUT_S = 120.0
LOG_TAIL = 60


class ServerFailed(RuntimeError):
    """The application did not come up; the end of its log is in the message."""


@contextmanager
def running_server(checkpoint: Path, model_id: str, log: Path) -> Iterator[str]:
    """Serve `checkpoint` through `python -m serve_app.run`; gives the URL, and ends the cluster afterwards.

    Raises ServerFailed.
    """
    port = free_port()
    config = log.with_suffix(".yaml")
    # Presets that clients save are not the user's.
    presets = log.with_suffix(".presets")
    config.write_text(yaml.safe_dump(_deploy_file(checkpoint, model_id, port, presets)), encoding="utf-8")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "serve_app.run", str(config)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, env=environment)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_ready(process, url, log)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _deploy_file(checkpoint: Path, model_id: str, port: int, presets: Path) -> dict[str, object]:
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {
                "name": "glassblock",
                "route_prefix": "/",
                "import_path": "serve_app.app:build_app",
                "args": {
                    "model": str(checkpoint),
                    "model_id": model_id,
                    "engine": {"device": "cpu", "num_pages": 512, "max_rows": 16},
                    "ingress": {"preset_dir": str(presets)},
                },
            }
        ],
    }


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            # Nobody listens yet.
            pass
        time.sleep(0.5)
    tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL:])
    what = f"ended with status {process.returncode}" if process.poll() is not None else f"took over {START_TIMEOUT_S} s"
    raise ServerFailed(f"the server {what}; the end of its log:\n{tail}")
