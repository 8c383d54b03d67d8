"""A checked request, ready to be sent to any worker of its model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from taut_service.affinity import affinity_keys
from taut_service.headers import RequestHeaders, request_head
from taut_service.settings import Affinity
from taut_service.splice import with_model

_SESSION_FIELDS = ("prompt_cache_key", "user")
"""Body fields that name a session where the header is missing; OpenAI's, both optional."""


class Outgoing:
    """What is sent, for as many tries as it takes.

    Args:
        path: absolute path with query.
        headers: the client's.
        body: as the client sent it.
        document: the same, parsed.
        tokens: prompt and completion, as estimated.
    """

    __slots__ = ("_body", "_document", "_head", "_headers", "_path", "_served_name", "tokens")

    def __init__(
        self,
        path: bytes,
        headers: RequestHeaders,
        body: bytes,
        document: dict[str, Any],
        tokens: int,
    ) -> None:
        self.tokens = tokens
        self._path = path
        self._headers = headers
        self._body = body
        self._document = document
        self._served_name = ""
        self._head = b""

    def for_model(self, served_name: str) -> tuple[bytes, bytes]:
        """Return head and body that ask for a model.

        Args:
            served_name: what the worker calls it.

        Returns:
            The head without ``Host`` and the empty line, and the body.
        """
        if served_name != self._served_name:
            self._body = with_model(self._body, self._document, served_name)
            self._document = {**self._document, "model": served_name}
            self._head = request_head(self._path, self._headers, len(self._body))
            self._served_name = served_name
        return self._head, self._body

    @property
    def pinned_variant(self) -> str | None:
        """The variant the client asked for, None if it did not."""
        value = self._headers.variant
        return None if value is None else value.decode("latin-1")

    @property
    def streamed(self) -> bool:
        """Whether the client wants a stream."""
        return self._document.get("stream") is True

    def session(self, header: bytes) -> str | None:
        """Name the session it belongs to.

        Args:
            header: the header that names it, in lower case; body fields do so where it is missing.

        Returns:
            The session, None without.
        """
        for name, value in self._headers.passed_on:
            if name == header and value:
                return value.decode("latin-1")
        for field in _SESSION_FIELDS:
            named = self._document.get(field)
            if isinstance(named, str) and named:
                return named
        return None

    def affinity_keys(
        self, affinity: Affinity, session_header: bytes, caller: str | None
    ) -> Iterator[int]:
        """Yield what ties it to other requests; see :func:`taut_service.affinity.affinity_keys`."""
        session = self.session(session_header) if affinity.by == "session" else None
        return affinity_keys(affinity, self._document, session, caller)
