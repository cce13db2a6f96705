"""Prints what the engine was compared on and the largest difference found: `python -m tests.parity_table`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from engine import Engine, EngineConfig
from tests.analyses_parity import Errors, analysis_errors
from tests.checkpoints import RECIPES
from tests.oracle import Oracle
from tests.parity import TOLERANCE, Comparison
from tests.parity_cases import SETTINGS, compare, compare_inputs, run_engine


def main() -> None:
    """Compare every case of every checkpoint; stops with an error at the first that differs."""
    torch.set_num_threads(1)
    total, inputs, num_cases = Comparison(), Comparison(), 0
    by_setting = {name: Comparison() for name in SETTINGS}
    analyses: dict[str, Errors] = {}
    print(f"{'checkpoint':<46}{'cases':>6}{'commits':>9}{'largest error':>15}  of")
    for recipe in RECIPES:
        oracle, sum_ = Oracle(recipe), Comparison()
        with tempfile.TemporaryDirectory() as folder:
            results = list(run_engine(recipe, recipe.write(Path(folder))))
            analyses[recipe.name] = analysis_errors(recipe, oracle, Path(folder))
        assert max(analyses[recipe.name].values()) < TOLERANCE, f"{recipe.name}: {analyses[recipe.name]}"
        for case, output in results:
            compared = compare(oracle, case, output)
            sum_.add(compared)
            by_setting[case.setting].add(compared)
        if not recipe.chooses_from_concepts:
            config = EngineConfig(device="cpu", dtype="float32", num_pages=64)
            with tempfile.TemporaryDirectory() as folder:
                engine = Engine.from_checkpoint(recipe.write(Path(folder)), config)
                inputs.add(compare_inputs(oracle, engine, tokens_per_step=4))
        worst = max(sum_.errors, key=lambda name: sum_.errors[name])
        print(f"{recipe.name:<46}{len(results):>6}{sum_.num_commits:>9}{sum_.largest:>15.1e}  {worst}", flush=True)
        total.add(sum_)
        num_cases += len(results)
    print(f"{'all':<46}{num_cases:>6}{total.num_commits:>9}{total.largest:>15.1e}")
    print(f"{'what inputs contributed, of the largest':<46}{'':>6}{inputs.num_commits:>9}{inputs.largest:>15.1e}")
    print("\nBy what was asked, over all checkpoints:")
    for name, found in by_setting.items():
        print(f"  {name:<50}{found.num_commits:>9}{found.largest:>15.1e}")
    print(f"\nEvery commit has the same step, position and token; numbers within {TOLERANCE}:")
    for name, error in sorted(total.errors.items()):
        print(f"  {name:<20}{error:.1e}")
    _print_analyses(analyses)


def _print_analyses(errors: dict[str, Errors]) -> None:
    """The largest error of each analysis, and the checkpoint that has it."""
    print("\nAnalyses of text, largest error over all checkpoints (of likelihoods, which are sums, relative):")
    for name in sorted({name for found in errors.values() for name in found}):
        worst = max(errors, key=lambda checkpoint: errors[checkpoint].get(name, 0.0))
        print(f"  {name:<22}{errors[worst][name]:.1e}  {worst}")


if __name__ == "__main__":
    main()
