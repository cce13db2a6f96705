"""Every option of `generate` reaches the body of the request."""

from __future__ import annotations

import pytest

from serve_app.cli.asking import request_body
from serve_app.cli.main import make_parser
from serve_app.schemas import CompletionRequest

EVERYTHING = {
    "--max-tokens 7": {"max_tokens": 7},
    "--seed 3": {"seed": 3},
    "--temperature 0.5": {"temperature": 0.5},
    "--top-p 0.9": {"top_p": 0.9},
    "--policy threshold": {"diffusion": {"policy": "threshold"}},
    "--tokens-per-step 4": {"diffusion": {"tokens_per_step": 4}},
    "--guidance 1.5": {"diffusion": {"cfg_scale": 1.5}},
    "--preset kitchen@2": {"steering": {"preset": "kitchen@2"}},
    "--suppress 7=3": {"steering": {"suppress": [{"concept": 7, "strength": 3.0}]}},
    "--suppress food": {"steering": {"suppress": [{"concept": "food", "strength": 20.0}]}},
    "--steer food=-2 --layer 3 --schedule hard_cutoff": {
        "steering": {"interventions": [{"concepts": ["food"], "strength": -2.0, "layer": 3, "schedule": "hard_cutoff"}]}
    },
}


def body_of(options: str) -> dict[str, object]:
    return request_body(make_parser().parse_args(["generate", "a", *options.split()]))


@pytest.mark.parametrize("options", EVERYTHING)
def test_an_option_becomes_the_field_that_the_server_knows(options):
    body = body_of(options)
    assert {**body_of(""), **EVERYTHING[options]} == body
    CompletionRequest.model_validate({"prompt": "a", **body})


def test_explain_asks_for_the_concepts_of_tokens():
    assert body_of("--explain")["attribution"]["level"] == "token"
    assert "attribution" not in body_of("")


def test_every_option_that_shapes_a_request_is_tried_here():
    parsed = vars(make_parser().parse_args(["generate", "a"]))
    target = {"command", "prompt", "server", "local", "model", "device", "json", "explain"}
    tried = {
        word.removeprefix("--").replace("-", "_") for options in EVERYTHING for word in options.split() if "--" in word
    }
    assert tried == set(parsed) - target
