"""One checked request, end to end: admit → choose → call → relay, retried until the first byte.

A request is sent again, to another worker, when connecting failed, when the connection broke
before any byte of the answer, or when the worker answered 502 or 503; at most ``MAX_TRIES`` in
all. It is not sent again after a time limit (the work was probably done) nor after the client has
seen anything. Generation has no side effects, so sending it twice is safe.
"""

from __future__ import annotations

import time

from starlette.types import Send

from taut_service.admission import AdmissionController
from taut_service.call import Call
from taut_service.connection import ConnectError, StallError, UpstreamError
from taut_service.errors import GatewayError, UnavailableError, UpstreamFailureError
from taut_service.metrics import Metrics
from taut_service.pool import Worker, WorkerPool
from taut_service.relay import failure_of, relay

MAX_TRIES = 3
RETRY_AFTER_S = 2.0
"""Advice while no worker is ready: about two rounds of quick probing."""
_WORKER_BUSY = {502: "502", 503: "503"}


class Gateway:
    """Brings requests and workers together.

    Args:
        pool: the workers.
        admission: the bound on concurrent requests.
        metrics: for queue waits and retries.
    """

    def __init__(self, pool: WorkerPool, admission: AdmissionController, metrics: Metrics) -> None:
        self._pool = pool
        self._admission = admission
        self._metrics = metrics

    async def answer(self, call: Call, head: bytes, body: bytes, send: Send) -> None:
        """Answer a request through a worker.

        Args:
            call: with ``model`` set to a configured name.
            head: request line and headers without ``Host``.
            body: as the client sent it.
            send: the ASGI callable.

        Raises:
            GatewayError: to be sent as an answer, or as an event if ``call.streaming``.
            CutShortError: the client's connection must be closed.
        """
        if not self._pool.has_ready(call.model):
            raise _none_ready(call.model)
        async with self._admission.slot():
            call.metrics.waited(time.perf_counter() - call.started)
            await self._answer_admitted(call, head, body, send)

    async def _answer_admitted(self, call: Call, head: bytes, body: bytes, send: Send) -> None:
        tried: list[Worker] = []
        cause = ""
        while True:
            worker = self._pool.choose(call.model, tried) if len(tried) < MAX_TRIES else None
            if worker is None:
                raise _gave_up(call.model, cause)
            if tried:
                self._metrics.retries[cause].inc()
            tried.append(worker)
            call.tries = len(tried)
            call.worker = worker.name
            with worker.holding_request():
                cause = await self._try(worker, call, head, body, send)
            if not cause:
                return

    async def _try(self, worker: Worker, call: Call, head: bytes, body: bytes, send: Send) -> str:
        """Return ``""`` if it was answered, else the cause for which it may be sent elsewhere."""
        client = worker.client
        wire = b"%bhost: %b\r\n\r\n" % (head, client.authority)
        try:
            connection = await client.send(wire, body)
        except StallError as error:
            worker.check_now.set()
            raise failure_of(error) from error
        except ConnectError as error:
            worker.lose(str(error))
            return error.cause
        except UpstreamError as error:
            worker.check_now.set()
            return error.cause
        try:
            if connection.status in _WORKER_BUSY:
                return _WORKER_BUSY[connection.status]
            await relay(call, connection, worker.header, send)
        except UpstreamFailureError:
            worker.check_now.set()
            raise
        finally:
            client.give_back(connection)
        return ""


def _none_ready(model: str) -> UnavailableError:
    return UnavailableError(
        f"no worker of {model!r} is ready", code="no_ready_worker", retry_after_s=RETRY_AFTER_S
    )


def _gave_up(model: str, cause: str) -> GatewayError:
    if not cause:
        return _none_ready(model)
    if cause in ("reset", "protocol"):
        return UpstreamFailureError(
            "the worker closed the connection without an answer", code="worker_lost"
        )
    return UnavailableError(
        f"no worker of {model!r} could take the request",
        code="worker_unavailable",
        retry_after_s=RETRY_AFTER_S,
    )
