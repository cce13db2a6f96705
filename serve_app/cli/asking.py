"""From options of the command line to the body of a request."""

from __future__ import annotations

import argparse
import math
from typing import Any

DEFAULT_SUPPRESSION = 20.0


def add_generating_options(parser: argparse.ArgumentParser) -> None:
    """Options that `generate` and `chat` share."""
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=128, metavar="N", help="tokens at most (128)")
    sampling.add_argument("--seed", type=int, help="same seed, same text; left out: drawn, and told at the end")
    sampling.add_argument("--temperature", type=finite, metavar="T", help="0 is greedy")
    sampling.add_argument("--top-p", type=finite, metavar="P", help="nucleus mass")
    sampling.add_argument("--policy", help="confidence, threshold, factor, entropy_bound or lossless")
    sampling.add_argument("--tokens-per-step", type=int, metavar="K", help="tokens committed in a pass at most")
    sampling.add_argument("--guidance", type=finite, metavar="SCALE", help="classifier-free guidance; 0 is off")
    steering = parser.add_argument_group("steering")
    steering.add_argument(
        "--steer",
        action="append",
        default=[],
        type=weighted,
        metavar="CONCEPT=STRENGTH",
        help="toward a concept, by label or id, in logits; negative is away. May be given several times",
    )
    steering.add_argument(
        "--suppress",
        action="append",
        default=[],
        type=weighted,
        metavar="CONCEPT[=STRENGTH]",
        help=f"lower what a concept promotes (strength {DEFAULT_SUPPRESSION:g})",
    )
    steering.add_argument("--schedule", choices=("fixed", "hard_cutoff"), default="fixed", help="for --steer (fixed)")
    steering.add_argument("--layer", type=int, help="first layer that --steer acts on, from 1")
    steering.add_argument("--preset", help="a saved preset, as name or name@version")
    output = parser.add_argument_group("output")
    output.add_argument("--explain", action="store_true", help="show the concepts behind each token")
    output.add_argument("--json", action="store_true", help="print the server's answer and nothing else")


def finite(text: str) -> float:
    """A number that JSON can hold."""
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is no finite number")
    return value


def weighted(text: str) -> tuple[str | int, float | None]:
    """`food=8` -> ("food", 8.0); `food` -> ("food", None); a whole number names a concept by its id."""
    name, equals, number = text.rpartition("=")
    if not equals:
        name, number = text, ""
    name = name.strip()
    try:
        strength = finite(number) if equals else None
    except ValueError:
        raise argparse.ArgumentTypeError(f"{number!r} in {text!r} is no number; say CONCEPT=STRENGTH") from None
    if not name:
        raise argparse.ArgumentTypeError(f"{text!r} names no concept; say CONCEPT=STRENGTH")
    return int(name) if name.isdecimal() else name, strength


def request_body(options: argparse.Namespace) -> dict[str, Any]:
    """Everything of a request but its prompt or messages."""
    body: dict[str, Any] = {"max_tokens": options.max_tokens}
    for name in ("seed", "temperature", "top_p"):
        if getattr(options, name) is not None:
            body[name] = getattr(options, name)
    diffusion = {
        "policy": options.policy,
        "tokens_per_step": options.tokens_per_step,
        "cfg_scale": options.guidance,
    }
    diffusion = {name: value for name, value in diffusion.items() if value is not None}
    if diffusion:
        body["diffusion"] = diffusion
    steering = _steering(options)
    if steering:
        body["steering"] = steering
    if options.explain:
        body["attribution"] = {"level": "token", "top_k": 8}
    return body


def _steering(options: argparse.Namespace) -> dict[str, Any]:
    steering: dict[str, Any] = {}
    if options.preset is not None:
        steering["preset"] = options.preset
    interventions = []
    for concept, strength in options.steer:
        intervention: dict[str, Any] = {"concepts": [concept], "strength": strength, "schedule": options.schedule}
        if options.layer is not None:
            intervention["layer"] = options.layer
        interventions.append(intervention)
    if interventions:
        steering["interventions"] = interventions
    if options.suppress:
        steering["suppress"] = [
            {"concept": concept, "strength": DEFAULT_SUPPRESSION if strength is None else strength}
            for concept, strength in options.suppress
        ]
    return steering


def check_steer(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with a usage error where a --steer has no strength."""
    for concept, strength in options.steer:
        if strength is None:
            parser.error(f"--steer {concept}: say how strongly, as in --steer {concept}=4")
