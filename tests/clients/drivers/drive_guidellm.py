"""guidellm: short benchmarks of chat, completions and embeddings, from its command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from checks import Checks

checks = Checks("guidellm")
NUM_REQUESTS = 4
PROMPT_TOKENS = 20
OUTPUT_TOKENS = 30


def benchmark(name: str, route: str, data: str) -> dict[str, Any]:
    """Run one as a person would, and read its report."""
    report = Path(checks.scratch) / f"{name}.json"
    command = [str(Path(sys.executable).with_name("guidellm")), "run"]
    command += ["--backend", f"kind=openai_http,target={checks.url},model={checks.model},request_format={route}"]
    command += ["--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
    command += ["--tokenizer", f"kind=hf_auto,model={checks.checkpoint}", "--data", f"kind=synthetic_text,{data}"]
    command += ["--output", f"kind=json,path={report}", "--disable-console-interactive"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=checks.scratch, check=False)
    if done.returncode or not report.is_file():
        raise RuntimeError(f"guidellm ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
    (result,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    found: dict[str, Any] = result
    return found


def check_totals(result: dict[str, Any]) -> None:
    """Every request was answered."""
    totals = result["metrics"]["request_totals"]
    checks.equal((totals["successful"], totals["errored"]), (NUM_REQUESTS, 0), "all requests succeed")
    errors = [request["error"] for request in result["requests"]["errored"]]
    checks.equal(errors, [], "no request has an error")


def check_generation(result: dict[str, Any]) -> None:
    """What it says of tokens and times is possible."""
    check_totals(result)
    for request in result["requests"]["successful"]:
        checks.equal(request["output_metrics"]["text_tokens"], OUTPUT_TOKENS, "the output has the tokens asked for")
        checks.that(request["output"].strip(), "there is text", request["output"])
        times = request["info"]["timings"]
        first, last = times["first_token_iteration"], times["last_token_iteration"]
        checks.that(times["request_start"] < first <= last <= times["request_end"], "its times are in order", times)
        checks.that(times["token_iterations"] > 1, "tokens arrive in pieces", times["token_iterations"])


both = f"prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"
with checks.part("completions"):
    result = benchmark("completions", "/v1/completions", both)
    check_generation(result)
    for request in result["requests"]["successful"]:
        checks.equal(request["input_metrics"]["text_tokens"], PROMPT_TOKENS, "the prompt has the tokens it was made of")

with checks.part("chat completions"):
    check_generation(benchmark("chat", "/v1/chat/completions", both))

with checks.part("embeddings"):
    check_totals(benchmark("embeddings", "/v1/embeddings", f"prompt_tokens={PROMPT_TOKENS}"))

checks.finish()
