"""What the gateway answers when it cannot answer with tokens, in OpenAI's error shape.

Every error a client can see is a :class:`GatewayError`; its class fixes the HTTP status and the
OpenAI ``type``::

    GatewayError                         500 api_error
    ├── RequestError                     400 invalid_request_error
    │   ├── UnauthorizedError            401   code invalid_api_key
    │   ├── ForbiddenError               403   code permission_denied
    │   ├── NotFoundError                404
    │   ├── MethodNotAllowedError        405
    │   ├── ConflictError                409
    │   ├── RequestTimeoutError          408   the client was too slow to send its body
    │   ├── BodyTooLargeError            413
    │   ├── BodyExpandsError             413   a compressed body out of proportion
    │   └── ContentCodingError           415   code unsupported_encoding
    ├── OverloadedError                  429 rate_limit_error, with Retry-After
    │   └── RateLimitedError             429   code rate_limit_exceeded, with x-ratelimit-*
    ├── UnavailableError                 503 service_unavailable_error, with Retry-After
    └── UpstreamFailureError             502 api_error
        └── UpstreamDeadlineError        504

Text that a worker wrote is never put into one of these: it may name paths, tensors and versions.
"""

from __future__ import annotations

import json
import math

Headers = list[tuple[bytes, bytes]]


class GatewayError(Exception):
    """An answer that is an error.

    Args:
        message: one sentence for the person who sent the request.
        param: the request field it is about, if one is.
        code: a stable machine-readable word, OpenAI's where OpenAI has one.
        retry_after_s: seconds after which trying again makes sense; rounded up, sent as
            ``Retry-After``.
    """

    status = 500
    kind = "api_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """Return the JSON of the error, UTF-8, without a line break."""
        detail = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return json.dumps({"error": detail}, separators=(",", ":")).encode()

    def headers(self) -> Headers:
        """Return the headers that belong to this error beyond type and length."""
        if self.retry_after_s is None:
            return []
        return [(b"retry-after", b"%d" % max(1, math.ceil(self.retry_after_s)))]


class RequestError(GatewayError):
    """The request is wrong and would be wrong again."""

    status = 400
    kind = "invalid_request_error"


class UnauthorizedError(RequestError):
    """The API key is missing, malformed or unknown."""

    status = 401

    def __init__(self, message: str) -> None:
        super().__init__(message, code="invalid_api_key")

    def headers(self) -> Headers:
        """Return the challenge RFC 9110 §11.6.1 asks for."""
        return [(b"www-authenticate", b"Bearer")]


class ForbiddenError(RequestError):
    """The API key is known and does not allow this.

    Args:
        message: what is not allowed.
        param: the request field it is about, if one is.
    """

    status = 403

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="permission_denied")


class NotFoundError(RequestError):
    """The model, the path or the feature does not exist here."""

    status = 404


class MethodNotAllowedError(RequestError):
    """The path exists but not with this method.

    Args:
        method: what was sent.
        allowed: what the path takes.
    """

    status = 405

    def __init__(self, method: str, allowed: str) -> None:
        super().__init__(f"method {method} is not allowed here, use {allowed}")
        self.allowed = allowed

    def headers(self) -> Headers:
        """Return ``Allow``."""
        return [(b"allow", self.allowed.encode())]


class ConflictError(RequestError):
    """The request is right, but not in the state that the gateway is in."""

    status = 409


class RequestTimeoutError(RequestError):
    """The body did not arrive in time."""

    status = 408


class BodyTooLargeError(RequestError):
    """The body is larger than ``limits.max_body_bytes``."""

    status = 413

    def __init__(self, max_body_bytes: int) -> None:
        super().__init__(
            f"the request body is larger than {max_body_bytes} bytes", code="request_too_large"
        )


class BodyExpandsError(RequestError):
    """The body is compressed beyond what an honest one is.

    Args:
        coding: of the body.
        ratio: most decoded bytes for each byte received.
    """

    status = 413

    def __init__(self, coding: str, ratio: int) -> None:
        super().__init__(
            f"the request body decodes to more than {ratio} times its size (Content-Encoding: "
            f"{coding}); send it without compression",
            code="request_too_large",
        )


class ContentCodingError(RequestError):
    """The body is compressed in a way that is not offered.

    Args:
        coding: value of ``Content-Encoding``.
        offered: codings that are.
    """

    status = 415

    def __init__(self, coding: str, offered: tuple[str, ...] = ("gzip", "deflate", "zstd")) -> None:
        ways = f"one of {', '.join(offered)}, or no compression" if offered else "no compression"
        super().__init__(
            f"Content-Encoding {coding[:100]!r} is not offered: use {ways}",
            code="unsupported_encoding",
        )
        self.offered = offered

    def headers(self) -> Headers:
        """Return what is offered (RFC 9110 §15.5.16)."""
        return [(b"accept-encoding", ", ".join(self.offered or ("identity",)).encode())]


class OverloadedError(GatewayError):
    """More requests than the gateway is willing to hold."""

    status = 429
    kind = "rate_limit_error"


class RateLimitedError(OverloadedError):
    """The caller used up its requests or tokens of the minute.

    Args:
        message: which of them, and how much there is.
        retry_after_s: seconds until the same request would be let in.
        standing: the ``x-ratelimit-*`` headers.
    """

    def __init__(self, message: str, retry_after_s: float, standing: Headers) -> None:
        super().__init__(message, code="rate_limit_exceeded", retry_after_s=retry_after_s)
        self.standing = standing

    def headers(self) -> Headers:
        """Return ``Retry-After`` and where the caller stands."""
        return [*super().headers(), *self.standing]


class UnavailableError(GatewayError):
    """No worker can take the request now: none is ready, or the gateway is shutting down."""

    status = 503
    kind = "service_unavailable_error"


class UpstreamFailureError(GatewayError):
    """A worker took the request and failed."""

    status = 502


class UpstreamDeadlineError(UpstreamFailureError):
    """A worker took the request and did not answer in time."""

    status = 504
