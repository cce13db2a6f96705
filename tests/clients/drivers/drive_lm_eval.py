"""lm-eval's `local-completions`: multiple choice, generation and whole texts, from its command line and its API.

It finds the tokenizer by itself: /tokenizer_info and /tokenize.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from checks import Checks

checks = Checks("lm-eval")
SOURCE = Path(__file__).with_name("lm_eval_tasks")
TASKS = Path(checks.scratch) / "tasks"
SEED = 1234
MAX_TOKENS = 24


def read(name: str) -> list[dict[str, Any]]:
    """The documents of a task."""
    return [json.loads(line) for line in (SOURCE / name).read_text(encoding="utf-8").splitlines()]


def score(ids: list[int], num_given: int) -> tuple[float, bool]:
    """The log-likelihood of all but the first ids, by a plain request, and whether each is the likeliest."""
    body = {"model": checks.model, "prompt": ids, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
    table = checks.post("/v1/completions", body)["choices"][0]["logprobs"]
    logprobs = table["token_logprobs"][num_given : len(ids)]
    tops = table["top_logprobs"][num_given : len(ids)]
    return sum(logprobs), all(p == max(top.values()) for p, top in zip(logprobs, tops, strict=True))


def ending(beginning: str) -> str:
    """What the server writes after a beginning, up to the end of the line."""
    body = {"model": checks.model, "prompt": checks.tokenize(beginning), "max_tokens": MAX_TOKENS, "temperature": 0}
    text: str = checks.post("/v1/completions", body | {"stop": ["\n"], "seed": SEED})["choices"][0]["text"]
    return text


def write_tasks(endings: list[dict[str, Any]]) -> None:
    """The tasks in a folder of the client's, with absolute paths to their documents."""
    shutil.copytree(SOURCE, TASKS)
    (TASKS / "endings.jsonl").write_text("\n".join(map(json.dumps, endings)), encoding="utf-8")
    for file in TASKS.glob("*.yaml"):
        text = file.read_text(encoding="utf-8")
        for documents in TASKS.glob("*.jsonl"):
            text = text.replace(f" {documents.name}", f" {documents}")
        file.write_text(text, encoding="utf-8")


def evaluate(name: str, batch: int, *options: str) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """Run all tasks as a person would: their results, and what was asked and answered."""
    folder = Path(checks.scratch) / name
    arguments = [f"model={checks.model}", f"base_url={checks.url}/v1/completions", "max_length=1024", *options]
    command = [str(Path(sys.executable).with_name("lm_eval")), "run", "--model", "local-completions"]
    command += ["--model_args", ",".join(arguments), "--tasks", ",".join(sorted(expected)), "--batch_size", str(batch)]
    command += ["--include_path", str(TASKS), "--output_path", str(folder), "--log_samples"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=checks.scratch, check=False)
    summaries = list(folder.rglob("results_*.json"))
    if done.returncode or len(summaries) != 1:
        raise RuntimeError(f"lm_eval ended with {done.returncode}: {(done.stdout + done.stderr)[-2500:]}")
    samples = {
        task: [json.loads(line) for line in next(folder.rglob(f"samples_{task}_*.jsonl")).open(encoding="utf-8")]
        for task in expected
    }
    checks.that("Remote tokenizer not supported" not in done.stdout + done.stderr, "it uses the server's tokenizer")
    return json.loads(summaries[0].read_text(encoding="utf-8"))["results"], samples


def check_results(results: dict[str, Any], samples: dict[str, list[dict[str, Any]]]) -> None:
    """Its results are those that plain requests give."""
    for task, wanted in expected.items():
        for metric, value in wanted.items():
            seen = results[task][f"{metric},none"]
            checks.that(math.isclose(seen, value, rel_tol=1e-4), f"{task}: {metric} is {value}", seen)
    for sample in samples["glassblock_choices"]:
        for (answer, *_), own in zip(sample["filtered_resps"], own_scores[sample["doc"]["beginning"]], strict=True):
            del _
            checks.that(math.isclose(float(answer), own[0], abs_tol=1e-3), f"a log-likelihood is {own[0]}", answer)
    for sample in samples["glassblock_endings"]:
        own_text = own_endings[sample["doc"]["beginning"]]
        checks.equal(sample["resps"][0][0], own_text, "a generated ending is the server's")


expected: dict[str, dict[str, float]] = {}
own_scores: dict[str, list[tuple[float, bool]]] = {}
own_endings: dict[str, str] = {}

with checks.part("plain requests, to compare with"):
    choices = read("choices.jsonl")
    right = right_by_length = 0
    for doc in choices:
        given = checks.tokenize(doc["beginning"])
        rows = []
        for text in doc["endings"]:
            ids = checks.tokenize(f"{doc['beginning']} {text}")
            checks.equal(ids[: len(given)], given, "a beginning's tokens begin the whole")
            rows.append(score(ids, len(given)))
        own_scores[doc["beginning"]] = rows
        sums = [row[0] for row in rows]
        by_length = [total / len(text) for total, text in zip(sums, doc["endings"], strict=True)]
        right += sums.index(max(sums)) == doc["right"]
        right_by_length += by_length.index(max(by_length)) == doc["right"]
    expected["glassblock_choices"] = {"acc": right / len(choices), "acc_norm": right_by_length / len(choices)}
    checks.that(right > len(choices) / 2, "the model prefers right endings", right)

    endings = read("endings.jsonl")
    for i, doc in enumerate(endings):
        own_endings[doc["beginning"]] = ending(doc["beginning"])
        doc["ending"] = own_endings[doc["beginning"]] if i % 2 else "something else"
    checks.that(all(text.strip() and "\n" not in text for text in own_endings.values()), "one line each", own_endings)
    expected["glassblock_endings"] = {"exact_match": 0.5}

    info = checks.get("/tokenizer_info")
    first = checks.tokenize(info.get("bos_token") or info["eos_token"])
    checks.equal(len(first), 1, "the token that begins a text is one id")
    texts = [doc["text"] for doc in read("texts.jsonl")]
    total = sum(score(first + checks.tokenize(text), 1)[0] for text in texts)
    num_bytes = sum(len(text.encode()) for text in texts)
    expected["glassblock_texts"] = {"bits_per_byte": -total / num_bytes / math.log(2)}
    write_tasks(endings)

with checks.part("one request after another"):
    check_results(*evaluate("single", 1))

with checks.part("batches of 3, two at once"):
    check_results(*evaluate("batched", 3, "num_concurrent=2"))

checks.finish()
