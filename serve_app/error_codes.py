"""Every `code` that an answer's error may have: its status and what it means. `docs/errors.md` shows it; tests hold it.

Knows nothing of where errors come from.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ErrorCode:
    """One code."""

    status: tuple[int, ...]
    """Statuses that it comes with; those of errors within a stream are what a plain answer would have."""
    meaning: str
    """What is wrong, and what to do."""


ERROR_CODES: dict[str, ErrorCode] = {
    "invalid_value": ErrorCode(
        (400,), "A field, parameter or header has a value that it cannot have; `param` names it."
    ),
    "unsupported_field": ErrorCode((400,), "A field is known and not served here; leave it out."),
    "attribution_unsupported": ErrorCode(
        (400,), "This checkpoint or this server cannot explain what was asked for; `message` says why."
    ),
    "context_length_exceeded": ErrorCode((400,), "Prompt and `max_tokens`, or a text, do not fit; shorten them."),
    "concept_not_found": ErrorCode((400, 404), "No concept has the id or label: 404 in a path, 400 in a body."),
    "concept_not_steerable": ErrorCode((400,), "The concept is no one to steer by; see `/v1/concepts?steerable=true`."),
    "preset_not_found": ErrorCode((404,), "No preset, or no version of it, is called that."),
    "preset_incompatible": ErrorCode(
        (400,), "The preset was made for a checkpoint with other concepts; post it again."
    ),
    "limit_exceeded": ErrorCode((400,), "No more presets or versions fit, or one is too large."),
    "chat_template_missing": ErrorCode((400,), "The checkpoint continues text and was not made for conversations."),
    "invalid_api_key": ErrorCode((401,), "The server asks for an API key and this is none of its own."),
    "model_not_found": ErrorCode((404,), "Another model is served; see `/v1/models`."),
    "not_found": ErrorCode((404,), "There is no such path."),
    "method_not_allowed": ErrorCode((405,), "The path knows other methods."),
    "deadline_exceeded": ErrorCode((408,), "No replica was free within `x-queue-timeout-seconds`."),
    "body_too_large": ErrorCode((413,), "The body exceeds `max_body_bytes`."),
    "unsupported_media_type": ErrorCode((415,), "Bodies are JSON in UTF-8 without an encoding, and say so."),
    "queue_full": ErrorCode((429,), "Too many requests wait; `retry-after` says when to come again."),
    "tenant_limit": ErrorCode((429,), "Too many requests of this API key wait; `retry-after` says when to come again."),
    "internal_error": ErrorCode((500,), "A defect of the server; its log has the details."),
    "generation_failed": ErrorCode((500,), "The engine could not go on with this request."),
    "non_finite_logits": ErrorCode((500,), "The model gave no finite logits, perhaps from too strong steering."),
    "generation_aborted": ErrorCode((503,), "The request was cancelled in the server; try again."),
    "engine_unavailable": ErrorCode((503,), "The replica is gone, or none has room; try again."),
    "not_ready": ErrorCode((503,), "No replica is ready yet; try again."),
    "presets_unavailable": ErrorCode((503,), "The folder of the presets cannot be written."),
    "analysis_timeout": ErrorCode((504,), "An analysis took longer than `analysis_timeout_s`; ask for less."),
}
