"""Listens to an answer on its way to the client, for those few that are compared afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from starlette.types import Message, Send

if TYPE_CHECKING:
    from taut_service.call import Call

MAX_BYTES = 256 * 1024
"""Of a request, and of an answer as sent; larger ones are not compared."""


class Heard(NamedTuple):
    """A request and its whole answer.

    Args:
        model: its public name.
        variant: that answered.
        path: the route's.
        body: of the request.
        answer: as the client got it.
    """

    model: str
    variant: str
    path: str
    body: bytes
    answer: bytes


class Tap:
    """Passes messages on and keeps a copy of the body.

    Args:
        body: of the request.
        send: the ASGI callable.
        done: gets what was heard, once; None in place of it if the answer became too large.
    """

    __slots__ = ("_body", "_done", "_pieces", "_send", "_size")

    def __init__(self, body: bytes, send: Send, done: Callable[[Heard | None], None]) -> None:
        self._body = body
        self._send = send
        self._done = done
        self._pieces: list[bytes] = []
        self._size = 0

    async def send(self, message: Message) -> None:
        """Pass a message on."""
        data = message.get("body")
        if data:
            self._size += len(data)
            if self._size <= MAX_BYTES:
                self._pieces.append(data)
            else:
                self._pieces.clear()
        await self._send(message)

    def finish(self, call: Call) -> None:
        """Hand over what was heard, if the client got a whole answer."""
        if call.answer.status != 200:
            return
        if self._size > MAX_BYTES:
            self._done(None)
            return
        heard = b"".join(self._pieces)
        self._done(Heard(call.model, call.routed.variant, call.route.path, self._body, heard))
