"""Keeps the answers of those few requests that are compared afterwards, as they pass.

The relay tells a tap what it has written to the client. The tap keeps references to these bytes,
which are there anyway: a request that is drawn takes the very way of all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

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
        answer: as the client got it, in pieces.
    """

    model: str
    variant: str
    path: str
    body: bytes
    answer: Sequence[bytes]


class Tap:
    """Listens to one answer.

    Args:
        body: of the request.
        done: gets what was heard, once; None in place of it if request or answer is too large.
    """

    __slots__ = ("_body", "_done", "_pieces", "_size")

    def __init__(self, body: bytes, done: Callable[[Heard | None], None]) -> None:
        self._body = body
        self._done = done
        self._pieces: list[bytes] = []
        self._size = 0

    def hear(self, data: bytes) -> None:
        """Keep the next bytes of the answer."""
        self._size += len(data)
        if self._size <= MAX_BYTES:
            self._pieces.append(data)
        else:
            self._pieces.clear()

    def finish(self, call: Call) -> None:
        """Hand over what was heard, if the client got a whole answer."""
        if call.answer.status != 200:
            return
        if self._size > MAX_BYTES or len(self._body) > MAX_BYTES:
            self._done(None)
            return
        variant, path = call.routed.variant, call.route.path
        self._done(Heard(call.model, variant, path, self._body, self._pieces))
