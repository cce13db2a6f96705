"""inspect-ai: an evaluation from its command line, through its provider for OpenAI-compatible servers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from checks import Checks
from inspect_ai.log import EvalLog, read_eval_log

checks = Checks("inspect-ai")
MAX_TOKENS = 40
TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, system_message

@task
def definitions():
    words = ["an animal with wings", "a plant with", "the act of"]
    samples = [Sample(input=word, target="a") for word in words]
    return Task(dataset=samples, solver=[system_message("Define words."), generate()], scorer=includes())
"""


def evaluate(name: str, *options: str) -> EvalLog:
    """Run the task as a person would, and read its log."""
    (Path(checks.scratch) / "definitions.py").write_text(TASK, encoding="utf-8")
    logs = Path(checks.scratch) / name
    command = [str(Path(sys.executable).with_name("inspect")), "eval", "definitions.py", "--log-dir", str(logs)]
    command += ["--model", f"openai-api/glassblock/{checks.model}", "--model-base-url", f"{checks.url}/v1"]
    command += ["-M", "api_key=none", "--seed", "7", "--max-tokens", str(MAX_TOKENS), "--log-format", "json"]
    command += ["--display", "plain", "--log-model-api", "--max-retries", "0", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=checks.scratch, check=False)
    files = sorted(logs.glob("*.json"))
    if done.returncode or len(files) != 1:
        raise RuntimeError(f"inspect ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
    return read_eval_log(str(files[0]))


def calls(log: EvalLog) -> list[tuple[dict, dict]]:
    """What was sent and what came back, of each sample."""
    events = [event for sample in log.samples or [] for event in sample.events if event.event == "model"]
    return [(event.call.request, event.call.response) for event in events]


def check_log(log: EvalLog, extra: dict) -> None:
    """The evaluation is complete, and its answers are what the server says to the same requests."""
    checks.equal(log.status, "success", "the evaluation ends well")
    checks.equal(len(log.samples or []), 3, "every sample has a result")
    usage = next(iter(log.stats.model_usage.values()))
    checks.equal(usage.output_tokens, 3 * MAX_TOKENS, "usage counts the tokens")
    for sample in log.samples or []:
        messages = [{"role": m.role, "content": m.text} for m in sample.messages[:-1]]
        body = {"model": checks.model, "messages": messages, "seed": 7, "max_tokens": MAX_TOKENS, **extra}
        own = checks.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
        checks.equal(sample.output.completion.strip(), own.strip(), "the sample's answer is the server's")
        checks.equal(sample.output.stop_reason, "max_tokens", "it knows that max_tokens ended it")
        right = "C" if "a" in own.lower() else "I"
        checks.equal((sample.scores or {})["includes"].value, right, "the score is that of the answer")


with checks.part("eval"):
    extra = {"ignore_eos": True, "diffusion": {"tokens_per_step": 4}}
    check_log(evaluate("plain", "--extra-body", json.dumps(extra)), extra)

with checks.part("eval with steering in --extra-body"):
    extra = {
        "ignore_eos": True,
        "diffusion": {"tokens_per_step": 4},
        "steering": {"concepts": ["animal"], "strength": 8},
    }
    log = evaluate("steered", "--extra-body", json.dumps(extra))
    check_log(log, extra)
    for sent, received in calls(log):
        checks.equal(sent.get("extra_body", sent).get("steering"), extra["steering"], "the steering was sent")
        name = received["steering"]["resolved"][0]["concepts"][0]["name"]
        checks.equal(name, "animal", "the log tells what was steered")

with checks.part("eval with log probabilities and streams"):
    log = evaluate(
        "logprobs", "--logprobs", "--top-logprobs", "2", "-M", "stream=true", "--extra-body", '{"ignore_eos": true}'
    )
    for sample in log.samples or []:
        found = sample.output.choices[0].logprobs
        checks.equal(found and len(found.content), MAX_TOKENS, "one entry a token, from a stream")

checks.finish()
