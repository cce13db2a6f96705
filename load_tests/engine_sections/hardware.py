"""Sections `ceilings` and `gemms`: what bounds a pass from below."""

from __future__ import annotations

from .bench import STATED_FLOP_PER_S, Bench
from .report import Section, median, with_spread


def ceilings(bench: Bench, section: Section) -> None:
    """Bandwidth, matrix rate, and the floors they set."""
    section.say("copying, reading, multiplying")
    found = bench.ceilings
    section.add("", what="copy, read and written", measured_tb_per_s=found.copy_byte_per_s / 1e12)
    section.add("", what="read alone", measured_tb_per_s=found.read_byte_per_s / 1e12)
    section.add("", what=f"matrix product, {found.size} cubed", measured_tflop_per_s=found.flop_per_s / 1e12)
    for rows in bench.rows:
        floor = bench.floor(rows)
        section.add(
            "floors",
            rows=rows,
            floor_ms=1e3 * floor.seconds,
            bound_by=floor.bound,
            floor_at_measured_rate_ms=1e3 * floor.measured_seconds,
        )
    note_floor(bench, section)


def gemms(bench: Bench, section: Section) -> None:
    """The model's GEMMs and nothing else, in the shapes of a pass."""
    for rows in bench.rows:
        section.say(f"{rows} rows")
        seconds, floor = bench.gemms(rows), bench.floor(rows)
        section.add(
            "",
            rows=rows,
            positions=rows * bench.config.diff_block_size,
            **with_spread("gemms_ms", seconds, 1e3),
            floor_ms=1e3 * floor.seconds,
            bound_by=floor.bound,
            over_floor_ratio=median(seconds) / floor.seconds,
            rate_tflop_per_s=bench.operations(rows) / median(seconds) / 1e12,
        )
    note_floor(bench, section)
    padded = bench.model.transformer.lm_head.weight.shape[0]
    section.note(
        f"{bench.num_weights / 1e6:,.1f} M weights of all layers and lm_head, the vocabulary padded to {padded:,} rows"
        + (", under a CUDA graph" if bench.is_gpu else "")
    )


def note_floor(bench: Bench, section: Section) -> None:
    """Say how the section's floor was found."""
    found = bench.ceilings
    measured = f"{found.flop_per_s / 1e12:.3g}"
    rate = f"{STATED_FLOP_PER_S / 1e12:.0f} (measured: {measured})" if bench.is_gpu else f"the measured {measured}"
    section.note(
        f"floor: the longer of reading the weights once at the copy's {found.copy_byte_per_s / 1e12:.3g} TB/s and of "
        f"the GEMMs' operations at {rate} TFLOP/s, both in this process"
    )
