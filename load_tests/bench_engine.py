"""How fast the engine is on this machine, against what the machine could do at best.

    python -m load_tests.bench_engine                      the 8B shape with random weights on a GPU, the demo on a CPU
    python -m load_tests.bench_engine --only pass,serve --rows 1,4 --contexts 256,4096
    python -m load_tests.bench_engine --checkpoint FOLDER --json result.json

Every request is steered, attributed and sampled with the default sampler. Random weights do not change the time of a
pass with one commit a row. Ratios compare figures of one run only; medians carry their range in brackets.

Progress goes to standard error; standard output gets a table and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine import (
    AttributionParams,
    BlockFinished,
    BlockStarted,
    Engine,
    EngineConfig,
    Finished,
    GenerateRequest,
    Intervention,
    ModelConfig,
    SamplingParams,
    SteeringParams,
)
from engine.model.steerling import SteerlingModel
from engine.model.transformer import Rotary
from engine.model.weights import VOCAB_MULTIPLE

DEMO = Path(__file__).resolve().parents[1] / "demo_model" / "steerling-demo"
SECTIONS = ("ceilings", "gemms", "pass", "serve")
STEPS = 24
"""Timed engine steps of one cell; a block of 64 has room for them after the first ones."""
SKIPPED_STEPS = 3


@dataclass
class Report:
    """Rows for people, figures for machines."""

    lines: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def add(self, section: str, name: str, text: str, **figures: float) -> None:
        """One row of a section, shown at once on standard error."""
        line = f"{section:<9} {name:<24} {text}"
        print(line, file=sys.stderr, flush=True)
        self.lines.append(line)
        self.figures.setdefault(section, {})[name] = {key: round(value, 4) for key, value in figures.items()}

    def get(self, section: str, name: str, figure: str) -> float | None:
        """A figure of this run, if it was measured."""
        value: float | None = self.figures.get(section, {}).get(name, {}).get(figure)
        return value


@dataclass(frozen=True)
class Setup:
    """What is measured, and where."""

    engine: Engine
    device: torch.device
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    clients: tuple[int, ...]
    requests_per_client: int

    @property
    def model(self) -> SteerlingModel:
        """The loaded model."""
        return self.engine.runner.model

    @property
    def config(self) -> ModelConfig:
        """Its shape."""
        return self.model.config


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen sections; returns the exit status."""
    options = parse(arguments)
    torch.manual_seed(0)
    setup = make_setup(options)
    report = Report()
    for section in options.only:
        {"ceilings": ceilings, "gemms": gemms, "pass": passes, "serve": serve}[section](setup, report)
    print("\n".join(report.lines))
    result = {"machine": machine(setup.device), "torch": torch.__version__, **report.figures}
    if options.json is not None:
        options.json.write_text(json.dumps(result) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="default: random weights of the 8B shape, or the demo on a CPU")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--only", type=sections, default=SECTIONS, help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--rows", type=numbers, help="requests that run together in the section `pass`")
    parser.add_argument("--contexts", type=numbers, help="keys that a row attends to in the section `pass`")
    parser.add_argument("--clients", type=numbers, help="closed-loop clients in the section `serve`")
    parser.add_argument("--requests-per-client", type=int, default=2)
    parser.add_argument("--no-graphs", action="store_true", help="kernel by kernel instead of captured graphs")
    parser.add_argument("--json", type=Path, help="write the JSON object here too")
    return parser.parse_args(arguments)


def numbers(text: str) -> tuple[int, ...]:
    """`1,2,4` as numbers."""
    return tuple(int(part) for part in text.split(","))


def sections(text: str) -> tuple[str, ...]:
    """Names of sections, refused if unknown."""
    chosen = tuple(text.split(","))
    if unknown := [name for name in chosen if name not in SECTIONS]:
        raise argparse.ArgumentTypeError(f"unknown section {', '.join(unknown)}; known are {', '.join(SECTIONS)}")
    return chosen


