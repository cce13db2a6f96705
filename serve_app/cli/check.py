"""`glassblock check PATH`: everything that can be known of a checkpoint before anybody waits for a GPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from engine import CheckpointError, CheckpointSummary, EngineError, ModelConfig, check_checkpoint

from ..chat_template import CONFIG_FILE, HEADER_TEMPLATE, TEMPLATE_FILE, ChatTemplate, Turn
from ..concepts import LABELS_FILE, ConceptCatalogue
from ..errors import ApiError
from ..tokenizer import Tokenizer

_GIB = 1024**3
_QUESTION = "What is a fish?"
"""Any template takes a conversation of one question."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    is_good: bool
    text: str


def check(options: argparse.Namespace, console: Console) -> int:
    """Print what is found; returns the exit status, 1 if the checkpoint cannot be served."""
    with Progress(console=console, transient=True, disable=options.json) as progress:
        task = progress.add_task("tensors", total=None)

        def advance(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        findings = inspect(options.path, reads_values=options.values, progress=advance)
    is_good = all(finding.is_good for finding in findings)
    if options.json:
        print(json.dumps({"ok": is_good, "findings": [[f.name, f.is_good, f.text] for f in findings]}, indent=2))
        return 0 if is_good else 1
    table = Table(show_header=False, box=None)
    for finding in findings:
        mark = Text("ok", style="green") if finding.is_good else Text("FAULT", style="bold red")
        table.add_row(mark, Text(finding.name, style="bold"), Text(finding.text))
    console.print(table)
    if is_good and not options.values:
        console.print("Names, shapes and types only; --values also reads every number.", style="dim")
    return 0 if is_good else 1


def inspect(path: Path, *, reads_values: bool, progress: Callable[[int, int], None]) -> list[Finding]:
    """What is right and wrong with the checkpoint in a folder. Without a readable config there is nothing beyond it."""
    try:
        config = ModelConfig.from_json(path)
    except (EngineError, OSError, ValueError) as error:
        return [Finding("config.json", False, str(error))]

    def weights() -> str:
        return _describe_weights(check_checkpoint(path, reads_values=reads_values, progress=progress))

    return [
        Finding("config.json", True, _describe_config(config)),
        _find("weights", weights),
        _find("tokenizer", lambda: _describe_tokenizer(path, config)),
        _find("chat template", lambda: _describe_template(path, config)),
        _find("concepts", lambda: _describe_catalogue(path, config)),
    ]


def _find(name: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(name, True, look())
    except (EngineError, OSError, ValueError) as error:
        return Finding(name, False, str(error))


def _describe_config(config: ModelConfig) -> str:
    return (
        f"{config.n_layers} layers of width {config.n_embd}, {config.n_head} heads over {config.num_kv_heads} of keys, "
        f"vocabulary {config.vocab_size}, context {config.block_size} in blocks of {config.diff_block_size}, "
        f"{'instruct' if config.eot_id is not None else 'base'}"
    )


def _describe_weights(summary: CheckpointSummary) -> str:
    return (
        f"{summary.num_parameters / 1e6:,.1f} M parameters in {summary.num_tensors} tensors, "
        f"{', '.join(summary.dtypes)}, "
        f"{summary.num_parameters * 2 / _GIB:.2f} GiB in bfloat16" + (", all finite" if summary.is_finite else "")
    )


def _describe_tokenizer(path: Path, config: ModelConfig) -> str:
    tokenizer = Tokenizer.from_checkpoint(path, config)
    source = "tokenizer.json" if (path / "tokenizer.json").is_file() else "cl100k_base"
    return f"{source}, {tokenizer.vocab_size} ids"


def _describe_template(path: Path, config: ModelConfig) -> str:
    try:
        tokenizer = Tokenizer.from_checkpoint(path, config)
    except (EngineError, OSError, ValueError):
        raise CheckpointError("not tried: it needs the tokenizer") from None
    template = ChatTemplate.from_checkpoint(path, config, tokenizer)
    if template is None:
        return "none: a base checkpoint" if config.eot_id is None else "none, so that chat is refused"
    try:
        ids = template.encode([Turn("user", _QUESTION)])
    except ApiError as error:
        raise CheckpointError(str(error)) from error
    if (path / TEMPLATE_FILE).is_file():
        source = TEMPLATE_FILE
    else:
        source = "Steerling's own" if template.source == HEADER_TEMPLATE else CONFIG_FILE
    return f"{source}, {len(template.source)} characters; {_QUESTION!r} becomes {len(ids)} ids"


def _describe_catalogue(path: Path, config: ModelConfig) -> str:
    catalogue = ConceptCatalogue.from_checkpoint(path, config)
    known = catalogue.search("", head="known")
    named = sum(concept is not None and concept.name is not None for concept in map(catalogue.get, known))
    source = LABELS_FILE if (path / LABELS_FILE).is_file() else f"no {LABELS_FILE}"
    return f"{len(known)} known ({named} named), {len(catalogue) - len(known)} discovered; {source}"
