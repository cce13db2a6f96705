"""The `glassblock` command: which of its parts runs, and against what."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from rich.console import Console

from .. import __version__
from ..client_key import api_key_from_environment
from .api_client import ApiClient, ApiFailure
from .asking import add_generating_options, check_steer
from .bench import bench
from .concepts import concepts
from .generating import chat, generate
from .waiting import Waiting

DEFAULT_SERVER = "http://127.0.0.1:8000"
INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""
BROKEN_PIPE = 141
"""Exit status where the reader of the output has left, as `head` does; what SIGPIPE would make of it."""

Command = Callable[[argparse.Namespace, ApiClient, Console], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, 1 for what failed, 2 for how it was asked."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if hasattr(options, "steer"):
        check_steer(parser, options)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What a model writes need not be in the terminal's character set.
        sys.stdout.reconfigure(errors="replace")
    try:
        status = _run(options, Console())
        # Here, where it can still be told: at exit the interpreter would complain of a reader that has left.
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        _discard_output()
        return BROKEN_PIPE
    except UnicodeError as error:
        return _fail(f"text that is not UTF-8 cannot be sent: {error}")
    except (ApiFailure, OSError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(options: argparse.Namespace, console: Console) -> int:
    if options.command is None:
        # Here: torch takes seconds to import, and whoever asks a server needs none of it.
        from .check import check  # noqa: PLC0415

        return check(options, console)
    with _client(options) as client:
        command: Command = options.command
        return command(options, client, console)


def _fail(message: str) -> int:
    Console(stderr=True).print(f"glassblock: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    return 1


def _discard_output() -> None:
    """Let what is still buffered go nowhere, in place of an error at exit."""
    with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


@contextmanager
def _client(options: argparse.Namespace) -> Iterator[ApiClient]:
    """A client of the server that was named, or of one made here for as long as the command runs."""
    if not (options.local or options.model):
        with ApiClient(options.server, api_key_from_environment()) as client:
            yield client
        return
    with ExitStack() as stack:
        with Waiting(Console(stderr=True)) as waiting:
            # Here for the same reason.
            from .in_process import served_here  # noqa: PLC0415

            url = stack.enter_context(served_here(options.model, options.device, waiting.advance))
        yield stack.enter_context(ApiClient(url))


def make_parser() -> argparse.ArgumentParser:
    """All options of all parts."""
    parser = argparse.ArgumentParser(
        prog="glassblock", description="Generate with an interpretable diffusion language model, steer it, look inside."
    )
    parser.add_argument("--version", action="version", version=__version__)
    parts = parser.add_subparsers(required=True, metavar="COMMAND")

    part = _part(parts, "generate", generate, "continue a prompt and watch it come into focus")
    part.add_argument("prompt", nargs="?", default="", help="text to continue; - reads it from standard input")
    add_generating_options(part)

    part = _part(parts, "chat", chat, "take turns with a chat checkpoint; reads lines from standard input")
    part.add_argument("--system", help="system message")
    add_generating_options(part)

    part = _part(parts, "concepts", concepts, "search concepts, or look at one")
    part.add_argument("query", nargs="?", default="", help="words in name or description; none lists all")
    part.add_argument("--id", type=int, help="show this concept, with the tokens that it promotes")
    part.add_argument("--head", choices=("known", "discovered"))
    part.add_argument("--steerable", action="store_true", help="only those that requests may steer by")
    part.add_argument("--limit", type=int, default=20, help="most shown (20)")
    part.add_argument("--json", action="store_true", help="print the server's answer and nothing else")

    part = _part(parts, "bench", bench, "measure a server under a steady number of clients")
    part.add_argument("--prompt", default="", help="text to continue")
    part.add_argument("--clients", type=_positive, default=4, metavar="N", help="requests at once (4)")
    part.add_argument("--requests", type=_positive, default=32, metavar="N", help="requests in all (32)")
    add_generating_options(part)

    part = parts.add_parser(
        "check", help="validate a checkpoint's folder", description="Validate a checkpoint's folder."
    )
    # It talks to nobody.
    part.set_defaults(command=None)
    part.add_argument("path", type=Path, help="folder with config.json and *.safetensors")
    part.add_argument("--values", action="store_true", help="read every number and look for NaN and infinities")
    part.add_argument("--json", action="store_true", help="print findings as JSON")
    return parser


def _part(
    parts: argparse._SubParsersAction[argparse.ArgumentParser], name: str, command: Command, summary: str
) -> argparse.ArgumentParser:
    part = parts.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
    part.set_defaults(command=command)
    target = part.add_argument_group("what to talk to").add_mutually_exclusive_group()
    target.add_argument("--server", default=DEFAULT_SERVER, metavar="URL", help=f"a running server ({DEFAULT_SERVER})")
    target.add_argument("--local", action="store_true", help="no server: run the demo model in this process")
    target.add_argument("--model", metavar="MODEL", help="no server: run this checkpoint's folder or hub id here")
    part.add_argument("--device", default="auto", help="for --local and --model: auto, cpu or cuda (auto)")
    return part


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return value


if __name__ == "__main__":
    sys.exit(main())