def make_setup(options: argparse.Namespace) -> Setup:
    """Load or make the model and start an engine on it."""
    is_gpu = torch.cuda.is_available() if options.device == "auto" else options.device.startswith("cuda")
    rows = options.rows or ((1, 2, 4, 8, 16) if is_gpu else (1, 2))
    contexts = options.contexts or ((256, 1024, 4096) if is_gpu else (128,))
    clients = options.clients or ((1, 4, 16) if is_gpu else (1, 2))
    # A seal row may ride beside every denoise row.
    config = EngineConfig(device=options.device, max_rows=2 * max(*rows, *clients), use_graphs=not options.no_graphs)
    started = time.perf_counter()
    if options.checkpoint is None and is_gpu:
        model = random_model(torch.device("cuda" if options.device == "auto" else options.device))
        engine = Engine(model, config)
    else:
        engine = Engine.from_checkpoint(options.checkpoint or DEMO, config)
    print(f"ready after {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
    device = engine.runner.device
    return Setup(engine, device, rows, contexts, clients, options.requests_per_client)


def random_model(device: torch.device) -> SteerlingModel:
    """The 8B shape in bfloat16, made on the device."""
    config = ModelConfig(vocab_size=100281, mask_token_id=100280, eos_token_id=100257, pad_token_id=100277)
    with torch.device("meta"):
        model = SteerlingModel(config, vocab_multiple=VOCAB_MULTIPLE)
    model = model.to(torch.bfloat16).to_empty(device=device).requires_grad_(False).eval()
    model.transformer.rotary = Rotary(config).to(device)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.02)
        else:
            parameter.fill_(1.0)
    return model


def machine(device: torch.device) -> str:
    """What the figures were measured on."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def ceilings(setup: Setup, report: Report) -> None:
    """Copy bandwidth and matrix rate: what bounds a pass from below."""
    is_gpu = setup.device.type == "cuda"
    dtype = setup.engine.runner.dtype
    source = torch.empty((2**32 if is_gpu else 2**26) // dtype.itemsize, dtype=dtype, device=setup.device)
    target = torch.empty_like(source)
    # A kernel that reads and writes; captured, a plain copy becomes a transfer of another and slower kind.
    seconds = device_seconds(lambda: torch.neg(source, out=target), setup.device)
    bandwidth = 2 * source.numel() * dtype.itemsize / statistics.median(seconds)
    report.add("ceilings", "copy", f"{bandwidth / 1e12:.2f} TB/s read and written", bytes_per_s=bandwidth)
    size = 8192 if is_gpu else 1024
    a, b = torch.randn(2, size, size, device=setup.device, dtype=dtype)
    rate = 2 * size**3 / statistics.median(device_seconds(lambda: a @ b, setup.device))
    report.add("ceilings", "matmul", f"{rate / 1e12:.2f} TFLOP/s at {size} cubed", flop_per_s=rate)


def gemms(setup: Setup, report: Report) -> None:
    """The model's GEMMs and nothing else, in the shapes of a pass, with the floor that the ceilings set."""
    transformer = setup.model.transformer
    linears = [module for module in transformer.layers.modules() if isinstance(module, nn.Linear)]
    linears.append(transformer.lm_head)
    num_weights = sum(linear.weight.numel() for linear in linears)
    bandwidth = report.get("ceilings", "copy", "bytes_per_s")
    rate = report.get("ceilings", "matmul", "flop_per_s")
    for rows in setup.rows:
        positions = rows * setup.config.diff_block_size
        inputs = {
            width: torch.randn(positions, width, device=setup.device, dtype=setup.engine.runner.dtype)
            for width in {linear.in_features for linear in linears}
        }
        with torch.no_grad():
            seconds = device_seconds(lambda: [linear(inputs[linear.in_features]) for linear in linears], setup.device)  # noqa: B023
        figures = {"seconds": statistics.median(seconds)}
        text = spread(seconds)
        if bandwidth is not None and rate is not None:
            weight_bytes = num_weights * setup.engine.runner.dtype.itemsize
            # A copy reads and writes; weights are only read, at the same rate.
            figures["floor"] = max(weight_bytes / bandwidth, 2 * num_weights * positions / rate)
            text += f"  floor {1e3 * figures['floor']:.2f} ms"
        report.add("gemms", f"{rows} rows", text, **figures)


def passes(setup: Setup, report: Report) -> None:
    """Engine steps of running requests: plan, pass, commits read back, scheduler, events."""
    for rows in setup.rows:
        for context in setup.contexts:
            if context > setup.config.block_size:
                continue
            seconds = list(steady_steps(setup, rows, context))
            figures = {"seconds": statistics.median(seconds)}
            text = spread(seconds)
            baseline = report.get("gemms", f"{rows} rows", "seconds")
            floor = report.get("gemms", f"{rows} rows", "floor")
            if baseline:
                figures["over_gemms"] = figures["seconds"] / baseline
                text += f"  {figures['over_gemms']:.2f} x GEMMs"
            if floor:
                figures["over_floor"] = figures["seconds"] / floor
                text += f"  {figures['over_floor']:.2f} x floor"
            report.add("pass", f"{rows} rows x {context}", text, **figures)


