"""How a GPU's bfloat16 decides against a CPU's float32, over whole runs of the demo model.

    python -m tests.decisions_table [--device cuda] [--dtype bfloat16] [--requests 48] [--max-tokens 128]

Greedy requests, some steered, all served together. Decisions are compared commit by commit; where two runs first
differ the table says by what margin the float32 run had decided: log-probability between the two tokens if the
position is the same, confidence between the two positions otherwise. After a first difference two runs are two texts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from engine import Commit, Engine, EngineConfig, GenerateRequest, Intervention, SamplingParams, SteeringParams

DEMO = Path(__file__).resolve().parents[1] / "demo_model" / "steerling-demo"


@dataclass(frozen=True)
class Difference:
    """Where two runs of one request part."""

    step: int
    kind: str
    """`token` or `position`."""
    margin: float | None
    """None: the other token is not among the likeliest that the float32 run reports."""


def main() -> int:
    """Print the table; exit status 1 if a margin is larger than rounding explains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--largest-margin", type=float, default=0.5)
    options = parser.parse_args()
    requests = make_requests(options.requests, options.max_tokens)
    exact = run("cpu", "float32", requests)
    other = run(options.device, options.dtype, requests)
    differences = [first_difference(a, b) for a, b in zip(exact, other, strict=True)]
    found = [difference for difference in differences if difference is not None]
    share = [1.0 if d is None else d.step / len(a) for d, a in zip(differences, exact, strict=True)]
    print(f"{options.dtype} on {options.device} against float32 on the CPU, {len(requests)} runs, demo model")
    print(f"runs with every decision equal     {len(requests) - len(found)} of {len(requests)}")
    print(f"share of a run before they part    median {statistics.median(share):.2f}, least {min(share):.2f}")
    for kind, unit in (("token", "in log-probability"), ("position", "in confidence")):
        margins = [d.margin for d in found if d.kind == kind and d.margin is not None]
        line = f"median {statistics.median(margins):.4f}, largest {max(margins):.4f} {unit}" if margins else "none"
        print(f"margin at a first other {kind:<10} {len(margins)} runs: {line}")
    num_unexplained = sum(d.margin is None or d.margin > options.largest_margin for d in found)
    print(f"margins above {options.largest_margin} or unknown         {num_unexplained}")
    return int(num_unexplained > 0)


def make_requests(number: int, max_tokens: int) -> list[GenerateRequest]:
    """Greedy requests of different prompts and lengths; every second one steered."""
    generator = torch.Generator().manual_seed(11)
    requests = []
    for index in range(number):
        length = int(torch.randint(0, 90, (1,), generator=generator))
        steering = SteeringParams(interventions=(Intervention(concept_ids=(index % 100,), strength=4.0),))
        requests.append(
            GenerateRequest(
                prompt_token_ids=torch.randint(300, 6000, (length,), generator=generator).tolist(),
                max_tokens=max_tokens,
                sampling=SamplingParams(temperature=0.0, seed=index, num_logprobs=20),
                steering=steering if index % 2 else None,
            )
        )
    return requests


def run(device: str, dtype: str, requests: list[GenerateRequest]) -> list[tuple[Commit, ...]]:
    """Commits of each request."""
    engine = Engine.from_checkpoint(DEMO, EngineConfig(device=device, dtype=dtype, max_rows=16))
    return [output.commits for output in engine.generate(requests)]


def first_difference(exact: tuple[Commit, ...], other: tuple[Commit, ...]) -> Difference | None:
    """Where two runs of one request first decide differently."""
    for step, (a, b) in enumerate(zip(exact, other, strict=True)):
        if (a.position, a.token_id) == (b.position, b.token_id):
            continue
        if a.position != b.position:
            return Difference(step, "position", abs(a.confidence - b.confidence))
        by_token = dict(a.top_logprobs)
        margin = a.logprob - by_token[b.token_id] if b.token_id in by_token else None
        return Difference(step, "token", margin)
    return None


if __name__ == "__main__":
    sys.exit(main())
