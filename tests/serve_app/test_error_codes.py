"""The table of error codes against the source, the answers and the page."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

from serve_app.error_codes import ERROR_CODES
from serve_app.errors import ANSWERS, UNSUPPORTED_FIELD
from serve_app.router_client import _rejection
from serve_app.routing.messages import Rejected, RejectionReason

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "errors.md"


def in_the_source() -> dict[str, set[int]]:
    """Code -> statuses of every `ApiError(status, ..., code="...")` that is written out."""
    found: dict[str, set[int]] = defaultdict(set)
    for file in (ROOT / "serve_app").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "ApiError"):
                continue
            for keyword in node.keywords:
                if keyword.arg == "code":
                    for name in ast.walk(keyword.value):
                        if isinstance(name, ast.Constant) and isinstance(name.value, str):
                            status = node.args[0]
                            found[name.value] |= {status.value} if isinstance(status, ast.Constant) else set()
    return found


def sent() -> dict[str, set[int]]:
    """Code -> statuses, from all places that make errors."""
    found = in_the_source()
    for answer in ANSWERS.values():
        found[answer.code].add(answer.status)
    found[UNSUPPORTED_FIELD].add(400)
    found[RejectionReason.QUEUE_FULL.value].add(429)
    found[RejectionReason.TENANT_LIMIT.value].add(429)
    # Of HTTP itself: api.py names them in one table.
    for code, status in (("not_found", 404), ("method_not_allowed", 405), ("body_too_large", 413)):
        assert f'"{code}"' in (ROOT / "serve_app" / "api.py").read_text()
        found[code].add(status)
    return found


def test_every_code_that_is_sent_is_in_the_table_with_its_status_and_no_other_is():
    found = sent()
    assert found.keys() == ERROR_CODES.keys()
    for code, statuses in found.items():
        assert statuses == set(ERROR_CODES[code].status), code


def test_a_rejection_of_the_router_has_the_status_of_its_code():
    for reason in RejectionReason:
        error = _rejection(Rejected(request_id="r", reason=reason, retry_after_s=1.0, waited_s=0.0))
        assert error.status in ERROR_CODES[error.code].status


def test_the_page_shows_the_table():
    rows = re.findall(r"^\| `(\w+)` \| ([\d, ]+) \| (.*) \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    expected = [(code, ", ".join(map(str, row.status)), row.meaning) for code, row in ERROR_CODES.items()]
    assert rows == expected
