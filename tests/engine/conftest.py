"""Checkpoints and oracles, made once for all tests; engines, checked for lost pages when a test is done with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, EngineConfig, Recorder
from tests.checkpoints import Recipe
from tests.oracle import Oracle

MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Recipe], Path]:
    """Recipe -> the folder of its checkpoint."""
    folders: dict[str, Path] = {}

    def make(recipe: Recipe) -> Path:
        if recipe.name not in folders:
            folders[recipe.name] = recipe.write(tmp_path_factory.mktemp(recipe.name))
        return folders[recipe.name]

    return make


@pytest.fixture(scope="session")
def oracle() -> Callable[[Recipe], Oracle]:
    """Recipe -> the reference package's model with its weights."""
    made: dict[str, Oracle] = {}

    def make(recipe: Recipe) -> Oracle:
        if recipe.name not in made:
            made[recipe.name] = Oracle(recipe)
        return made[recipe.name]

    return make


@pytest.fixture
def make_engine(checkpoint: Callable[[Recipe], Path]) -> Iterator[MakeEngine]:
    """(recipe, recorder=None, **EngineConfig fields) -> Engine. After the test, idle engines hold no page."""
    made: list[Engine] = []

    def make(recipe: Recipe, *, recorder: Recorder | None = None, **config: Any) -> Engine:
        values = {"device": "cpu", "dtype": "float32", "num_pages": 128, "max_rows": 16, **config}
        made.append(Engine.from_checkpoint(checkpoint(recipe), EngineConfig(**values), recorder=recorder))
        return made[-1]

    yield make
    for engine in made:
        engine.check_integrity()
        if not engine.has_work:
            stats = engine.stats()
            assert stats.pages_held == 0
            assert stats.pages_free + stats.pages_cached == stats.num_pages
