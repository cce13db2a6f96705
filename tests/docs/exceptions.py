"""The examples that show no output, one by one: how far each is tried, and why no further."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tests.docs.pages import Example

How = Literal["output not compared", "run by a client", "not run"]


@dataclass(frozen=True)
class Exempt:
    """One block, by its page and how its code starts."""

    page: str
    start: str
    how: How
    """`output not compared`: it is run and has to end well. `run by a client`: `make test-clients` runs it."""
    reason: str
    """Of the second kind the client's name."""

    def matches(self, example: Example) -> bool:
        return example.page == self.page and example.code.startswith(self.start)


RUN: How = "output not compared"
BY_CLIENT: How = "run by a client"
NOT_RUN: How = "not run"
CLUSTER = "needs a Ray cluster of its own; tests/serve_app/test_end_to_end.py and tests/clients start one"
KUBERNETES = "needs a Kubernetes cluster; tests/deploy builds and checks the manifests"

EXCEPTIONS: tuple[Exempt, ...] = (
    Exempt("README.md", "make serve", NOT_RUN, "installs the package, serves until Ctrl-C, and runs these very tests"),
    Exempt("README.md", "from openai import OpenAI", BY_CLIENT, "openai"),
    Exempt("docs/api.md", "from openai import BadRequestError, OpenAI", BY_CLIENT, "openai"),
    Exempt("docs/clients.md", "make test-clients", NOT_RUN, "installs all clients; CI runs it after the tests"),
    Exempt("docs/clients.md", "from openai import", BY_CLIENT, "openai"),
    Exempt("docs/clients.md", "import litellm", BY_CLIENT, "litellm"),
    Exempt("docs/clients.md", "from langchain_openai import", BY_CLIENT, "langchain-openai"),
    Exempt("docs/clients.md", "cat > sea.py <<", BY_CLIENT, "inspect-ai"),
    Exempt("docs/clients.md", "cat > sea.jsonl", BY_CLIENT, "lm-eval"),
    Exempt("docs/clients.md", "guidellm run", BY_CLIENT, "guidellm"),
    Exempt("docs/clients.md", "env -u HF_HUB_OFFLINE aiperf", BY_CLIENT, "aiperf"),
    Exempt("docs/clients.md", "cat > locustfile.py", BY_CLIENT, "locust"),
    Exempt("docs/clients.md", "schemathesis run", BY_CLIENT, "schemathesis"),
    Exempt(
        "docs/command_line.md",
        "glassblock chat --server",
        RUN,
        "waits for what a reader types; here its input is empty",
    ),
    Exempt("docs/command_line.md", "glassblock bench", RUN, "measured times differ; it ends badly if a request failed"),
    Exempt("docs/kubernetes.md", "helm repo add", NOT_RUN, KUBERNETES),
    Exempt("docs/kubernetes.md", "kubectl create namespace", NOT_RUN, KUBERNETES),
    Exempt(
        "docs/metrics.md",
        "prometheus --config.file",
        NOT_RUN,
        "runs until Ctrl-C; promtool checks the file in tests/deploy",
    ),
    Exempt("docs/operations.md", "serve status", NOT_RUN, CLUSTER),
    Exempt("docs/operations.md", "python -m serve_app.run a.yaml", NOT_RUN, CLUSTER),
    Exempt(
        "docs/operations.md",
        "ray drain-node",
        NOT_RUN,
        "takes a node out of a cluster of several; its page says that it was not tried",
    ),
    Exempt("docs/operations.md", "serve shutdown", NOT_RUN, CLUSTER),
    Exempt("docs/operations.md", "cd /tmp/ray/session_latest", NOT_RUN, "reads the log of one request of one cluster"),
    Exempt(
        "docs/operations.md",
        "cat /var/log/glassblock/traces",
        NOT_RUN,
        "reads what replicas have traced; a test beside this file writes some first",
    ),
    Exempt(
        "docs/serving.md",
        ".venv/bin/python -m serve_app.run",
        NOT_RUN,
        "serves until Ctrl-C; tests/clients starts its server so",
    ),
    Exempt(
        "docs/serving.md",
        ".venv/bin/python -m serve_app.capacity",
        NOT_RUN,
        "asks the hub for a config.json; docs/operations.md has one that does not",
    ),
)
