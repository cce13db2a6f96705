"""Everything the engine raises.

EngineError
|-- InvalidRequest        the caller's request; `param` names the field
|   |-- InvalidValue      a field is out of range
|   |-- PromptTooLong     prompt and max_tokens exceed the model's context
|   |-- RequestTooLarge   the request could never fit the page pool
|   |-- ConceptNotFound   no such concept id
|   `-- Unsupported       this checkpoint cannot do what was asked
|-- InvalidConfig         EngineConfig or config.json does not make sense
|-- CheckpointError       a tensor is missing, left over or of the wrong shape
|-- QueueFull             too many requests wait; try again later
|-- RequestFailed         a request that was running had to end
|   |-- NonFiniteLogits   the model produced infinities or NaN for it
|   `-- Aborted           the caller cancelled it
`-- EngineStopped         the engine shut down or its thread died
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of every error the engine raises on purpose."""


class InvalidRequest(EngineError, ValueError):
    """The request cannot be served as it stands.

    `param` is the path of the field at fault, for instance `sampling.top_p`, or None.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive the default pickling of exceptions.
        return _rebuild_invalid_request, (type(self), str(self), self.param)


def _rebuild_invalid_request(kind: type[InvalidRequest], message: str, param: str | None) -> InvalidRequest:
    return kind(message, param=param)


class InvalidValue(InvalidRequest):
    """A field's value is out of range."""


class PromptTooLong(InvalidRequest):
    """Prompt and max_tokens together exceed the model's context."""


class RequestTooLarge(InvalidRequest):
    """The request needs more pages than the engine has, even alone."""


class ConceptNotFound(InvalidRequest):
    """A concept id lies outside the head it names."""


class Unsupported(InvalidRequest):
    """The loaded checkpoint cannot do what the request asks."""


class InvalidConfig(EngineError, ValueError):
    """A configuration value is wrong, unknown or missing."""


class CheckpointError(EngineError, ValueError):
    """A checkpoint's files do not match its configuration."""


class QueueFull(EngineError):
    """The waiting queue is at its limit."""


class RequestFailed(EngineError):
    """A running request had to end without an answer."""


class NonFiniteLogits(RequestFailed):
    """The model produced a non-finite logit for this request."""


class Aborted(RequestFailed):
    """The caller cancelled the request."""


class EngineStopped(EngineError):
    """The engine no longer runs."""
