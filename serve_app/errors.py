"""From exceptions to HTTP errors, in one table.

Whatever goes wrong becomes an `ApiError`, and its body is OpenAI's: `{"error": {"message", "type", "param", "code"}}`.
An engine error raised in a replica arrives through Ray either as itself or wrapped in a class that derives from both
Ray's error and its own; the table is looked up along the class's MRO, so both find their row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from engine import (
    Aborted,
    CheckpointError,
    ConceptNotFound,
    EngineError,
    EngineStopped,
    InvalidConfig,
    InvalidRequest,
    InvalidValue,
    NonFiniteLogits,
    PromptTooLong,
    QueueFull,
    RequestFailed,
    RequestTooLarge,
    Unsupported,
)

INVALID_REQUEST = "invalid_request_error"
RATE_LIMIT = "rate_limit_error"
SERVER_ERROR = "server_error"
UNSUPPORTED_FIELD = "unsupported_field"
"""Also the pydantic error type by which schemas refuse a field that exists but is not served."""


MAX_TEXT_LENGTH = 1000
"""Messages repeat what the request held; no further than this."""
_MOST_SHOWN = 80
"""Characters of one value in a message."""


class ApiError(Exception):
    """An answer other than success: status, OpenAI's error fields, and when to try again."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        type: str = INVALID_REQUEST,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.type = type
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The JSON body, safe to encode whatever text the request held."""
        message, param = _encodable(self.message), None if self.param is None else _encodable(self.param)
        return {"error": {"message": message, "type": self.type, "param": param, "code": self.code}}

    def with_param(self, param: str) -> ApiError:
        """The same, of another field."""
        return ApiError(
            self.status,
            self.message,
            code=self.code,
            type=self.type,
            param=param,
            retry_after_s=self.retry_after_s,
        )

    def headers(self) -> dict[str, str]:
        """Headers that go with it."""
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}


_TEXT_OR_NULL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
ERROR_RESPONSE: dict[str, Any] = {
    "description": "Any error. `param` is the path of the field at fault.",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "properties": {
                    "error": {
                        "type": "object",
                        "properties": {
                            "message": {"type": "string"},
                            "type": {"type": "string"},
                            "param": _TEXT_OR_NULL,
                            "code": {"type": "string"},
                        },
                    }
                },
            }
        }
    },
}
"""What `ApiError.body` looks like, as OpenAPI says it."""


class ClientDisconnected(Exception):
    """The client left before its answer was ready; nobody reads what is sent now."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a class of exceptions is answered with."""

    status: int
    type: str
    code: str
    retry_after_s: int | None = None
    message: str | None = None
    """Said instead of the exception's own text, where that is not meant for clients."""


_INTERNAL = Answer(500, SERVER_ERROR, "internal_error", message="internal error; the server's log has the details")
_UNAVAILABLE = Answer(
    503,
    SERVER_ERROR,
    "engine_unavailable",
    retry_after_s=2,
    message="the engine that had this request is gone; try again shortly",
)

ANSWERS: Mapping[type[Exception], Answer] = {
    InvalidRequest: Answer(400, INVALID_REQUEST, "invalid_value"),
    InvalidValue: Answer(400, INVALID_REQUEST, "invalid_value"),
    PromptTooLong: Answer(400, INVALID_REQUEST, "context_length_exceeded"),
    RequestTooLarge: Answer(400, INVALID_REQUEST, "context_length_exceeded"),
    ConceptNotFound: Answer(400, INVALID_REQUEST, "concept_not_found"),
    Unsupported: Answer(400, INVALID_REQUEST, UNSUPPORTED_FIELD),
    QueueFull: Answer(429, RATE_LIMIT, "queue_full", retry_after_s=1),
    RequestFailed: Answer(500, SERVER_ERROR, "generation_failed"),
    NonFiniteLogits: Answer(500, SERVER_ERROR, "non_finite_logits"),
    Aborted: Answer(503, SERVER_ERROR, "generation_aborted", retry_after_s=1),
    EngineStopped: _UNAVAILABLE,
    InvalidConfig: _INTERNAL,
    CheckpointError: _INTERNAL,
    EngineError: _INTERNAL,
    BackPressureError: Answer(
        429, RATE_LIMIT, "queue_full", retry_after_s=1, message="too many requests wait; try again shortly"
    ),
    DeploymentUnavailableError: _UNAVAILABLE,
    RayActorError: _UNAVAILABLE,
}
"""One row an exception class; the most derived class with a row decides."""
KNOWN_ERRORS: tuple[type[Exception], ...] = tuple(ANSWERS)
"""For `except` clauses that pass errors on as ApiErrors."""


def to_api_error(error: Exception) -> ApiError:
    """The HTTP form of any exception; 500 without details for one that nobody expected."""
    if isinstance(error, ApiError):
        return error
    answer = next((ANSWERS[kind] for kind in type(error).__mro__ if kind in ANSWERS), _INTERNAL)
    original = error.cause if isinstance(error, RayTaskError) else error
    param = original.param if isinstance(original, InvalidRequest) else None
    return ApiError(
        answer.status,
        answer.message or str(original),
        code=answer.code,
        type=answer.type,
        param=http_param(param),
        retry_after_s=answer.retry_after_s,
    )


