"""docs/clients.md: its table is written here; its examples are run, and those of other pages that need a client."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from .catalogue import CLIENTS, Client
from .client_environment import client_environment, run_client
from .environments import home

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "clients.md"
BEGIN = "<!-- written by `make test-clients CLIENTS_ARGS=--write-page` -->"
END = "<!-- end -->"
URL = "http://127.0.0.1:8000"
"""What examples call the server, its model, and the folder of its checkpoint."""
MODEL = "steerling-8b-instruct"
CHECKPOINT = "path/to/steerling-8b-instruct"
DEMO_MODEL = "steerling-demo"
"""What examples of other pages call the model."""
ELSEWHERE = {"openai": {"README.md": "from openai import", "docs/api.md": "from openai import"}}
"""Client -> other pages with examples in Python that need it -> how these start."""
EXAMPLE = re.compile(r"^```(python|sh|js)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TIMEOUT_S = 120.0


def section(client: str) -> str:
    """What the page says of a client: from its heading to the next."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(client)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"{PAGE.name} has no section `## {client}`")
    return found[1]


def examples_of(client: Client) -> list[tuple[str, str]]:
    """(language, code) of everything on the pages that is run with the client."""
    found = EXAMPLE.findall(section(client.name))
    for page, start in ELSEWHERE.get(client.name, {}).items():
        text = (ROOT / page).read_text(encoding="utf-8")
        found += [(kind, code) for kind, code in EXAMPLE.findall(text) if kind == "python" and code.startswith(start)]
    return found


def run_example(client: Client, program: Path, url: str, model: str, checkpoint: Path, scratch: Path) -> list[str]:
    """Run a client's examples as they stand, but for where the server is and what it serves; what went wrong."""
    problems = []
    for kind, code in examples_of(client):
        code = code.replace(URL, url).replace(CHECKPOINT, str(checkpoint))
        code = code.replace(MODEL, model).replace(f'"{DEMO_MODEL}"', f'"{model}"')
        command = {"python": [str(program), "-"], "sh": ["bash", "-eu"], "js": [str(program), "--input-type=module"]}[
            kind
        ]
        try:
            # Node.js looks for packages from its folder.
            done = run_client(
                command,
                environment=client_environment(program, scratch),
                folder=home(client) if client.node else scratch,
                timeout_s=TIMEOUT_S,
                text=code,
            )
        except subprocess.TimeoutExpired:
            problems.append(f"the example did not end within {TIMEOUT_S:.0f} s")
            continue
        if done.returncode or not done.stdout.strip():
            problems.append(f"the example ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
    return problems


def table() -> dict[str, str]:
    """The page's rows by client."""
    inside = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    rows = [line for line in inside.splitlines() if line.startswith("| ")][1:]
    return {row.split(" | ")[0].removeprefix("| "): row for row in rows if not row.startswith("| ---")}


def write_table(rows: list[tuple[str, str, str, int]]) -> None:
    """Put client, version, what ran and the number of checks between the page's two marks; other clients' rows stay."""
    new = {name: f"| {name} | {version} | {ran} | {checks} |" for name, version, ran, checks in rows}
    known = table() | new
    lines = ["| client | version | what is tried | checks |", "| --- | --- | --- | --- |"]
    lines += [known[client.name] for client in CLIENTS if client.name in known]
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{after}", encoding="utf-8")
