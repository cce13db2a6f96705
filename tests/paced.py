"""The application on real engines whose passes take their time, so that a test can do something between two of them."""

# No `from __future__ import annotations`: Ray looks at the builder's annotation.
import time
from pathlib import Path

from ray.serve import Application

from engine import AsyncEngine, Engine, EngineConfig, Event, Recorder
from serve_app.app import assemble
from serve_app.config import AppConfig

PACE_S = 0.01
HOLD_FILE = "hold"
"""While a file of this name lies beside the checkpoint, no engine makes a pass."""


class PacedEngine(Engine):
    """Computes the same, later."""

    folder: Path

    def step(self) -> list[Event]:
        """A pause, then a step."""
        time.sleep(PACE_S)
        while (self.folder / HOLD_FILE).exists():
            time.sleep(PACE_S)
        return super().step()


def paced_engine(path: Path, config: EngineConfig, *, recorder: Recorder) -> AsyncEngine:
    """As AsyncEngine.from_checkpoint; importable, so that Ray's workers find it."""
    engine = PacedEngine.from_checkpoint(path, config, recorder=recorder)
    engine.folder = Path(path)
    return AsyncEngine(engine)


def build_paced_app(args: AppConfig) -> Application:
    """As `serve_app.app:build_app`."""
    return assemble(args, engine_factory=paced_engine)
