"""aiperf: short profiles of chat, completions and embeddings, with the server's own metrics, from its command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from checks import Checks

checks = Checks("aiperf")
NUM_REQUESTS = 4
PROMPT_TOKENS = 20
OUTPUT_TOKENS = 30
# Offline, it takes a tokenizer from the hub's cache only; online, a folder is a folder, and nothing else is asked for.
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"} | {
    "HF_ENDPOINT": "http://127.0.0.1:9"
}


def profile(name: str, kind: str, *options: str) -> tuple[dict[str, Any], list[dict[str, Any]], Path]:
    """Run one as a person would: its summary, its records, and the folder of all it wrote."""
    folder = Path(checks.scratch) / name
    command = [str(Path(sys.executable).with_name("aiperf")), "profile", "--model", checks.model, "--url", checks.url]
    command += ["--endpoint-type", kind, "--tokenizer", checks.checkpoint, "--concurrency", "2"]
    command += ["--request-count", str(NUM_REQUESTS), "--synthetic-input-tokens-mean", str(PROMPT_TOKENS)]
    command += [
        "--use-server-token-count",
        "--artifact-dir",
        str(folder),
        "--ui",
        "none",
        "--random-seed",
        "1",
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=checks.scratch, env=ENVIRONMENT, check=False)
    summary, records = folder / "profile_export_aiperf.json", folder / "profile_export.jsonl"
    if done.returncode or not summary.is_file():
        raise RuntimeError(f"aiperf ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
    lines = records.read_text(encoding="utf-8").splitlines()
    return json.loads(summary.read_text(encoding="utf-8")), [json.loads(line) for line in lines], folder


def value(record: dict[str, Any], metric: str) -> Any:
    """A metric of one request."""
    return record["metrics"].get(metric, {}).get("value")


def check_requests(summary: dict[str, Any], records: list[dict[str, Any]]) -> None:
    """Every request was answered."""
    checks.equal(summary["request_count"]["avg"], NUM_REQUESTS, "all requests succeed")
    checks.that("error_request_count" not in summary or not summary["error_request_count"]["avg"], "none has an error")
    checks.equal(len(records), NUM_REQUESTS, "each has a record")
    checks.equal([record.get("error") for record in records], [None] * NUM_REQUESTS, "no record has an error")


generate = ("--streaming", "--output-tokens-mean", str(OUTPUT_TOKENS), "--extra-inputs", "ignore_eos:true")
for name, kind in (("completions", "completions"), ("chat completions", "chat")):
    with checks.part(name):
        summary, records, folder = profile(kind, kind, *generate)
        check_requests(summary, records)
        for record in records:
            checks.equal(value(record, "output_sequence_length"), OUTPUT_TOKENS, "the output has the tokens asked for")
            checks.equal(value(record, "usage_completion_tokens"), OUTPUT_TOKENS, "usage says the same")
            first, whole = value(record, "time_to_first_token"), value(record, "request_latency")
            checks.that(first is not None and 0 < first < whole, "the first token comes before the end", (first, whole))
        if kind == "completions":
            prompts = {value(record, "usage_prompt_tokens") for record in records}
            checks.equal(prompts, {PROMPT_TOKENS}, "the prompt has the tokens it was made of")

with checks.part("server metrics"):
    found = [file for file in folder.rglob("*server_metrics*") if file.stat().st_size]
    text = "".join(file.read_text(encoding="utf-8") for file in found)
    checks.that("glassblock" in text, "it gathered the server's metrics", [file.name for file in folder.rglob("*")])

with checks.part("embeddings"):
    summary, records, _ = profile("embeddings", "embeddings")
    check_requests(summary, records)

checks.finish()
