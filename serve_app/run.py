"""`python -m serve_app.run [deploy/config.yaml]`: a Ray cluster of our own in the foreground, nothing left after it.

`serve run` starts the cluster. It leads a session of its own, so that Ctrl-C reaches this process only, which then
takes it down in order: first as `serve run` does it by itself, then whatever is left of this cluster and no other.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from .api_keys import ApiKeys
from .checkpoint import locate
from .client_key import KEY_VARIABLE
from .config import BUILDER, AppConfig, local_cluster_environment
from .deploy_check import load

DEFAULT_CONFIG = Path(__file__).resolve().parents[1] / "deploy" / "config.yaml"
MARKER_NAME = "GLASSBLOCK_CLUSTER"
READY_TIMEOUT_S = 600.0
"""A large checkpoint takes minutes to load; the demo takes seconds."""
SHUTDOWN_TIMEOUT_S = 90.0
KILL_WAIT_S = 10.0
DASHBOARD_PORTS = range(8265, 8285)
"""Ray's dashboard takes the first free one. Those of other clusters refuse our token."""


class _Stop(Exception):
    """A signal asked to end."""


def main(arguments: list[str] | None = None) -> int:
    """Serve until a signal comes; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m serve_app.run", description=__doc__)
    parser.add_argument("config", nargs="?", type=Path, default=DEFAULT_CONFIG, help="a Ray Serve config file")
    config: Path = parser.parse_args(arguments).config.resolve()
    try:
        content = read_config(config)
        url = base_url(content)
        check_port(content)
    except (OSError, ValueError) as error:
        print(f"{config}: {error}", file=sys.stderr)
        return 2
    marker = f"{MARKER_NAME}={uuid.uuid4().hex}"

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Stop

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    environment = local_cluster_environment(marker)
    # `--address local`: never join a cluster that happens to run here already.
    command = [sys.executable, "-m", "ray.serve.scripts", "run", "--address", "local", str(config)]
    process: subprocess.Popen[bytes] | None = None
    try:
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        failure = _wait_ready(process, url, environment)
        if failure is not None:
            print(f"\n{failure}", file=sys.stderr, flush=True)
            return 1
        print(f"\nReady: {url}\nTry:   {first_request(url, asks_for_key=asks_for_key(content))}", flush=True)
        return process.wait()
    except _Stop:
        print("\nStopping", flush=True)
        return 0
    finally:
        _end(process, marker)


def read_config(file: Path) -> dict[str, Any]:
    """A Ray Serve config file that is in order, and whose checkpoints and API keys are there.

    Raises ValueError where Serve would ignore it, or report in its log only and then wait for ever.
    """
    content = load(file.read_text(encoding="utf-8"))
    for settings in _settings_of(content):
        locate(settings.checkpoint, settings.revision, with_weights=False)
        if settings.ingress.api_keys is not None:
            ApiKeys(settings.ingress.api_keys)
    return content


def asks_for_key(config: dict[str, Any]) -> bool:
    """Whether a config's server answers only those who have an API key."""
    return any(settings.ingress.api_keys is not None for settings in _settings_of(config))


def first_request(url: str, *, asks_for_key: bool) -> str:
    """A shell command that shows that the server at `url` answers."""
    key = f' -H "authorization: Bearer ${KEY_VARIABLE}"' if asks_for_key else ""
    body = '{"prompt": "a small", "max_tokens": 32}'
    return f"curl -s{key} --json '{body}' {url}/v1/completions"


def _settings_of(config: dict[str, Any]) -> Iterator[AppConfig]:
    for application in config.get("applications") or []:
        if application.get("import_path") == BUILDER:
            yield AppConfig.model_validate(application.get("args") or {})


def base_url(config: dict[str, Any]) -> str:
    """Where a config says that HTTP is served."""
    options = config.get("http_options") or {}
    host = options.get("host", "127.0.0.1")
    return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{options.get('port', 8000)}"


def check_port(config: dict[str, Any]) -> None:
    """Raise ValueError if the config's HTTP port is taken.

    Serve would say so in many pages, and where another server of ours has it, that one would answer as if it were this.
    """
    options = config.get("http_options") or {}
    host, port = options.get("host", "127.0.0.1"), options.get("port", 8000)
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        message = (
            f"http_options: {error.strerror}; end what listens there, or copy the file, set another port there, "
            "and run `.venv/bin/python -m serve_app.run` with the copy"
        )
        raise ValueError(message) from error


def _wait_ready(process: subprocess.Popen[bytes], url: str, environment: Mapping[str, str]) -> str | None:
    """Wait until an engine answers; what went wrong instead, or None."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return f"serve run ended with status {process.returncode}; its log is above"
        if _get(f"{url}/ready", {}) is not None:
            return None
        if (reason := _deploy_failure(environment)) is not None:
            return f"The application cannot start: {reason}"
        time.sleep(0.5)
    return f"Not ready after {READY_TIMEOUT_S:.0f} s; the log above says what it waits for"


def _deploy_failure(environment: Mapping[str, str]) -> str | None:
    """Why Serve has given an application up, if it has; its own command would wait for ever."""
    token = environment.get("RAY_AUTH_TOKEN")
    if token is None:
        # Without a token of our own, nothing tells our dashboard from another's.
        return None
    for port in DASHBOARD_PORTS:
        url = f"http://127.0.0.1:{port}/api/serve/applications/"
        details = json.loads(_get(url, {"authorization": f"Bearer {token}"}) or b"{}")
        for application in details.get("applications", {}).values():
            if application["status"] == "DEPLOY_FAILED":
                return str(application["message"])
    return None


def _get(url: str, headers: Mapping[str, str]) -> bytes | None:
    """The body of a 200, else None."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=dict(headers)), timeout=5) as response:
            body: bytes = response.read()
            return body
    except OSError:
        return None


def _end(process: subprocess.Popen[bytes] | None, marker: str) -> None:
    """End the cluster; signals that come meanwhile change nothing."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if process is not None and process.poll() is None:
        # `serve run` shuts its applications and Ray down on an interrupt. A SIGTERM would leave them running.
        process.send_signal(signal.SIGINT)
        try:
            process.wait(SHUTDOWN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            print(f"serve run did not end within {SHUTDOWN_TIMEOUT_S:.0f} s; ending its processes", flush=True)
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + KILL_WAIT_S
        while members := list(cluster_processes(marker)):
            if time.monotonic() > deadline:
                break
            for pid in members:
                _signal(pid, number)
            if process is not None:
                process.poll()
            time.sleep(0.2)


def cluster_processes(marker: str) -> Iterator[int]:
    """Ids of the processes that inherited `marker` in their environment. Only where /proc exists."""
    wanted = marker.encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)
        except OSError:
            # It has ended, or belongs to somebody else.
            continue


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        # It ended by itself meanwhile.
        return


if __name__ == "__main__":
    sys.exit(main())
