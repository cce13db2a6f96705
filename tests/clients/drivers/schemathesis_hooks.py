"""What the generated requests need to be answered within the tests' time, and notes of what they were answered.

Keeps them short: what they ask for may be anything, but not hundreds of tokens on a CPU. Gives a text to routes that
take no empty one, which their schema does not say, so that some of their requests are right.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import schemathesis

MAX_TOKENS = 3
MAX_SAMPLES = 2

BEYOND_SCHEMA = {
    "DELETE /v1/steering/presets/{preset_id}": "a version may stand in the path or in the query, not in both",
    "GET /v1/steering/presets/{preset_id}": "likewise",
    "POST /detokenize": "ids lie within the vocabulary",
    "POST /tokenize": "either prompt or messages",
    "POST /v1/attributions/input": "either a request or a trace; the request's own rules; targets within its text",
    "POST /v1/chat/completions": "roles, counts and options that fit each other and the checkpoint",
    "POST /v1/completions": "prompts within the context, ids within the vocabulary, options that fit each other",
    "POST /v1/concepts/inspect": "not empty; ids within the vocabulary",
    "POST /v1/embeddings": "not empty; ids within the vocabulary; dimensions of the model and no other",
    "POST /v1/likelihoods": "not empty; ids within the vocabulary",
    "POST /v1/steering/presets": "concepts that exist; something to steer by; names without some characters",
    "POST /v1/traces/replay": "a trace that a generation could have had",
}
"""Operations that refuse some requests which are right by their schema -> for what it cannot say."""


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Lower right numbers that are high or left out, and fill right texts that are empty. What is wrong stays wrong."""
    body = case.body
    if case.method.upper() != "POST" or not isinstance(body, dict):
        return
    for target in (body, body.get("request")):
        if isinstance(target, dict) and {"prompt", "messages"} & set(target) and "continuation" not in target:
            _limit(target, "max_tokens", MAX_TOKENS)
            if isinstance(target.get("max_completion_tokens"), int):
                _limit(target, "max_completion_tokens", MAX_TOKENS)
    for name in ("input", "continuation"):
        if body.get(name) == "":
            body[name] = "a sea"
    if "continuation" in body:
        _limit(body, "num_samples", MAX_SAMPLES)
    if _is_int(body.get("dimensions")) and body["dimensions"] > 0:
        body["dimensions"] = None


@schemathesis.hook
def after_call(context: Any, case: Any, response: Any) -> None:
    """Note the operation, whether the request was right by its schema, and what it answered."""
    is_right = case.meta is not None and case.meta.generation.mode.is_positive
    line = f"{case.operation.method.upper()} {case.operation.path} {is_right} {response.status_code}\n"
    with Path(os.environ["GLASSBLOCK_ANSWERS"]).open("a", encoding="utf-8") as answers:
        answers.write(line)


@schemathesis.hook
def filter_failure(context: Any, failure: Any, case: Any, response: Any) -> bool:
    """Pass over refusals of right requests by operations that know more than their schema says."""
    is_refusal = type(failure).__name__ == "RejectedPositiveData"
    return not (is_refusal and f"{case.operation.method.upper()} {case.operation.path}" in BEYOND_SCHEMA)


def _limit(target: dict[str, Any], name: str, most: int) -> None:
    asked = target.get(name)
    if asked is None or (_is_int(asked) and asked > most):
        target[name] = most


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
