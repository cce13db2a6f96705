"""Section `ready`: a fresh process, from its start until an engine can serve, with an empty and a filled cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from engine import EngineConfig
from engine.model.weights import save_checkpoint

from .bench import EIGHT_B, Bench
from .environment import ROOT
from .report import Section

TIMEOUT_S = 400


def ready(bench: Bench, section: Section) -> None:
    """Twice: the first process fills the compile cache that the second one finds."""
    with tempfile.TemporaryDirectory(prefix="bench_ready_") as folder:
        scratch = Path(folder)
        checkpoint = bench.checkpoint
        if checkpoint is None:
            section.say("writing a checkpoint of the model")
            checkpoint = scratch / "checkpoint"
            save_checkpoint(bench.model, EIGHT_B, checkpoint)
        cache = scratch / "cache"
        for name in ("cold", "warm"):
            section.say(f"{name} compile cache: starting a process")
            seconds = start(checkpoint, bench.engine_config(), cache)
            section.add("", compile_cache=name, **seconds)
    section.note("ready: from the start of the process until the engine has its graphs; then a first token is served")
    section.note("the checkpoint's files had just been written or read, so they came from the page cache, not the disk")


def start(checkpoint: Path, config: EngineConfig, cache: Path) -> dict[str, float]:
    """Seconds of the stages of one process that loads a checkpoint and serves a token."""
    options = asdict(config)
    options["compile_cache_dir"] = str(cache / "engine")
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "CUDA_CACHE_PATH": str(cache / "cuda"),
    }
    command = [sys.executable, "-m", "load_tests.engine_sections.ready_probe", str(checkpoint), json.dumps(options)]
    started = time.time()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT, env=environment, check=True
        )
    except subprocess.CalledProcessError as error:
        last_lines = " / ".join(error.stderr.strip().splitlines()[-3:])
        raise RuntimeError(f"the new process failed with status {error.returncode}: {last_lines}") from error
    stages = json.loads(done.stdout.splitlines()[-1])
    return {
        "ready_s": stages["ready"] - started,
        "imports_s": stages["imported"] - started,
        "loading_s": stages["loaded"] - stages["imported"],
        "engine_s": stages["ready"] - stages["loaded"],
        "first_token_s": stages["served"] - stages["ready"],
    }
