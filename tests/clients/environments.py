"""An environment for each client, made once and kept in `.venv-clients/` until what it should hold changes."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from .catalogue import CLIENTS, DRIVERS, REQUIREMENTS, Client

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv-clients"
UV = "uv==0.13.9"
CUDA_PARTS = ("nvidia-", "cuda-", "triton==")
"""What torch's published metadata asks for beside it, and the CPU build has no use for."""
PIP = ["-m", "pip", "--disable-pip-version-check", "install", "--quiet"]


class CannotInstall(RuntimeError):
    """An environment could not be made; the installer's words are in the message."""


def interpreter(client: Client) -> Path | None:
    """What runs the client's driver, its environment made if need be; None where this machine lacks Node.js.

    Raises CannotInstall.
    """
    if client.node:
        return _node_interpreter(client)
    if client.requirements is None:
        return Path(sys.executable)
    folder = home(client)
    python = folder / "bin" / "python"
    stamp = folder / ".installed"
    wanted = _digest(client.lock)
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    if not python.exists():
        _run([*_uv(), "venv", "--quiet", "--python", sys.executable, str(folder)])
    if client.torch:
        # Named alone and to pip, which may know where a CPU build lies; an environment that has one keeps it.
        torch_pin = f"torch=={_pinned('torch')}"
        _run(
            [
                sys.executable,
                "-m",
                "pip",
                "--python",
                str(python),
                *PIP[2:],
                "--constraint",
                "constraints.txt",
                torch_pin,
            ]
        )
    _install(python, client.lock)
    stamp.write_text(wanted, encoding="utf-8")
    return python


def home(client: Client) -> Path:
    """The folder of a client's environment, whether it has one or not."""
    return FOLDER / client.name


def renew_locks() -> None:
    """Write the newest versions of everything into `requirements/*.txt`, for this Python version and newer ones.

    npm's lock is renewed by `npm update` beside the driver.
    """
    for client in CLIENTS:
        if client.requirements is None or client.node:
            continue
        asked = [*client.requirements.split(), *([f"torch=={_pinned('torch')}"] if client.torch else [])]
        command = [*_uv(), "pip", "compile", "--quiet", "--universal", "--python-version", "3.11"]
        command += ["--no-header", "--no-annotate", "-"]
        done = subprocess.run(
            command, input="\n".join(asked), capture_output=True, text=True, env=_environment(), check=False
        )
        if done.returncode:
            raise CannotInstall(f"{client.name}: {done.stderr.strip()}")
        lines = [line for line in done.stdout.splitlines() if not (client.torch and line.startswith(CUDA_PARTS))]
        (REQUIREMENTS / f"{client.name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _install(python: Path, requirements: Path) -> None:
    """With uv, which takes seconds; where it cannot reach what pip is set up to reach, with pip."""
    try:
        _run([*_uv(), "pip", "install", "--quiet", "--python", str(python), "--requirement", str(requirements)])
    except CannotInstall as error:
        print(f"uv: {error}\nInstalling with pip instead", file=sys.stderr)
        _run([sys.executable, "-m", "pip", "--python", str(python), *PIP[2:], "--requirement", str(requirements)])


def _uv() -> list[str]:
    """uv's command, in an environment of its own."""
    folder = FOLDER / "uv"
    program = folder / "bin" / "uv"
    if not program.exists():
        _run([sys.executable, "-m", "venv", str(folder)])
        _run([str(folder / "bin" / "python"), *PIP, UV])
    return [str(program)]


def _node_interpreter(client: Client) -> Path | None:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        return None
    folder = home(client)
    source = (DRIVERS / client.driver).parent
    stamp = folder / ".installed"
    wanted = _digest(*sorted(source.iterdir()))
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        _run([npm, "ci", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder)])
        stamp.write_text(wanted, encoding="utf-8")
    return Path(node)


def driver(client: Client) -> Path:
    """The driver's file; Node.js looks for packages beside it, so there it is a copy in the environment."""
    if client.node:
        return home(client) / Path(client.driver).name
    return DRIVERS / client.driver


def _pinned(package: str) -> str:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (version,) = [line.partition("==")[2] for line in lines if line.startswith(f"{package}==")]
    return version


def _digest(*files: Path) -> str:
    digest = hashlib.sha256(sys.version.encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _environment() -> dict[str, str]:
    """uv's settings: only interpreters that are here, and the certificates that pip trusts on this machine too."""
    return {**os.environ, "UV_PYTHON_DOWNLOADS": "never", "UV_SYSTEM_CERTS": "true"}


def _run(command: list[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=_environment(), check=False)
    if done.returncode:
        raise CannotInstall(f"{' '.join(command[:4])} ...: {(done.stderr or done.stdout).strip()[-2000:]}")
