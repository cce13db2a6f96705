"""What a terminal shows of a generation."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from serve_app.cli.generating import summary
from serve_app.cli.generation import Generation
from serve_app.cli.screen import draw


def step(*commits: tuple[int, str, float]) -> dict[str, Any]:
    event = {
        "type": "step",
        "commits": [
            {
                "position": position,
                "token": token,
                "confidence": confidence,
                "concepts": [{"id": 5, "name": "animal", "head": "known", "contribution": 1.5}],
            }
            for position, token, confidence in commits
        ],
    }
    return {"choices": [], "diffusion": event}


def begun() -> Generation:
    generation = Generation()
    generation.take({"choices": [], "diffusion": {"type": "generation.started", "block_length": 64, "prompt_tail": 2}})
    generation.take({"choices": [], "diffusion": {"type": "block.started", "block": 0, "start": 0, "end": 6}})
    return generation


def picture(generation: Generation) -> str:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(draw(generation, explains=True))
    written: str = console.file.getvalue()  # type: ignore[attr-defined]
    return written


def test_cells_land_where_they_belong_and_the_rest_is_masked():
    generation = begun()
    generation.take(step((3, "bird", 0.9)))
    generation.take(step((0, "a", 0.4), (1, " small", 0.7)))
    assert generation.landed == [0, 1]
    assert "a small\u2591\u2591bird\u2591\u2591\u2591\u2591" in picture(generation)
    assert "3/6  step 2" in picture(generation)


def test_contributions_add_up_by_concept():
    generation = begun()
    generation.take(step((3, "bird", 0.9)))
    generation.take(step((0, "a", 0.4), (1, " small", 0.7)))
    assert generation.concept_totals["animal", "known"] == 4.5
    assert "K" in picture(generation) and "+4.5" in picture(generation)


def test_what_a_model_writes_cannot_steer_the_terminal():
    generation = begun()
    generation.take(step((0, "\x1b[2J", 0.9), (1, "\r", 0.9)))
    generation.take({"choices": [{"text": "\x1b]0;title\x07", "finish_reason": None}]})
    assert "\x1b" not in picture(generation) and "\r" not in picture(generation)


def test_a_concept_s_name_is_no_markup():
    """rich read names in the table as its own markup: `[/b]` in one ended the command, and `[b]` was not shown."""
    generation = begun()
    generation.concept_totals["[b]x[/c]", "known"] = 2.0
    assert "[b]x[/c]" in picture(generation)


def test_a_strength_without_a_number_is_summed_up_all_the_same():
    """An answer's alpha may be null, and formatting it ended the command after all of the text was there."""
    generation = Generation()
    item = {"concepts": [{"id": 5, "name": None}], "alpha": None, "layer": 2, "schedule": "fixed"}
    generation.take({"choices": [], "steering": {"resolved": [item]}})
    assert "steered by 5, alpha - from layer 2" in summary(generation)


def test_a_chat_stream_is_read_like_a_completion():
    generation = Generation()
    generation.take({"choices": [{"delta": {"role": "assistant", "content": "a bird"}, "finish_reason": None}]})
    generation.take({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    assert (generation.text, generation.finish_reason) == ("a bird", "stop")