def steady_steps(setup: Setup, rows: int, context: int) -> Iterator[float]:
    """Seconds of single steps while `rows` requests fill their last block, `context` keys each."""
    engine, block_size = setup.engine, setup.config.diff_block_size
    drawn = random.Random(context * 1000 + rows)
    prompts = [[drawn.randrange(256) for _ in range(context - block_size)] for _ in range(rows)]
    ids = [engine.add_request(request(prompt, block_size, seed)) for seed, prompt in enumerate(prompts)]
    begun: set[str] = set()
    while len(begun) < rows:
        begun |= {event.request_id for event in engine.step() if isinstance(event, BlockStarted)}
    for index in range(min(SKIPPED_STEPS + STEPS, block_size - 2)):
        started = time.perf_counter()
        engine.step()
        if index >= SKIPPED_STEPS:
            yield time.perf_counter() - started
    for request_id in ids:
        engine.abort(request_id)
    while engine.has_work:
        engine.step()


def serve(setup: Setup, report: Report) -> None:
    """Closed loop: each client sends its next request when its last one has ended."""
    for clients in setup.clients:
        drawn = random.Random(clients)
        waiting = [
            request(
                [drawn.randrange(256) for _ in range(drawn.randint(60, 250))], drawn.choice((64, 128, 192, 256)), seed
            )
            for seed in range(clients * setup.requests_per_client)
        ]
        num_tokens = sum(item.max_tokens for item in waiting)
        first_blocks, between_blocks, seconds = closed_loop(setup.engine, waiting, clients)
        between = between_blocks or [0.0]
        report.add(
            "serve",
            f"{clients} clients",
            f"{num_tokens / seconds:.1f} tokens/s"
            f"  first block {spread(first_blocks)}  between blocks {spread(between)}",
            tokens_per_s=num_tokens / seconds,
            first_block_s=statistics.median(first_blocks),
            between_blocks_s=statistics.median(between),
        )


def closed_loop(engine: Engine, waiting: list[GenerateRequest], clients: int) -> tuple[list[float], list[float], float]:
    """Seconds to each request's first block, seconds between its blocks, and seconds in all."""
    first_blocks: list[float] = []
    between_blocks: list[float] = []
    last_event: dict[str, float] = {}
    has_block: set[str] = set()
    started = time.perf_counter()
    while waiting or last_event:
        while waiting and len(last_event) < clients:
            last_event[engine.add_request(waiting.pop())] = time.perf_counter()
        for event in engine.step():
            now = time.perf_counter()
            if isinstance(event, BlockFinished):
                times = between_blocks if event.request_id in has_block else first_blocks
                times.append(now - last_event[event.request_id])
                has_block.add(event.request_id)
                last_event[event.request_id] = now
            elif isinstance(event, Finished):
                check(event)
                del last_event[event.request_id]
    return first_blocks, between_blocks, time.perf_counter() - started


def check(event: Finished) -> None:
    """A figure of wrong answers would mean nothing."""
    output = event.output
    for commit in output.commits:
        parts = commit.attribution
        assert parts is not None, "a commit was not explained"
        total = parts.known_total + parts.discovered_total + parts.epsilon
        assert abs(total - commit.target_logit) < 1e-2 + 1e-3 * abs(commit.target_logit), (
            "parts do not sum to the logit"
        )
    assert output.error is None and len(output.commits) >= len(output.token_ids), output.error


def request(prompt: list[int], max_tokens: int, seed: int) -> GenerateRequest:
    """Steered, attributed, sampled with the defaults."""
    return GenerateRequest(
        prompt_token_ids=prompt,
        max_tokens=max_tokens,
        sampling=SamplingParams(seed=seed),
        steering=SteeringParams(interventions=(Intervention(concept_ids=(3,), strength=4.0),)),
        attribution=AttributionParams(top_k=8),
    )


def device_seconds(work: Callable[[], object], device: torch.device, repeats: int = 10) -> list[float]:
    """Seconds of repeated runs; under a CUDA graph on a GPU, so that launches cost nothing."""
    if device.type != "cuda":
        work()
        return [timed(work) for _ in range(repeats)]
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    seconds = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return seconds


def timed(work: Callable[[], object]) -> float:
    """Seconds of one run on the host."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def spread(seconds: Sequence[float]) -> str:
    """Median and range in milliseconds."""
    return f"{1e3 * statistics.median(seconds):.2f} ms [{1e3 * min(seconds):.2f}, {1e3 * max(seconds):.2f}]"


if __name__ == "__main__":
    sys.exit(main())
