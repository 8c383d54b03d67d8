"""A checked request, ready to be sent to any worker of its model."""

from __future__ import annotations

from collections.abc import Iterator

from taut_service.admit.inspection import Facts
from taut_service.config.settings import Affinity
from taut_service.http.headers import RequestHeaders, request_head
from taut_service.http.splice import find_models, model_edits, moved, with_edits
from taut_service.route.affinity import affinity_keys


class Outgoing:
    """What is sent, for as many tries as it takes. Holds bytes and facts, nothing parsed.

    Args:
        path: absolute path with query.
        headers: the client's.
        facts: what is known of its body, and the body itself.
    """

    __slots__ = (
        "_asked",
        "_beginning",
        "_body",
        "_head",
        "_headers",
        "_path",
        "_places",
        "_served_name",
        "_session",
        "streamed",
        "tokens",
    )

    def __init__(self, path: bytes, headers: RequestHeaders, facts: Facts) -> None:
        self.tokens = facts.cost.prompt + facts.cost.completion
        self._path = path
        self._headers = headers
        self._body = facts.body
        # Not the facts: their body becomes another where a worker knows the model by another name.
        self._session = facts.session
        self._beginning = facts.beginning
        self.streamed = facts.streamed
        self._asked = facts.asked
        self._places = facts.places
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
            if served_name != self._asked:
                places = self._places or find_models(self._body)
                edits = model_edits(self._body, places, served_name)
                self._body, self._places = with_edits(self._body, edits), moved(places, edits)
                self._asked = served_name
            self._head = request_head(self._path, self._headers, len(self._body))
            self._served_name = served_name
        return self._head, self._body

    @property
    def pinned_variant(self) -> str | None:
        """The variant the client asked for, None if it did not."""
        value = self._headers.variant
        return None if value is None else value.decode("latin-1")

    @property
    def body(self) -> bytes:
        """What is sent, as it is now."""
        return self._body

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
        return self._session

    def affinity_keys(
        self, affinity: Affinity, session_header: bytes, caller: str | None
    ) -> Iterator[int]:
        """Yield what ties it to other requests, by :func:`.affinity.affinity_keys`."""
        session = self.session(session_header) if affinity.by == "session" else None
        return affinity_keys(affinity, self._beginning, session, caller)
