"""Keeps generated requests short: what they ask for may be anything, but not hundreds of tokens on a CPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import schemathesis

MAX_TOKENS = 3


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Lower a right `max_tokens` that is high or left out. A wrong one stays wrong."""
    body = case.body
    if case.method.upper() != "POST" or not isinstance(body, dict) or not {"prompt", "messages", "request"} & set(body):
        return
    for target in (body, body.get("request")):
        if isinstance(target, dict) and {"prompt", "messages"} & set(target):
            asked = target.get("max_tokens")
            if asked is None or (isinstance(asked, int) and not isinstance(asked, bool) and asked > MAX_TOKENS):
                target["max_tokens"] = MAX_TOKENS
            if isinstance(target.get("max_completion_tokens"), int) and target["max_completion_tokens"] > MAX_TOKENS:
                target["max_completion_tokens"] = MAX_TOKENS


@schemathesis.hook
def after_call(context: Any, case: Any, response: Any) -> None:
    """Note the operation and what it answered."""
    line = f"{case.operation.method.upper()} {case.operation.path} {response.status_code}\n"
    # One write a line, to a file opened for appending: several workers note at once.
    with Path(os.environ["GLASSBLOCK_ANSWERS"]).open("a", encoding="utf-8") as answers:
        answers.write(line)
