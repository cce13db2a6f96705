"""schemathesis: requests made from /openapi.json, right ones and wrong ones. None may be a 5xx, and every answer must
be as the schema says. Wrong ones are refused, and of each operation some right ones are answered.

Right requests are all answered, too, except where the operation knows more than its schema can say: these operations
are in schemathesis_hooks.BEYOND_SCHEMA. Left out are checks of methods that no operation has (GET of a path such as
/v1/concepts/inspect is one of /v1/concepts/{concept_id}, with an id that is none) and of headers (none is required).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from checks import Checks

checks = Checks("schemathesis")
EXAMPLES = 15
SEED = 1
HELD = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "positive_data_acceptance",
    "negative_data_rejection",
)
NEVER_ANSWERED = {
    "POST /v1/traces/replay": "a trace is a generation's, which nobody makes up; tests/serve_app/test_answer_models.py"
}
"""Operation -> why no request that is made up can be right, and where a right one is tried."""

ANSWERS = Path(checks.scratch) / "answers.txt"


def answers() -> Counter[tuple[str, bool]]:
    """How often an operation answered with success: right requests (True) and wrong ones (False)."""
    counted: Counter[tuple[str, bool]] = Counter()
    for line in ANSWERS.read_text(encoding="utf-8").splitlines():
        method, path, is_right, status = line.split(" ")
        counted[f"{method} {path}", is_right == "True"] += status.startswith("2")
    return counted


with checks.part(f"{EXAMPLES} examples of each operation"):
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{checks.url}/openapi.json"]
    command += [
        "--max-examples",
        str(EXAMPLES),
        "--seed",
        str(SEED),
        "--checks",
        ",".join(HELD),
        "--phases",
        "examples,coverage,fuzzing",
    ]
    # One worker: two have met in Hypothesis's cache of lambdas, which ends the run with an error of its own.
    command += ["--request-timeout", "60", "--generation-database", "none", "--no-color", "--workers", "1"]
    hooks = {
        "SCHEMATHESIS_HOOKS": "schemathesis_hooks",
        "PYTHONPATH": str(Path(__file__).parent),
        "GLASSBLOCK_ANSWERS": str(ANSWERS),
    }
    environment = {**os.environ, **hooks}
    done = subprocess.run(command, capture_output=True, text=True, cwd=checks.scratch, env=environment, check=False)
    output = done.stdout + done.stderr
    failures = re.search(r"= FAILURES =.*(?== WARNINGS =|= SUMMARY =)|= ERRORS =.*", output, re.DOTALL)
    checks.that(done.returncode == 0, "schemathesis finds nothing", failures[0] if failures else output[-1200:])
    operations = {
        f"{method.upper()} {path}"
        for path, methods in checks.get("/openapi.json")["paths"].items()
        for method in methods
    }
    found = re.search(r"Operations:\s*(\d+) selected / (\d+) total", output)
    is_all = found is not None and found[1] == found[2] == str(len(operations))
    checks.that(is_all, "every operation was tried", found)

with checks.part("each operation answers what is right"):
    # A server that refuses everything would be found in order by all checks above but one, and that has exceptions.
    succeeded = {operation for (operation, is_right), number in answers().items() if is_right and number}
    checks.equal(
        operations - succeeded, set(NEVER_ANSWERED), "all but these have answered a right request with success"
    )

checks.finish()
