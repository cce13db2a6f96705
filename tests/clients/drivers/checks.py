"""What every driver shares: its arguments, what it checks, and one line of JSON about it.

A driver runs in its client's own environment, so this module uses the standard library only.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, NoReturn


class Checks:
    """Counts checks and keeps the failed ones; `finish` prints the report and ends the process."""

    def __init__(self, package: str | None) -> None:
        """`package` is the client's, whose version is reported; None where the driver imitates it."""
        parser = argparse.ArgumentParser()
        parser.add_argument("url", help="base URL of the server, without /v1")
        parser.add_argument("model", help="id of the model it serves")
        parser.add_argument("checkpoint", help="folder of the model, for clients that want its tokenizer")
        parser.add_argument("scratch", help="a folder for the client's own files")
        arguments = parser.parse_args()
        self.url: str = arguments.url
        self.model: str = arguments.model
        self.checkpoint: str = arguments.checkpoint
        self.scratch: str = arguments.scratch
        self._package = package
        self._part = ""
        self._ran: list[str] = []
        self._failures: list[str] = []
        self._checks = 0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A group of checks. What it raises is a failure of it, and the others still run."""
        self._part = name
        self._ran.append(name)
        try:
            yield
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            line = [frame.lineno for frame in frames if frame.filename == sys.argv[0]][-1]
            self._failures.append(f"{name}: line {line}: {type(error).__name__}: {error}"[:1500])

    def that(self, holds: object, claim: str, seen: object = None) -> None:
        """Check a claim; `seen` is shown if it does not hold."""
        self._checks += 1
        if not holds:
            self._failures.append(
                f"{self._part}: not so: {claim}; saw {seen if isinstance(seen, str) else repr(seen)}"[:4000]
            )

    def equal(self, seen: object, wanted: object, claim: str) -> None:
        """Check that two values are equal."""
        self.that(seen == wanted, f"{claim} (wanted {wanted!r})"[:700], seen)

    def finish(self) -> NoReturn:
        """Print the report as one line and exit: 1 if a check failed, or if there was none."""
        if not self._checks:
            self._failures.append("nothing was checked")
        report = {
            "version": "imitated" if self._package is None else version(self._package),
            "ran": self._ran,
            "checks": self._checks,
            "failures": self._failures,
        }
        print("\n" + json.dumps(report), flush=True)
        raise SystemExit(1 if self._failures else 0)

    def post(self, path: str, body: Any) -> Any:
        """What the server itself answers to a plain request, to compare a client's view with."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"POST {path}: {error.code} {error.read().decode()[:500]}") from error

    def get(self, path: str) -> Any:
        """The server's answer to a plain GET."""
        with urllib.request.urlopen(self.url + path, timeout=120) as response:
            return json.load(response)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, by the server."""
        ids: list[int] = self.post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
        return ids
