"""Plain HTTP to a server in a container."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any


def call(
    port: int, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float = 120
) -> tuple[int, bytes]:
    """One request; returns status and body, status 0 if nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        headers = {"content-type": "application/json"} if body is not None else {}
        content = json.dumps(body) if body is not None else None
        connection.request(method, path, content, headers)
        response = connection.getresponse()
        return response.status, response.read()
    except (ConnectionError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def stream(port: int, path: str, body: dict[str, Any], timeout_s: float = 120) -> Iterator[bytes]:
    """The ``data:`` of each event of a streamed answer, as it arrives."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", path, json.dumps({**body, "stream": True}), headers)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        for line in response:
            if line.startswith(b"data: "):
                yield line.removeprefix(b"data: ").strip()
    finally:
        connection.close()
