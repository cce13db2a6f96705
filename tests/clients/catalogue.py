"""The clients: how each is installed, and the driver that tries it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
DRIVERS = HERE / "drivers"
REQUIREMENTS = HERE / "requirements"


@dataclass(frozen=True, kw_only=True, slots=True)
class Client:
    """One client program and its driver."""

    name: str
    """Its name in the table, and of its environment's folder."""
    driver: str
    """File in `drivers/`, run as `<interpreter> driver url model checkpoint scratch`."""
    requirements: str | None = None
    """The packages to ask for. None: the driver imitates its client with what the tests have, since the client itself
    is too large."""
    torch: bool = False
    """It depends on torch, which comes as the build that constraints.txt pins."""
    node: bool = False
    """It runs on Node.js, from the package.json beside the driver."""
    timeout_s: float = 600.0
    """A driver that takes longer hangs."""

    @property
    def lock(self) -> Path:
        """Exact versions of everything in its environment."""
        if self.node:
            return (DRIVERS / self.driver).parent / "package-lock.json"
        return REQUIREMENTS / f"{self.name}.txt"


CLIENTS = (
    Client(name="openai", driver="drive_openai.py", requirements="openai"),
    Client(name="openai-js", driver="openai_js/drive.mjs", node=True),
    Client(name="litellm", driver="drive_litellm.py", requirements="litellm"),
    Client(name="langchain-openai", driver="drive_langchain.py", requirements="langchain-openai"),
    Client(name="inspect-ai", driver="drive_inspect.py", requirements="inspect-ai openai"),
    Client(name="lm-eval", driver="drive_lm_eval.py", requirements="lm-eval[api]"),
    Client(name="guidellm", driver="drive_guidellm.py", requirements="guidellm", torch=True),
    Client(name="aiperf", driver="drive_aiperf.py", requirements="aiperf"),
    Client(name="locust", driver="drive_locust.py", requirements="locust"),
    Client(name="schemathesis", driver="drive_schemathesis.py", requirements="schemathesis", timeout_s=1800),
    Client(name="vllm-bench-serve", driver="drive_vllm_bench.py"),
    Client(name="open-webui", driver="drive_open_webui.py"),
)
