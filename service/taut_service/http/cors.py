"""Answers browsers that ask for pages of other origins. Source: WHATWG Fetch, "CORS protocol".

A preflight carries no key, so it is answered before keys are looked at. All other answers, errors
and streams included, carry the headers without which a browser keeps them from the page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.types import Scope

from taut_service.config.settings.cors import ANY, Cors
from taut_service.errors import Headers

if TYPE_CHECKING:
    from taut_service.http.client_exchange import ClientExchange

_METHODS = b"GET, HEAD, POST"
_EXPOSED = b", ".join(
    (
        b"x-request-id, x-taut-worker, x-taut-variant, retry-after",
        b"x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests",
        b"x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens",
    )
)
_ASKED_METHOD = b"access-control-request-method"
_ASKED_HEADERS = b"access-control-request-headers"


def header(headers: Headers, wanted: bytes) -> bytes | None:
    """Return the first value of a header, None without it."""
    return next((value for name, value in headers if name == wanted), None)


def allowing(cors: Cors, origin: bytes) -> Headers:
    """Return what every answer to a page says.

    Args:
        cors: the rules.
        origin: of the page.

    Returns:
        Headers; a page that may not read the answer gets ``Vary`` only.
    """
    vary = (b"vary", b"origin")
    if ANY in cors.origins:
        return [
            (b"access-control-allow-origin", b"*"),
            (b"access-control-expose-headers", _EXPOSED),
        ]
    if origin.decode("latin-1") not in cors.origins:
        return [vary]
    found = [
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", _EXPOSED),
        vary,
    ]
    if cors.credentials:
        found.append((b"access-control-allow-credentials", b"true"))
    return found


def preflight(cors: Cors, headers: Headers) -> Headers | None:
    """Return what answers a preflight beside :func:`allowing`; None if the request is none.

    Args:
        cors: the rules.
        headers: of an OPTIONS request.
    """
    if header(headers, _ASKED_METHOD) is None:
        return None
    asked = header(headers, _ASKED_HEADERS) or b""
    allowed = asked if ANY in cors.headers else ", ".join(cors.headers).encode()
    found = [
        (b"access-control-allow-methods", _METHODS),
        (b"access-control-max-age", b"%d" % cors.max_age_s),
        (b"content-length", b"0"),
    ]
    if allowed:
        found.append((b"access-control-allow-headers", allowed))
    return found


def answer_page(cors: Cors, scope: Scope, exchange: ClientExchange | None) -> Headers | None:
    """Do what a request of a web page needs before anything else.

    Args:
        cors: the rules.
        scope: of the request.
        exchange: every answer on it says who may read it from now on. Without one the server is
            not the gateway's own, and pages are not let in.

    Returns:
        The headers of the answer to a preflight, None for any other request.
    """
    headers = scope["headers"]
    origin = header(headers, b"origin")
    if origin is None or exchange is None:
        return None
    cycle = exchange.cycle
    cycle.default_headers = [*cycle.default_headers, *allowing(cors, origin)]
    return preflight(cors, headers) if scope["method"] == "OPTIONS" else None
