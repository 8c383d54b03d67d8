"""Reads and decodes request bodies, each within its limit and all within one."""

from __future__ import annotations

import asyncio

from starlette.types import Receive

from taut_service.admit.byte_budget import ByteBudget, HeldBytes
from taut_service.call import Call
from taut_service.config.settings import Settings
from taut_service.errors import BodyTooLargeError
from taut_service.http.content_coding import BodyDecoder, decoder_for
from taut_service.http.headers import RequestHeaders
from taut_service.http.request_watch import ClientDisconnectedError, RequestWatch


class Bodies:
    """Reads the bodies of all requests."""

    def __init__(self) -> None:
        self._budget = ByteBudget()

    async def read(
        self,
        call: Call,
        headers: RequestHeaders,
        receive: Receive,
        watch: RequestWatch,
        settings: Settings,
        arrived: bytes | None = None,
    ) -> bytes:
        """Return a whole body, counted as held by its request from now on.

        A body that announces more than the limit is refused before any of it is read; one that
        does not announce its length, as soon as it passes the limit; one that is compressed, as
        soon as it would. What follows is thrown away by the server, a buffer at a time, so the
        client can finish sending and read the answer.

        Args:
            call: gets what it holds.
            headers: of the request.
            receive: the ASGI callable.
            watch: of the request.
            settings: in force.
            arrived: the body as it was sent, if all of it is here.

        Raises:
            BodyTooLargeError: more than ``limits.max_body_bytes``.
            BodyExpandsError: compressed out of proportion.
            ContentCodingError: compressed in a way that is not offered.
            RequestError: compressed wrongly.
            OverloadedError: more than all requests together may hold.
            ClientDisconnectedError: the client left.
        """
        max_bytes, limit = settings.limits.max_body_bytes, settings.limits.max_inflight_bytes
        decoder = decoder_for(headers, max_bytes)
        announced = headers.content_length if arrived is None else len(arrived)
        if announced is not None and announced > max_bytes:
            raise BodyTooLargeError(max_bytes)
        call.admitted.held = held = self._budget.hold()
        if announced is not None and arrived is None:
            held.check_room(announced, limit)
        body = _Body(held, limit, max_bytes, decoder)
        if arrived is not None:
            await body.add(arrived)
            return body.whole()
        silence = watch.limit(settings.timeouts.idle_s)
        more = True
        try:
            while more:
                silence.restart()
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnectedError
                await body.add(message.get("body", b""))
                more = message.get("more_body", False)
        finally:
            silence.stop()
        return body.whole()


class _Body:
    """One body on its way in.

    Args:
        held: what its request holds.
        limit: of all requests together, in bytes.
        max_bytes: of this body.
        decoder: for one that is compressed.
    """

    def __init__(
        self, held: HeldBytes, limit: int, max_bytes: int, decoder: BodyDecoder | None
    ) -> None:
        self._held = held
        self._limit = limit
        self._max_bytes = max_bytes
        self._decoder = decoder
        self._pieces: list[bytes] = []
        self._size = 0

    async def add(self, data: bytes) -> None:
        """Take a piece as it was sent."""
        if self._decoder is None:
            self._keep(data)
            return
        for piece in self._decoder.feed(data):
            self._keep(piece)
            # Others get their turn: a little input may be much output.
            await asyncio.sleep(0)

    def whole(self) -> bytes:
        """Return all of it."""
        if self._decoder is not None:
            self._decoder.finish()
        pieces = self._pieces
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _keep(self, piece: bytes) -> None:
        self._held.add(len(piece), self._limit)
        self._size += len(piece)
        if self._size > self._max_bytes:
            raise BodyTooLargeError(self._max_bytes)
        self._pieces.append(piece)
