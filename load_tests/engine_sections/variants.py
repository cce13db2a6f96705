"""Sections `fp8` and `deterministic`: engines with one option, over the engine without it."""

from __future__ import annotations

from engine import Engine
from engine.model.quantization import is_quantized

from .bench import Bench
from .loops import Block
from .report import Section, median, with_spread

ROWS = (1, 8)


def fp8(bench: Bench, section: Section) -> None:
    """Row-wise scaled fp8 weights and activations over bfloat16."""
    bench.needs_gpu(section)
    default = _blocks(bench, section, bench.engine)
    section.say("a second model")
    # Quantising may rewrite the weights, which the main engine still needs.
    engine = bench.make_engine(model=bench.make_model(), dtype="fp8")
    if not is_quantized(engine.runner.model):
        raise RuntimeError("the engine was given a bfloat16 model and dtype fp8, and holds no fp8 weight")
    _compare(bench, section, default, _blocks(bench, section, engine))


def deterministic(bench: Bench, section: Section) -> None:
    """Results that do not depend on the batch, over the fastest kernels."""
    bench.needs_gpu(section)
    default = _blocks(bench, section, bench.engine)
    _compare(bench, section, default, _blocks(bench, section, bench.make_engine(deterministic=True)))


def _blocks(bench: Bench, section: Section, engine: Engine) -> dict[int, Block]:
    """A block at each number of rows."""
    blocks = {}
    for rows in [rows for rows in ROWS if rows <= max(bench.rows)]:
        section.say(f"{rows} rows, {'the default' if engine is bench.engine else section.name}")
        blocks[rows] = bench.fresh_block(engine, rows, bench.few_keys())
    return blocks


def _compare(bench: Bench, section: Section, default: dict[int, Block], changed: dict[int, Block]) -> None:
    for rows, block in changed.items():
        default_s, changed_s = median(default[rows].step_s), median(block.step_s)
        section.add(
            "",
            rows=rows,
            keys=bench.few_keys(),
            **with_spread("default_step_ms", default[rows].step_s, 1e3),
            **with_spread(f"{section.name}_step_ms", block.step_s, 1e3),
            default_tokens_per_s=rows / default_s,
            tokens_per_s=rows / changed_s,
            over_default_ratio=default_s / changed_s,
        )
    section.note(f"default: {str(bench.dtype).removeprefix('torch.')}, the same requests in the same process")
    section.note("over default: throughput, so above 1 is faster")
