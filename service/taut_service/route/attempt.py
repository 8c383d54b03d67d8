"""One request at one worker, from the choice to the end, and what is counted on the way.

Invariant: what the constructor counts in, :meth:`Attempt.end` counts out, once; the worker's
    breaker hears of one outcome at most.
"""

from __future__ import annotations

from taut_service.http.answer_failures import failure_of
from taut_service.worker.connection import Connection
from taut_service.worker.upstream_errors import (
    ConnectError,
    NoDescriptorError,
    StallError,
    UpstreamError,
)
from taut_service.worker.worker import Worker

_TOO_BUSY = (429, 503)
_RETRIED = {429: "429", 502: "502", 503: "503"}


class Attempt:
    """Between ``Attempt(…)`` and :meth:`end` the worker holds the request.

    Args:
        worker: that was chosen.
        tokens: size of the request, as estimated.
    """

    __slots__ = ("_ended", "_judged", "_probe", "_tokens", "connection", "worker")

    def __init__(self, worker: Worker, tokens: int) -> None:
        self.worker = worker
        self.connection: Connection | None = None
        self._tokens = tokens
        self._judged = False
        self._ended = False
        self._probe = worker.take(tokens)

    async def open(self, head: bytes, body: bytes) -> str:
        """Send the request and wait until the answer begins.

        Args:
            head: request line and headers without ``Host`` and the empty line.
            body: the body.

        Returns:
            ``""`` if ``connection`` has an answer to relay, else the cause for which the request
            may be sent elsewhere, a metric label.

        Raises:
            UpstreamFailureError: the worker was silent: it has probably done the work.
        """
        worker = self.worker
        client = worker.client
        wire = client.whole_head(head)
        try:
            self.connection = connection = await client.send(wire, body)
        except StallError as error:
            self.failed()
            raise failure_of(error) from error
        except ConnectError as error:
            self.failed()
            worker.lose(str(error))
            return error.cause
        except NoDescriptorError as error:
            return error.cause
        except UpstreamError as error:
            self.failed()
            return error.cause
        cause = _RETRIED.get(connection.status, "")
        if cause:
            if connection.status in _TOO_BUSY:
                worker.back_off()
            else:
                self.failed()
        return cause

    def succeeded(self) -> None:
        """Tell that the answer came whole."""
        if not self._judged:
            self._judged = True
            self.worker.answered(self._probe)

    def failed(self) -> None:
        """Tell that the worker failed, and have it probed."""
        if not self._judged:
            self._judged = True
            self.worker.breaker.failed(self._probe)
            self.worker.check_now.set()

    def end(self) -> None:
        """Count the request out; whatever is still coming from the worker is broken off."""
        if self._ended:
            return
        self._ended = True
        worker = self.worker
        if self.connection is not None:
            worker.client.give_back(self.connection)
        worker.give_back(self._tokens)
        if not self._judged:
            worker.breaker.abandoned(self._probe)