TOLD_ERRORS: tuple[type[Exception], ...] = (ApiError, *KNOWN_ERRORS)
"""The same, and those that have their form already: for whoever tells an error in other words."""


@contextmanager
def told_as(**names: str) -> Iterator[None]:
    """Have errors name a field as the body has it: `names` are the body's, by the engine's."""
    try:
        yield
    except TOLD_ERRORS as error:
        known = to_api_error(error)
        if known.param not in names:
            raise
        # The engine's sentences begin with the field's name.
        known.message = re.sub(rf"^{re.escape(known.param)}\b", names[known.param], known.message)
        raise known.with_param(names[known.param]) from error


def is_expected(error: Exception) -> bool:
    """True for an exception that the table knows; the others deserve a line in the log."""
    return isinstance(error, ApiError) or any(kind in ANSWERS for kind in type(error).__mro__)


def from_validation(errors: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """The 400 for what pydantic or FastAPI found wrong.

    `errors` is non-empty, as `ValidationError.errors()` gives it; `body` is the JSON that was validated. A field that
    is not served comes before a bad value, since mending the value would not help.
    """
    # A misspelt key also leaves the right one missing: name what is there before what is not.
    order = (UNSUPPORTED_FIELD, "extra_forbidden")
    error = min(errors, key=lambda error: order.index(error["type"]) if error["type"] in order else len(order))
    param = _path(error, body)
    code = UNSUPPORTED_FIELD if error["type"] == UNSUPPORTED_FIELD else "invalid_value"
    return ApiError(400, _complaint(error, param), code=code, param=param or None)


_RULE = "Input should be "
"""How pydantic begins to say what a value has to be; it does not say what the value was."""


_COUNT = re.compile(r"List should have at (most|least) (\d+) items? after validation, not (\d+)$")


def _complaint(error: Mapping[str, Any], param: str) -> str:
    """What is wrong with which field, and with which value of it."""
    message = str(error["msg"]).removeprefix("Value error, ")
    if (count := _COUNT.match(message)) is not None:
        return f"{param or 'the body'} has {count[3]} items; at {count[1]} {count[2]}"
    if message.startswith(_RULE) and "input" in error:
        return f"{param or 'the body'} is {_shown(error['input'])}; it must be {message.removeprefix(_RULE)}"
    if error["type"] == "missing":
        return f"{param or 'the body'} is missing"
    if error["type"] == "extra_forbidden":
        message = "unknown field"
    elif error["type"] == "json_invalid":
        message = f"the body is not valid JSON: {error.get('ctx', {}).get('error', message)}"
    return f"{param}: {message}" if param else message


def _shown(value: object) -> str:
    """A value of a request as JSON has it, cut where it is long."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "a list"
    text = json.dumps(value, default=repr)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def from_unreadable(cause: BaseException | None, content_encoding: str) -> ApiError:
    """The answer for a body that could not even be read as JSON, which failed with `cause`."""
    if content_encoding not in ("", "identity"):
        message = f"content-encoding is {content_encoding!r}; send the body without one"
        return ApiError(415, message, code="unsupported_media_type")
    if isinstance(cause, UnicodeDecodeError):
        message = f"the body is not UTF-8: byte {cause.object[cause.start]:#04x} at offset {cause.start}"
    elif isinstance(cause, RecursionError):
        message = "the body is nested too deeply"
    else:
        message = "the body cannot be read as JSON; a whole number in it may have too many digits"
    return ApiError(400, message, code="invalid_value")


def _path(error: Mapping[str, Any], body: Any) -> str:
    """`steering.interventions[0].strength` for pydantic's location, without the names of union branches."""
    source, *location = error["loc"]
    if source != "body":
        return ".".join(str(part) for part in location)
    path, value = "", body
    for i, part in enumerate(location):
        is_last = i + 1 == len(location)
        if isinstance(value, list) and isinstance(part, int):
            path += f"[{part}]"
            value = value[part] if part < len(value) else None
        elif isinstance(value, dict) and (part in value or (is_last and error["type"] == "missing")):
            path += f".{part}" if path else str(part)
            value = value.get(part)
    # A check of an object as a whole may still know which of its fields is at fault.
    field = error.get("ctx", {}).get("field")
    return path if field is None else f"{path}.{field}".lstrip(".")


_IN_DIFFUSION = ("policy", "tokens_per_step", "threshold", "factor", "entropy_bound", "cfg_scale")
_PARAMS = {"prompt_token_ids": "prompt"} | {f"sampling.{name}": f"diffusion.{name}" for name in _IN_DIFFUSION}


def http_param(param: str | None) -> str | None:
    """The engine's name of a field -> the API's."""
    return None if param is None else _PARAMS.get(param, param.removeprefix("sampling."))


def _encodable(text: str) -> str:
    # A JSON string may hold half of a surrogate pair, which no encoding of an answer can carry.
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= MAX_TEXT_LENGTH else text[:MAX_TEXT_LENGTH] + "..."
