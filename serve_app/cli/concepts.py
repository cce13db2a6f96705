"""`glassblock concepts`: search the catalogue, or look at one concept."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .api_client import ApiClient, ApiFailure
from .screen import safe, shown

_TOP_TOKENS = 15


def concepts(options: argparse.Namespace, client: ApiClient, console: Console) -> int:
    """Print what is found; returns the exit status, 1 if that is nothing."""
    if options.id is not None:
        return _show_one(options, client, console)
    found = client.get(
        "/v1/concepts",
        query=options.query,
        head=options.head,
        steerable="true" if options.steerable else None,
        limit=options.limit,
    )
    if options.json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    elif not found["data"]:
        console.print(f"no concept matches {options.query!r}; try another word, or none to list all", markup=False)
    else:
        console.print(_table(found["data"]))
        if found["has_more"]:
            console.print(f"{len(found['data'])} of {found['total']}; --limit shows more", style="dim")
    return 0 if found["data"] else 1


def _table(items: list[dict[str, Any]]) -> Table:
    table = Table()
    table.add_column("id", justify="right")
    for name in ("head", "name", "group", "steerable", "description"):
        table.add_column(name, overflow="fold")
    for item in items:
        group = (item.get("group") or {}).get("name")
        table.add_row(
            str(item["id"]),
            item["head"],
            Text(safe(item["name"] or "-"), style="bold"),
            Text(safe(group or "-")),
            "yes" if item["is_steerable"] else "no",
            Text(safe(item["description"] or "")),
        )
    return table


def _show_one(options: argparse.Namespace, client: ApiClient, console: Console) -> int:
    concept = client.get(f"/v1/concepts/{options.id}")
    tokens = client.get(f"/v1/concepts/{options.id}/top_tokens", k=_TOP_TOKENS)["data"]
    try:
        neighbors = client.get(f"/v1/concepts/{options.id}/neighbors", k=5)["data"]
    except ApiFailure:
        # Something to add where a server has it, not a reason to show nothing.
        neighbors = []
    if options.json:
        print(json.dumps({**concept, "top_tokens": tokens, "neighbors": neighbors}, indent=2, ensure_ascii=False))
        return 0
    console.print(_table([concept]))
    console.print(Text("promotes  ") + Text("  ".join(shown(item["token"]) for item in tokens)))
    if neighbors:
        names = (f"{item['name'] or '#' + str(item['id'])} ({item['id']})" for item in neighbors)
        console.print(Text("near      ") + Text("  ".join(map(safe, names))))
    return 0
