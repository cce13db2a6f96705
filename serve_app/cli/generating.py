"""`glassblock generate` and `glassblock chat`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .api_client import ApiClient, ApiFailure
from .asking import request_body
from .generation import Generation
from .screen import HEAD_STYLES, draw, safe, shown

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
_FRAMES_PER_S = 12
_LEAST_SHOWN = 0.05
"""Logits; weaker contributions say nothing to a reader."""


def generate(options: argparse.Namespace, client: ApiClient, console: Console) -> int:
    """Continue a prompt; returns the exit status."""
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    body = {"prompt": prompt, **request_body(options)}
    if options.json:
        print(json.dumps(client.post(COMPLETIONS, body), indent=2, ensure_ascii=False))
        return 0
    watch(client, COMPLETIONS, body, console, explains=options.explain)
    return 0


def chat(options: argparse.Namespace, client: ApiClient, console: Console) -> int:
    """Take turns until the end of input; returns the exit status."""
    messages: list[dict[str, str]] = []
    if options.system is not None:
        messages.append({"role": "system", "content": options.system})
    shared = request_body(options)
    if sys.stdin.isatty():
        console.print("Ctrl-D ends the conversation.", style="dim")
    while (line := _read_line(console)) is not None:
        if not line.strip():
            continue
        asked = [*messages, {"role": "user", "content": line}]
        body = {"messages": asked, **shared}
        try:
            if options.json:
                answer = client.post(CHAT, body)
                print(json.dumps(answer, ensure_ascii=False), flush=True)
                text = answer["choices"][0]["message"]["content"]
            else:
                text = watch(client, CHAT, body, console, explains=options.explain).text
        except ApiFailure as failure:
            # The conversation is worth more than one failed turn, unless nobody is there to repeat it.
            if not sys.stdin.isatty():
                raise
            console.print(str(failure), style="red", markup=False)
            continue
        messages = [*asked, {"role": "assistant", "content": text}]
    return 0


def watch(client: ApiClient, path: str, body: dict[str, Any], console: Console, *, explains: bool) -> Generation:
    """Stream an answer and show it: as a picture in a terminal, else as plain text as it becomes certain."""
    generation = Generation()
    body = {**body, "stream_options": {"include_diffusion": "steps"}}
    if console.is_terminal:
        try:
            with Live(console=console, refresh_per_second=_FRAMES_PER_S, transient=True) as live:
                for chunk in client.stream(path, body):
                    generation.take(chunk)
                    live.update(draw(generation, explains=explains))
        finally:
            # The picture is erased however it ends; what was certain by then stays.
            if generation.text:
                console.print(Text(safe(generation.text)))
    else:
        printed = 0
        for chunk in client.stream(path, body):
            generation.take(chunk)
            print(generation.text[printed:], end="", flush=True)
            printed = len(generation.text)
        print()
    if explains:
        console.print(explanation_table(generation.additions.get("attribution", [])))
    # Not among the text, which somebody may want to pipe on.
    Console(stderr=True).print(summary(generation), style="dim", markup=False, highlight=False, soft_wrap=True)
    return generation


def summary(generation: Generation) -> str:
    """One line on how the text came to be."""
    ran = generation.additions.get("diffusion", {})
    words = [
        f"{generation.num_tokens} tokens in {ran.get('denoising_steps', generation.num_steps)} steps",
        f"policy {ran.get('policy')}",
        f"sampler {ran.get('sampler')}",
        f"seed {ran.get('seed')}",
        f"ended by {generation.finish_reason}",
    ]
    for item in generation.additions.get("steering", {}).get("resolved", ()):
        names = " + ".join(str(concept["name"] or concept["id"]) for concept in item["concepts"])
        words.append(
            f"steered by {names}, alpha {_logits(item['alpha'])} from layer {item['layer']}, {item['schedule']}"
        )
    return "; ".join(words)


def explanation_table(attribution: list[dict[str, Any]]) -> Table:
    """Each token's logit, what it is made of, and the concepts behind it."""
    table = Table(title="each token: known + discovered + epsilon = logit", title_justify="left", title_style="dim")
    table.add_column("token")
    for name in ("logit", *HEAD_STYLES):
        table.add_column(name, justify="right", style=HEAD_STYLES.get(name))
    table.add_column("concepts", overflow="fold")
    for choice in attribution:
        for token in choice.get("tokens", ()):
            parts = (token["logit"], token["known_total"], token["discovered_total"], token["epsilon"])
            # Two of each: known ones have names, discovered ones often the larger part.
            strongest = [*token.get("known", ())[:2], *token.get("discovered", ())[:2]]
            concepts = [item for item in strongest if abs(item["contribution"] or 0.0) >= _LEAST_SHOWN]
            named = ", ".join(
                f"{item['name'] or '#' + str(item['id'])} {item['contribution']:+.2f}" for item in concepts
            )
            table.add_row(Text(shown(token["token"])), *(_logits(part) for part in parts), Text(safe(named)))
    return table


def _logits(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _read_line(console: Console) -> str | None:
    try:
        return console.input("[bold]you[/bold] ") if sys.stdin.isatty() else input()
    except EOFError:
        return None
