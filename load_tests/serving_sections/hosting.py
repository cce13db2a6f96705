"""The application under test, from the side that measures: start its host, deploy, ask for its cost, end it."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serve_app.config import local_cluster_environment
from serve_app.run import cluster_processes

from .cost import cpu_seconds

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 40.0
KILL_WAIT_S = 10.0
MODES: dict[str, dict[str, str]] = {
    "default": {"RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "0"},
    "haproxy": {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"},
    "grpc": {
        "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000",
        "RAY_SERVE_LOG_TO_STDERR": "0",
    },
}
"""Environment of each way in which Ray Serve takes HTTP and carries streams. `grpc`: all of the throughput options
that do not change who listens for HTTP."""


def own_haproxy(folder: Path) -> dict[str, str]:
    """Files and ports of an HAProxy that stands beside another one on this machine."""
    return {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(free_port()),
    }


class HostFailed(RuntimeError):
    """The application did not come up; the end of its log is in the message."""


class Host:
    """A Ray cluster of our own with the application on it. Close it, and nothing of it is left."""

    def __init__(self, *, mode: str = "default", num_gpus: int = 0) -> None:
        """Start Ray and Serve; raises HostFailed."""
        self.url = f"http://127.0.0.1:{free_port()}"
        self._marker = f"GLASSBLOCK_LOAD_TEST={uuid.uuid4().hex}"
        self._folder = tempfile.TemporaryDirectory(prefix="load-test-")
        with tempfile.NamedTemporaryFile(prefix="load-test-", suffix=".log", delete=False) as log:
            self.log = Path(log.name)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "load_tests.serving_sections.host"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env={
                    **local_cluster_environment(self._marker),
                    **own_haproxy(Path(self._folder.name)),
                    # Nobody else's load balancer has to learn that an ingress leaves.
                    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
                    # Where memory is given to a machine as it is used, it always looks nearly full.
                    "RAY_memory_monitor_refresh_ms": "0",
                    **MODES[mode],
                },
                start_new_session=True,
            )
        try:
            port = int(self.url.rpartition(":")[2])
            self._ask({"num_gpus": num_gpus, "port": port}, START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def deploy(self, args: Mapping[str, Any], *, timeout_s: float, **changes: Any) -> float:
        """Deploy, or change what is deployed; returns how many seconds it took. Raises HostFailed."""
        return float(self._ask({"args": dict(args), **changes}, timeout_s)["seconds"])

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time so far of the cluster's processes, by what they are."""
        return cpu_seconds(cluster_processes(self._marker))

    def close(self) -> None:
        """End the cluster in order, and what is left of it anyhow."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + KILL_WAIT_S
            while (left := list(cluster_processes(self._marker))) and time.monotonic() < deadline:
                for pid in left:
                    _signal(pid, number)
                self._process.poll()
                time.sleep(0.2)
        self._folder.cleanup()

    def _ask(self, order: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise HostFailed(f"the host is gone: {error}\n{self._log_end()}") from error
        readable, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        if not readable:
            raise HostFailed(f"no answer within {timeout_s:.0f} s\n{self._log_end()}")
        answer: dict[str, Any] = json.loads(self._process.stdout.readline() or b'{"ok": false, "error": "it ended"}')
        if not answer["ok"]:
            raise HostFailed(f"{answer['error']}\n{self._log_end()}")
        return answer

    def _log_end(self) -> str:
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return f"log {self.log}:\n{text[-3000:]}"


def free_port() -> int:
    """A TCP port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        # It ended by itself meanwhile.
        return
