"""uvicorn's ``RequestResponseCycle`` and ASGI's scope, made for less than uvicorn makes them.

It sets attributes of uvicorn's class (no underscore, but no written contract either): whoever moves
uvicorn runs ``tests/service/test_client_exchange.py``.
"""

from __future__ import annotations

import logging
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from taut_service.call import ROUTES
from taut_service.http.request_head import Signal

_NOTHING = b""
_KNOWN = {route.path.encode(): route.path for route in ROUTES}
"""Targets that need no parser."""


class Cycle(RequestResponseCycle):
    """One request and its answer. What is the same for all at the beginning is the class's.

    Args:
        protocol: of the client's connection.
        scope: of ASGI.
        keep_alive: whether the connection stays.
    """

    logger = logging.getLogger("uvicorn.error")
    access_logger = logging.getLogger("uvicorn.access")
    access_log = False
    disconnected = False
    # Bytes where it came in one piece.
    body: Any = _NOTHING
    more_body = True
    response_started = False
    response_complete = False
    chunked_encoding: bool | None = None
    expected_content_length = 0

    def __init__(self, protocol: HttpToolsProtocol, scope: Any, *, keep_alive: bool) -> None:
        # Not the parent's, which sets three times as many attributes.
        self.scope = scope
        self.transport = protocol.transport
        self.flow = protocol.flow
        self.default_headers = protocol.server_state.default_headers
        self.message_event = Signal()  # type: ignore[assignment]
        self.on_response = protocol.on_response_complete
        self.keep_alive = keep_alive
        self.waiting_for_100_continue = protocol.expect_100_continue


def scope_of(protocol: HttpToolsProtocol, version: str) -> dict[str, Any]:
    """Return the scope of the request whose head a protocol has just read.

    Args:
        protocol: of the client's connection.
        version: of HTTP.

    Raises:
        httptools.HttpParserInvalidURLError: the target is none.
    """
    url = protocol.url
    raw_path, query, path = url, _NOTHING, _KNOWN.get(url)
    if path is None:
        target = httptools.parse_url(url)
        raw_path, query = target.path, target.query or _NOTHING
        path = raw_path.decode("ascii")
        if "%" in path:
            path = unquote(path)
    return {
        "type": "http",
        "asgi": {"version": protocol.asgi_version, "spec_version": "2.3"},
        "http_version": version,
        "method": protocol.parser.get_method().decode("ascii"),
        "server": protocol.server,
        "client": protocol.client,
        "scheme": protocol.scheme,
        "root_path": protocol.root_path,
        "path": path,
        "raw_path": raw_path,
        "query_string": query,
        "headers": protocol.headers,
        "state": protocol.app_state.copy(),
    }
