"""The process that section `ready` starts: loads a checkpoint, makes an engine, serves a token, tells when.

    python -m load_tests.engine_sections.ready_probe CHECKPOINT OPTIONS

OPTIONS is EngineConfig as a JSON object. The last line of standard output is a JSON object of moments in seconds
since the epoch.
"""

from __future__ import annotations

import json
import sys
import time

import torch

from engine import Engine, EngineConfig
from engine.runner.model_runner import ModelRunner

from .load import Load, check


def main(arguments: list[str]) -> None:
    """Go through the stages."""
    moments = {"imported": time.time()}
    config = EngineConfig(**json.loads(arguments[1]))
    model = ModelRunner.load(arguments[0], config)
    _wait()
    moments["loaded"] = time.time()
    engine = Engine(model, config)
    _wait()
    moments["ready"] = time.time()
    load = Load(engine.model_config, (60, 250), (64, 256))
    request = load.request(load.tokens(0, 60), 1, 0)
    (output,) = engine.generate([request])
    moments["served"] = time.time()
    check(output, request)
    print(json.dumps(moments))


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1:])
