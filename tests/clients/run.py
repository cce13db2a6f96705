"""`make test-clients`: real client programs, unmodified, against one running server.

Each client has an environment of its own and a driver in `drivers/`, which prints one line of JSON about what it saw.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .catalogue import CLIENTS, Client
from .checkpoint import MODEL_ID, write_instruct_variant
from .client_environment import client_environment, run_client
from .environments import FOLDER, CannotInstall, driver, interpreter, renew_locks
from .page import run_example, write_table
from .server import running_server

State = Literal["ok", "failed", "skipped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one client."""

    client: str
    state: State
    version: str = ""
    ran: str = ""
    """The parts of its driver."""
    checks: int = 0
    install_s: float = 0.0
    seconds: float = 0.0
    """Of the driver and of the example in docs/clients.md."""
    problems: tuple[str, ...] = ()


def main(arguments: list[str] | None = None) -> int:
    """Try the clients named, or all; returns 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients.run", description=__doc__)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(c.name for c in CLIENTS)}")
    parser.add_argument("--url", help="a server that runs already, with a chat template; its checkpoint: --checkpoint")
    parser.add_argument("--checkpoint", type=Path, help="folder of the checkpoint that the server at --url serves")
    parser.add_argument("--model", default=MODEL_ID, help="model id that the server at --url lists")
    parser.add_argument(
        "--write-page", action="store_true", help="renew the rows of docs/clients.md of clients that are ok"
    )
    parser.add_argument("--renew", action="store_true", help="only write newest versions into requirements/")
    options = parser.parse_args(arguments)
    if options.renew:
        renew_locks()
        return 0
    unknown = set(options.clients) - {client.name for client in CLIENTS}
    if unknown:
        parser.error(f"no client is called {', '.join(sorted(unknown))}")
    if (options.url is None) != (options.checkpoint is None):
        parser.error("--url and --checkpoint go together")
    chosen = [client for client in CLIENTS if not options.clients or client.name in options.clients]
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="glassblock-clients-") as scratch:
        if options.url:
            outcomes = try_all(chosen, options.url, options.model, options.checkpoint.resolve(), Path(scratch))
        else:
            checkpoint = write_instruct_variant(Path(scratch) / MODEL_ID)
            with running_server(checkpoint, MODEL_ID, FOLDER / "server.log") as url:
                outcomes = try_all(chosen, url, MODEL_ID, checkpoint, Path(scratch))
    print_table(outcomes)
    if options.write_page:
        write_table([(o.client, o.version, o.ran, o.checks) for o in outcomes if o.state == "ok"])
    return 1 if any(outcome.state == "failed" for outcome in outcomes) else 0


def try_all(clients: list[Client], url: str, model: str, checkpoint: Path, scratch: Path) -> list[Outcome]:
    """One client after another: they share two cores with the server."""
    outcomes = []
    for client in clients:
        folder = scratch / client.name
        folder.mkdir()
        outcome = _try(client, url, model, checkpoint, folder)
        outcomes.append(outcome)
        print(f"{outcome.client}: {outcome.state} in {outcome.install_s:.0f} + {outcome.seconds:.0f} s", flush=True)
        for problem in outcome.problems:
            print(f"  {problem}", flush=True)
    return outcomes


def _try(client: Client, url: str, model: str, checkpoint: Path, scratch: Path) -> Outcome:
    started = time.monotonic()
    try:
        program = interpreter(client)
    except CannotInstall as error:
        return Outcome(client=client.name, state="failed", problems=(str(error),))
    if program is None:
        return Outcome(client=client.name, state="skipped", problems=("there is no node and npm on this machine",))
    installed = time.monotonic()
    command = [str(program), str(driver(client)), url, model, str(checkpoint), str(scratch)]
    environment = client_environment(program, scratch)
    try:
        done = run_client(command, environment=environment, folder=scratch, timeout_s=client.timeout_s)
        report, problems = _read_report(done)
    except subprocess.TimeoutExpired as error:
        report, problems = {}, [f"the driver did not end within {error.timeout:.0f} s"]
    problems += run_example(client, program, url, model, checkpoint, scratch)
    return Outcome(
        client=client.name,
        state="failed" if problems else "ok",
        version=str(report.get("version", "")),
        ran=", ".join(report.get("ran", [])),
        checks=int(report.get("checks", 0)),
        install_s=installed - started,
        seconds=time.monotonic() - installed,
        problems=tuple(problems),
    )


def _read_report(done: subprocess.CompletedProcess[str]) -> tuple[dict[str, Any], list[str]]:
    """The driver's line, and what went wrong."""
    lines = done.stdout.strip().splitlines()
    try:
        report = json.loads(lines[-1])
        problems = [str(failure) for failure in report["failures"]]
    except (IndexError, ValueError, KeyError, TypeError):
        report, problems = {}, [f"no report; the end of its output:\n{(done.stdout + done.stderr)[-3000:]}"]
    if done.returncode and not problems:
        problems.append(f"exit status {done.returncode}; the end of its output:\n{(done.stdout + done.stderr)[-3000:]}")
    return report, problems


def print_table(outcomes: list[Outcome]) -> None:
    """What ran, for people; the closing line is for CI."""
    print(f"\n{'client':18} {'version':10} {'install':>8} {'run':>7} {'checks':>7}  result")
    for o in outcomes:
        print(f"{o.client:18} {o.version:10} {o.install_s:6.0f} s {o.seconds:5.0f} s {o.checks:7}  {o.state}: {o.ran}")
    count = {state: sum(o.state == state for o in outcomes) for state in ("ok", "failed", "skipped")}
    print(f"\n{count['ok']} passed, {count['failed']} failed, {count['skipped']} skipped")


if __name__ == "__main__":
    sys.exit(main())
