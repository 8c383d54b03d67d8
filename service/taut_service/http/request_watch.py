"""Ends a request from outside: the client left, its time is up, or the gateway is shutting down.

uvicorn swallows what is sent to a client that has gone, so without this a worker would generate
to the end for nobody. The request runs in one task; :class:`RequestWatch` cancels that task for a
reason and turns the cancellation into that reason at the end of its block, as ``asyncio.timeout``
does. Cancellation by anyone else passes through untouched.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive

from taut_service.errors import RequestTimeoutError, UnavailableError, UpstreamDeadlineError
from taut_service.expiry import Expiry
from taut_service.http.client_exchange import ClientExchange
from taut_service.timer import Timer

SHUTDOWN_RETRY_AFTER_S = 5.0


class SilenceLimit:
    """Ends a request whose client falls silent. Cheaper than ``asyncio.timeout`` around each wait.

    Args:
        watch: of the request.
        silence_s: longest pause.
    """

    __slots__ = ("_silence_s", "_timer", "_watch")

    def __init__(self, watch: RequestWatch, silence_s: float) -> None:
        self._watch = watch
        self._silence_s = silence_s
        self._timer = Timer()

    def restart(self) -> None:
        """Begin to count from now."""
        self._timer.start(asyncio.get_running_loop(), self._silence_s, self._expire)

    def stop(self) -> None:
        """Count no longer."""
        self._timer.stop()

    def _expire(self) -> None:
        text = f"the request body did not arrive: nothing for {self._silence_s:g} s"
        self._watch.end(RequestTimeoutError(text, code="body_timeout"))


class ClientDisconnectedError(Exception):
    """The client closed its connection; nobody is left to answer."""


class RequestWatch:
    """``with`` around one request, in the task that runs it.

    Args:
        receive: the ASGI callable; read by :meth:`listen` only.
        total: ends the request that lives longer.
    """

    __slots__ = (
        "_cancelling", "_exchange", "_listener", "_number", "_reason", "_receive", "_task",
        "_timer", "_total", "_total_s",
    )  # fmt: skip

    def __init__(self, receive: Receive, total: Expiry) -> None:
        self._receive = receive
        self._total = total
        self._total_s = total.seconds
        self._number = 0
        self._cancelling = 0
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[object] | None = None
        self._listener: asyncio.Task[None] | None = None
        self._reason: Exception | None = None
        self._exchange: ClientExchange | None = None

    def listen(self, exchange: ClientExchange | None = None) -> None:
        """Begin to wait for the client to leave; call once, when the body has been read.

        Args:
            exchange: tells; without one a task waits for ``http.disconnect``.
        """
        self._exchange = exchange
        if exchange is not None:
            exchange.watch(self._disconnected)
        else:
            self._listener = asyncio.get_running_loop().create_task(self._wait_for_disconnect())

    def end(self, reason: Exception) -> None:
        """Stop the request; the block ends with ``reason``. Only the first call in it counts."""
        if self._reason is None and self._task is not None:
            self._reason = reason
            self._task.cancel()

    def shorten(self, total_s: float) -> None:
        """Give the request at most so many seconds from now, if that is less than it has."""
        if total_s < self._total_s:
            self._total_s = total_s
            self._stop_counting()
            self._timer = asyncio.get_running_loop().call_later(total_s, self._out_of_time)

    def limit(self, silence_s: float) -> SilenceLimit:
        """Return a limit on how long the client may be silent within its body."""
        return SilenceLimit(self, silence_s)

    def shut_down(self) -> None:
        """Stop the request because the gateway ends."""
        text = "the gateway is shutting down; send the request again"
        self.end(UnavailableError(text, code="shutting_down", retry_after_s=SHUTDOWN_RETRY_AFTER_S))

    def _stop_counting(self) -> None:
        self._total.stop(self._number)
        if self._timer is not None:
            self._timer.cancel()

    def _disconnected(self) -> None:
        self.end(ClientDisconnectedError())

    async def _wait_for_disconnect(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._disconnected()
                return

    def _out_of_time(self) -> None:
        self.end(
            UpstreamDeadlineError(
                f"the answer was not complete within {self._total_s:g} s", code="total_timeout"
            )
        )

    def __enter__(self) -> RequestWatch:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a coroutine awaited by ASGI runs in a task
        self._task = task
        self._cancelling = task.cancelling()
        self._number = self._total.start(self._out_of_time)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        task, self._task = self._task, None
        self._stop_counting()
        if self._exchange is not None:
            self._exchange.unwatch()
        if self._listener is not None:
            self._listener.cancel()
        reason, self._reason = self._reason, None
        if reason is None or task is None:
            return
        try:
            if task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
                raise reason from error
        finally:
            # An exception that a frame of its own traceback names keeps all of them, the request's
            # body included, until the collector comes by.
            del reason, error
