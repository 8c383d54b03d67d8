"""In which shape a route tells its errors: OpenAI's, OpenAI's Responses events, or Anthropic's.

An error is decided once, as a :class:`~taut_service.errors.GatewayError`; a dialect only writes
it down. Sources: OpenAI API reference, "Errors" and the Responses stream event ``error``;
Anthropic API reference, "Errors" and the Messages stream event ``error``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from taut_service.errors import GatewayError

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class Dialect(Protocol):
    """How errors are written, and where a stream's events name the model."""

    @property
    def holder(self) -> str:
        """The member of an event's object that holds ``model``; ``""`` for the object itself."""

    def body(self, error: GatewayError, request_id: bytes) -> bytes:
        """Return an error as a whole JSON document."""

    def event(self, error: GatewayError, request_id: bytes, events_before: int) -> bytes:
        """Return an error as one server-sent event; ``events_before`` were sent already."""

    def worker_error(self, body: bytes, status: int, request_id: bytes) -> bytes:
        """Return a worker's own 4xx document in this shape; unchanged where it already is."""


@dataclass(frozen=True, slots=True)
class OpenAiDialect:
    """``{"error": {"message", "type", "param", "code"}}``, and the same after ``data:``."""

    holder: str = ""

    def body(self, error: GatewayError, request_id: bytes) -> bytes:
        """Return OpenAI's error object."""
        return error.body()

    def event(self, error: GatewayError, request_id: bytes, events_before: int) -> bytes:
        """Return the error object as an unnamed event, as vLLM does."""
        return b"data: %b\n\n" % error.body()

    def worker_error(self, body: bytes, status: int, request_id: bytes) -> bytes:
        """Return ``body``: workers speak OpenAI's shape."""
        return body


@dataclass(frozen=True, slots=True)
class ResponsesDialect(OpenAiDialect):
    """OpenAI's documents; within a stream the typed, numbered event ``error``."""

    holder: str = "response"

    def event(self, error: GatewayError, request_id: bytes, events_before: int) -> bytes:
        """Return ``event: error`` with the next sequence number."""
        document = {
            "type": "error",
            "code": error.code or error.kind,
            "message": error.message,
            "param": error.param,
            "sequence_number": events_before,
        }
        return b"event: error\ndata: %b\n\n" % _compact(document)


@dataclass(frozen=True, slots=True)
class AnthropicDialect:
    """``{"type": "error", "error": {"type", "message"}, "request_id"}``."""

    holder: str = "message"

    def body(self, error: GatewayError, request_id: bytes) -> bytes:
        """Return Anthropic's error object; the field at fault is named in the message."""
        message = error.message
        if error.param is not None and error.param not in message:
            message = f"{error.param}: {message}"
        return _anthropic(error.status, message, request_id)

    def event(self, error: GatewayError, request_id: bytes, events_before: int) -> bytes:
        """Return ``event: error``."""
        return b"event: error\ndata: %b\n\n" % self.body(error, request_id)

    def worker_error(self, body: bytes, status: int, request_id: bytes) -> bytes:
        """Rewrite vLLM's OpenAI-shaped refusals: its request validation knows no other shape."""
        try:
            document = json.loads(body)
        except (ValueError, RecursionError):
            document = None
        if isinstance(document, dict) and document.get("type") == "error":
            return body
        error = document.get("error") if isinstance(document, dict) else None
        message = error.get("message") if isinstance(error, dict) else None
        if not isinstance(message, str):
            message = f"the worker refused the request with status {status}"
        return _anthropic(status, message, request_id)


def _anthropic(status: int, message: str, request_id: bytes) -> bytes:
    default = "invalid_request_error" if status < 500 else "api_error"
    detail = {"type": _ANTHROPIC_TYPES.get(status, default), "message": message}
    return _compact({"type": "error", "error": detail, "request_id": request_id.decode("latin-1")})


def _compact(document: Mapping[str, object]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


OPENAI = OpenAiDialect()
RESPONSES = ResponsesDialect()
ANTHROPIC = AnthropicDialect()
