"""One generation as it unfolds, from the chunks of a stream: what is certain, and how the canvas stands.

Pure state: chunks in, fields out. Drawing it is `screen`'s.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Cell:
    """A filled position of the canvas."""

    token: str
    confidence: float
    step: int
    """The denoising step, counted over the whole generation, that filled it."""
    concepts: tuple[tuple[str, str, float], ...] = ()
    """(name, head, contribution in logits), strongest first; empty unless asked for."""


@dataclass(slots=True)
class Generation:
    """What is known so far."""

    text: str = ""
    block_length: int = 64
    prompt_tail: int = 0
    block: int = 0
    start: int = 0
    end: int = 0
    """The canvas holds generated positions [start, end)."""
    num_steps: int = 0
    num_tokens: int = 0
    cells: dict[int, Cell] = field(default_factory=dict)
    """Filled positions of all blocks, counted from the first generated one."""
    concept_totals: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    """(name, head) -> sum of its contributions to the tokens so far, in logits."""
    finish_reason: str | None = None
    additions: dict[str, Any] = field(default_factory=dict)
    """`steering`, `diffusion` and `attribution` of the answer, once they have come."""

    def take(self, chunk: dict[str, Any]) -> None:
        """Take one chunk of a completion or chat stream with diffusion events."""
        for choice in chunk.get("choices", ()):
            delta = choice.get("delta") or {}
            self.text += choice.get("text") or delta.get("content") or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        for name in ("steering", "attribution"):
            if name in chunk:
                self.additions[name] = chunk[name]
        if "diffusion" in chunk:
            self._take_event(chunk["diffusion"])

    @property
    def landed(self) -> list[int]:
        """Positions that the last step filled, in order."""
        return sorted(position for position, cell in self.cells.items() if cell.step == self.num_steps)

    def _take_event(self, event: dict[str, Any]) -> None:
        match event.get("type"):
            case "generation.started":
                self.block_length, self.prompt_tail = event["block_length"], event["prompt_tail"]
            case "block.started":
                self.block, self.start, self.end = event["block"], event["start"], event["end"]
            case "step":
                self._take_step(event["commits"])
            case "generation.done" | None:
                self.additions["diffusion"] = {k: v for k, v in event.items() if k not in ("seq", "type", "steps")}

    def _take_step(self, commits: list[dict[str, Any]]) -> None:
        self.num_steps += 1
        for commit in commits:
            concepts = tuple(
                (item["name"] or f"#{item['id']}", item["head"], item["contribution"] or 0.0)
                for item in commit.get("concepts", ())
            )
            self.cells[commit["position"]] = Cell(
                commit["token"], commit["confidence"] or 0.0, self.num_steps, concepts
            )
            for name, head, contribution in concepts:
                self.concept_totals[name, head] += contribution
        self.num_tokens = len(self.cells)
