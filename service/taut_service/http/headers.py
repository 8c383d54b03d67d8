"""Which header goes where: hop-by-hop ends here, ids are checked, the rest passes as it came.

Source: RFC 9110 §7.6.1 for hop-by-hop fields.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from itertools import count
from typing import Final

from taut_service.errors import Headers, RequestError

REQUEST_ID: Final = b"x-request-id"
WORKER: Final = b"x-taut-worker"
VARIANT: Final = b"x-taut-variant"
PRIORITY: Final = b"x-taut-priority"
TIMEOUT: Final = b"x-request-timeout"

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# Replaced by ours; what is compressed has been decoded when it leaves here. Without
# accept-encoding the worker answers uncompressed, so that events and usage can be read in passing.
# vLLM answers 415 to any content type but JSON, and the body has been parsed as JSON.
_REPLACED_IN_REQUEST = frozenset(
    {
        b"host",
        b"content-encoding",
        b"content-length",
        b"content-type",
        b"expect",
        b"accept-encoding",
        REQUEST_ID,
        VARIANT,
        PRIORITY,
        TIMEOUT,
    }
)
# For this gateway or for what stands before it, never for a worker. The sessions and tokens of
# common identity proxies and clouds are among them.
_CREDENTIALS = frozenset(
    {
        b"anthropic-api-key",
        b"api-key",
        b"cf-access-jwt-assertion",
        b"cookie",
        b"cookie2",
        b"ocp-apim-subscription-key",
        b"openai-api-key",
        b"x-access-token",
        b"x-amz-security-token",
        b"x-amzn-oidc-accesstoken",
        b"x-amzn-oidc-data",
        b"x-api-key",
        b"x-auth-request-access-token",
        b"x-auth-token",
        b"x-forwarded-access-token",
        b"x-forwarded-authorization",
        b"x-goog-api-key",
        b"x-goog-iap-jwt-assertion",
    }
)
# vLLM allows every page to read its answers; which may read the gateway's is said by ``cors``.
_REPLACED_IN_RESPONSE = frozenset(
    {
        b"date",
        b"server",
        b"access-control-allow-origin",
        b"access-control-allow-credentials",
        b"access-control-expose-headers",
        REQUEST_ID,
        WORKER,
        VARIANT,
    }
)
_DROPPED_FROM_REQUEST: Final = _HOP_BY_HOP | _REPLACED_IN_REQUEST | _CREDENTIALS
_DROPPED_FROM_RESPONSE: Final = _HOP_BY_HOP | _REPLACED_IN_RESPONSE
_VALID_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")


class RequestIds:
    """Makes ids that no other gateway makes: a random prefix per object, then a count.

    A random number per request would cost a system call each.
    """

    def __init__(self) -> None:
        self._prefix = b"req-" + secrets.token_hex(6).encode()
        self._numbers = count()

    def next(self) -> bytes:
        """Return a new id of 28 characters."""
        return b"%b%012x" % (self._prefix, next(self._numbers))


class RequestHeaders:
    """The few headers the gateway acts on, and the rest for the worker; one pass over the list.

    Args:
        headers: names in lower case, as ASGI gives them.
        ids: for a request that brings no id, or no valid one.
    """

    __slots__ = (
        "_api_keys",
        "_lengths",
        "authorization",
        "content_coding",
        "content_length",
        "expects_continue",
        "passed_on",
        "priority",
        "request_id",
        "timeout",
        "variant",
    )

    def __init__(self, headers: Iterable[tuple[bytes, bytes]], ids: RequestIds) -> None:
        self.authorization: list[bytes] = []
        self.content_length: int | None = None
        self.content_coding: bytes | None = None
        self.expects_continue = False
        self.request_id = b""
        self.variant: bytes | None = None
        self.priority: bytes | None = None
        self.timeout: bytes | None = None
        self.passed_on: Headers = []
        self._lengths = 0
        listed: set[bytes] = set()
        self._api_keys: list[bytes] = []
        for name, value in headers:
            if name in _DROPPED_FROM_REQUEST:
                self._act_on(name, value, listed)
                continue
            if name == b"authorization":
                self.authorization.append(value)
            self.passed_on.append((name, value))
        if self._api_keys:
            self._merge_keys()
        if listed:
            self.passed_on = [item for item in self.passed_on if item[0] not in listed]
        if _VALID_ID.fullmatch(self.request_id) is None:
            self.request_id = ids.next()

    def _act_on(self, name: bytes, value: bytes, listed: set[bytes]) -> None:
        if name == b"content-length":
            self._lengths += 1
            self.content_length = int(value) if value.isdigit() else None
        elif name == REQUEST_ID:
            self.request_id = self.request_id or value
        elif name == VARIANT:
            self.variant = value
        elif name == PRIORITY:
            self.priority = value
        elif name == TIMEOUT:
            self.timeout = value
        elif name == b"expect":
            self.expects_continue = True
        elif name == b"x-api-key":
            self._api_keys.append(value)
        elif name == b"content-encoding":
            self._add_coding(value)
        elif name == b"connection":
            listed.update(token.strip().lower() for token in value.split(b","))

    def _add_coding(self, value: bytes) -> None:
        coding = value.strip().lower()
        if coding not in (b"", b"identity"):
            before = self.content_coding
            self.content_coding = coding if before is None else before + b", " + coding

    def _merge_keys(self) -> None:
        # Anthropic's clients send the key alone, under a name of its own; some send it both ways.
        first = self.authorization[0] if self.authorization else b""
        scheme, _, key = first.partition(b" ")
        named = key.strip() if scheme.lower() == b"bearer" else None
        self.authorization += [
            b"Bearer " + other for other in self._api_keys if other.strip() != named
        ]

    def check_framing(self) -> None:
        """Refuse what servers disagree about.

        Raises:
            RequestError: there is more than one ``Content-Length``.
        """
        # httptools refuses this already; a different server in front of the same application
        # might not.
        if self._lengths > 1:
            raise RequestError("the request has more than one Content-Length")

    def hide_authorization(self) -> None:
        """Keep the gateway's own keys from the workers."""
        self.passed_on = [item for item in self.passed_on if item[0] != b"authorization"]


def request_head(path: bytes, headers: RequestHeaders, length: int) -> bytes:
    """Write the head of a worker's request, up to but without ``Host`` and the empty line.

    Args:
        path: absolute path with query.
        headers: the client's.
        length: bytes of the body.

    Returns:
        Request line and header lines, each ended by CRLF.
    """
    lines = [b"POST %b HTTP/1.1" % path]
    lines += [b"%b: %b" % item for item in headers.passed_on]
    lines.append(
        b"content-type: application/json\r\ncontent-length: %d\r\nx-request-id: %b\r\n"
        % (length, headers.request_id)
    )
    return b"\r\n".join(lines)


def response_headers(headers: Headers, request_id: bytes, worker: bytes, variant: bytes) -> Headers:
    """Return a worker's response headers for the client.

    Args:
        headers: names in lower case.
        request_id: of this request.
        worker: the worker's name.
        variant: the name of its variant.

    Returns:
        End-to-end headers with ``x-request-id``, ``x-taut-worker`` and ``x-taut-variant``.
    """
    passed_on = [item for item in headers if item[0] not in _DROPPED_FROM_RESPONSE]
    passed_on.append((REQUEST_ID, request_id))
    passed_on.append((WORKER, worker))
    passed_on.append((VARIANT, variant))
    return passed_on
