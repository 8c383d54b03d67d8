"""The list that takes a message's trailers. A subclass of ``list``, which mypyc cannot compile."""

from __future__ import annotations

from taut_service.errors import Headers
from taut_service.http.framing import MAX_TRAILERS


class Trailers(Headers):
    """Takes trailers in the place of headers: counts them, keeps none, refuses too many.

    ``seen`` is set to 0 for each message.
    """

    __slots__ = ("seen",)

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def append(self, _: tuple[bytes, bytes]) -> None:
        """Drop one.

        Raises:
            ValueError: it is one too many; the parser makes an error of its own of it.
        """
        self.seen += 1
        if self.seen > MAX_TRAILERS:
            raise ValueError(f"the message has more than {MAX_TRAILERS} trailers")
