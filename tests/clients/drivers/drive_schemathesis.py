"""schemathesis: requests made from /openapi.json, right ones and wrong ones. None may be a 5xx, and every answer must
be as the schema says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from checks import Checks

checks = Checks("schemathesis")
EXAMPLES = 15
SEED = 1
HELD = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"

with checks.part(f"{EXAMPLES} examples of each operation"):
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{checks.url}/openapi.json"]
    command += [
        "--max-examples",
        str(EXAMPLES),
        "--seed",
        str(SEED),
        "--checks",
        HELD,
        "--phases",
        "examples,coverage,fuzzing",
    ]
    command += ["--request-timeout", "60", "--generation-database", "none", "--no-color", "--workers", "2"]
    hooks = {"SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": str(Path(__file__).parent)}
    environment = {**os.environ, **hooks}
    done = subprocess.run(command, capture_output=True, text=True, cwd=checks.scratch, env=environment, check=False)
    output = done.stdout + done.stderr
    failures = re.search(r"= FAILURES =.*(?== WARNINGS =|= SUMMARY =)|= ERRORS =.*", output, re.DOTALL)
    checks.that(done.returncode == 0, "schemathesis finds nothing", failures[0] if failures else output[-1200:])
    operations = len([1 for path in checks.get("/openapi.json")["paths"].values() for _ in path])
    found = re.search(r"Operations:\s*(\d+) selected / (\d+) total", output)
    checks.that(found is not None and found[1] == found[2] == str(operations), "every operation was tried", found)

checks.finish()
