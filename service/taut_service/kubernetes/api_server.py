"""Requests to a Kubernetes API server, as the pod's own service account.

The token is read again for every request, since the kubelet replaces it before it expires; so is
the certificate authority for every connection.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast
from urllib.parse import urlsplit

from taut_service.config.settings import KubernetesApi, Timeouts
from taut_service.worker.connection import Connection
from taut_service.worker.upstream_errors import ConnectError, ConnectionLostError

CONNECT_S = 5.0
ANSWER_S = 30.0
WATCH_S = 300
"""Length of one watch in seconds, shorter than the limits of load balancers in between."""
WATCH_SLACK_S = 30.0
MAX_DOCUMENT_BYTES = 32 * 1024 * 1024
MAX_LINE_BYTES = 8 * 1024 * 1024
"""etcd holds objects of 1.5 MiB at most; JSON is larger than what it holds."""


class ApiStatusError(Exception):
    """The API server answered with an error.

    Args:
        status: HTTP status.
        detail: a few words from the answer.
    """

    def __init__(self, status: int, detail: str = "") -> None:
        super().__init__(f"the API server answered {status} {detail}".rstrip())
        self.status = status


class ApiServer:
    """Makes one connection a request; there is one request every few minutes.

    Args:
        settings: where the server is and where the service account's files are.

    Raises:
        ApiStatusError: from every request: the status is not 200, or 201 where an object is made.
        UpstreamError: likewise: the connection failed or broke.
        OSError: likewise: a file of the service account cannot be read.
        ValueError: likewise: the answer is not JSON, or it or a line of it is too long.
    """

    def __init__(self, settings: KubernetesApi) -> None:
        parts = urlsplit(settings.api_server)
        self._host = parts.hostname or ""
        self._port = parts.port or 443
        self._authority = parts.netloc
        self._account = settings.service_account
        self.watch_s = WATCH_S

    async def get(self, path: str) -> Any:
        """Return the parsed answer.

        Args:
            path: with query.
        """
        async with self._answer(path, ANSWER_S) as connection:
            return await _document(connection)

    async def create(self, path: str, document: Any) -> Any:
        """Make an object; return it as the server keeps it.

        Args:
            path: of the collection.
            document: the object.
        """
        body = json.dumps(document, allow_nan=False).encode()
        async with self._answer(path, ANSWER_S, body) as connection:
            return await _document(connection)

    async def lines(self, path: str) -> AsyncIterator[list[bytes]]:
        """Yield the whole lines of an answer that goes on, a list for each read.

        Args:
            path: with query.
        """
        rest = b""
        async with self._answer(path, self.watch_s + WATCH_SLACK_S) as connection:
            while data := await connection.read():
                *whole, rest = (rest + data).split(b"\n")
                if len(rest) > MAX_LINE_BYTES:
                    raise ValueError("a line of the watch is too long")
                if lines := [line for line in whole if line.strip()]:
                    yield lines

    @asynccontextmanager
    async def _answer(
        self, path: str, silence_s: float, body: bytes | None = None
    ) -> AsyncIterator[Connection]:
        """Send a GET, or a POST with a body, whose answer is to be 200 or 201."""
        context, token = await asyncio.to_thread(self._credentials)
        connection = await self._connect(context, silence_s)
        method, expected = ("GET", 200) if body is None else ("POST", 201)
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: {self._authority}\r\n"
            f"authorization: Bearer {token}\r\n"
            "accept: application/json\r\nuser-agent: taut-gateway\r\nconnection: close\r\n"
        )
        if body is not None:
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        try:
            await connection.exchange(f"{head}\r\n".encode(), body or b"")
            if connection.status != expected:
                raise ApiStatusError(connection.status, await _reason(connection))
            yield connection
        except ConnectionLostError as error:
            raise ConnectionLostError("the API server closed the connection") from error
        finally:
            connection.abort()

    def _credentials(self) -> tuple[ssl.SSLContext, str]:
        token = (self._account / "token").read_text(encoding="ascii").strip()
        authority = self._account / "ca.crt"
        try:
            return ssl.create_default_context(cafile=authority), token
        except ssl.SSLError as error:
            raise ValueError(f"{authority} is not a PEM certificate") from error

    async def _connect(self, context: ssl.SSLContext, silence_s: float) -> Connection:
        loop = asyncio.get_running_loop()
        times = Timeouts(connect_s=CONNECT_S, first_byte_s=ANSWER_S, idle_s=silence_s)
        try:
            async with asyncio.timeout(CONNECT_S):
                # A cast, since a connection does not inherit from asyncio's class.
                new = cast("Callable[[], Any]", lambda: Connection(lambda _: None, times))
                _, connection = await loop.create_connection(
                    new,
                    self._host,
                    self._port,
                    ssl=context,
                    server_hostname=self._host,
                )
        except TimeoutError as error:
            raise ConnectError(f"no connection within {CONNECT_S:g} s") from error
        except OSError as error:  # ssl.SSLError is one
            raise ConnectError(f"cannot reach {self._authority}: {error}") from error
        made: Connection = connection
        return made


async def _document(connection: Connection) -> Any:
    pieces = bytearray()
    while data := await connection.read():
        pieces += data
        if len(pieces) > MAX_DOCUMENT_BYTES:
            raise ValueError("the answer is too long")
    return json.loads(bytes(pieces))


async def _reason(connection: Connection) -> str:
    """Return the ``reason`` word of a Status object; the message may name objects and users."""
    try:
        status = json.loads(await connection.read())
    except ValueError:
        return ""
    return str(status.get("reason") or "")[:100] if isinstance(status, dict) else ""
