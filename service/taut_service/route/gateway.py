"""One checked request, end to end: admit → choose → call → relay, retried until the first byte.

A request is sent again, to another worker, when connecting failed, when the connection broke
before anything of the answer was passed on, or when the worker answered 429, 502 or 503; as often
as ``routing.retries`` allows. It is not sent again after a time limit (the work was probably done)
nor after the client has seen anything. Generation has no side effects, so sending it twice is
safe. Tries stay in the variant the request belongs to for as long as that has another worker.
"""

from __future__ import annotations

import time

from starlette.types import Send

from taut_service.admit.admission import ANYBODY, Admission, Claim
from taut_service.call import Call
from taut_service.config.reload import Reloader
from taut_service.errors import (
    GatewayError,
    UnavailableError,
    UpstreamFailureError,
)
from taut_service.http.answer_failures import CutShortError, NothingSentError
from taut_service.http.relay import relay
from taut_service.route.attempt import Attempt
from taut_service.route.hedge import Opening, open_hedged
from taut_service.route.routed import RoutedRequest
from taut_service.route.variants import Model
from taut_service.watch.metrics import Metrics
from taut_service.worker.outgoing import Outgoing
from taut_service.worker.worker import Worker

RETRY_AFTER_S = 2.0
"""Advice while no worker is ready: about two rounds of quick probing."""
_TOO_MANY = 429
_REFUSED = "429"
"""The cause that is passed on where no other worker may be asked."""
_FREE_TO_RETRY = "connect"
"""The cause for which no worker has done anything: such a retry costs no budget."""


class Gateway:
    """Brings requests and workers together.

    Args:
        reloader: holds the configuration in force.
        admission: the bounds on concurrent requests.
        metrics: for queue waits and retries.
    """

    def __init__(self, reloader: Reloader, admission: Admission, metrics: Metrics) -> None:
        self._reloader = reloader
        self._admission = admission
        self._metrics = metrics

    async def answer(
        self,
        call: Call,
        model: Model,
        request: Outgoing,
        send: Send,
        claim: Claim = ANYBODY,
        *,
        may_pin: bool = True,
    ) -> None:
        """Answer a request through a worker.

        Args:
            call: filled in as it goes.
            model: that was asked for, of the configuration in force.
            request: what is sent.
            send: the ASGI callable.
            claim: on a place.
            may_pin: whether the caller may choose the variant.

        Raises:
            GatewayError: to be sent as an answer, or as an event if ``call.streaming``.
            CutShortError: the client's connection must be closed.
        """
        generation = self._reloader.current
        routing = generation.settings.routing
        route = RoutedRequest(call, model, routing, request, may_pin=may_pin)
        if not route.has_ready():
            raise _none_ready(model.name)
        admission = self._admission.of(model.name)
        slot = admission.slot(claim)
        if not slot.take():
            await slot.wait()
        try:
            call.metrics.waited(time.perf_counter() - call.started)
            if self._reloader.current is not generation:
                route = self._routed_anew(route, may_pin=may_pin)
            if admission.under_pressure:
                route.brown_out()
            await self._answer_admitted(route, send)
        finally:
            slot.release()

    def _routed_anew(self, route: RoutedRequest, *, may_pin: bool) -> RoutedRequest:
        """Route a request that waited while the configuration changed: its workers may be gone."""
        generation = self._reloader.current
        model = generation.models.get(route.model.name, route.model)
        routing = generation.settings.routing
        return RoutedRequest(route.call, model, routing, route.request, may_pin=may_pin)

    async def _answer_admitted(self, route: RoutedRequest, send: Send) -> None:
        call, model = route.call, route.model
        model.budget.earn()
        cause = ""
        following: Worker | None = None
        while True:
            worker = following or self._next_worker(route, cause)
            following = None
            if worker is None:
                raise _gave_up(model.name, cause)
            attempt = route.begin(worker)
            try:
                if route.hedged_after_s is None:
                    cause = await attempt.open(*route.wire())
                else:
                    attempt, cause = await self._open_hedged(route, attempt, route.hedged_after_s)
                if cause == _REFUSED:
                    following = self._next_worker(route, cause)
                    if following is None:
                        # The client gets the worker's own words, as of every 4xx.
                        cause = ""
                connection = attempt.connection
                if not cause and connection is not None:
                    worker, variant = attempt.worker, route.variant
                    call.routed.worker = worker.name
                    await relay(call, connection, worker.header, variant.header, send)
                    if connection.status != _TOO_MANY:
                        attempt.succeeded()
                    return
            except NothingSentError as error:
                attempt.failed()
                cause = error.cause
            except (UpstreamFailureError, CutShortError):
                attempt.failed()
                raise
            finally:
                attempt.end()

    def _next_worker(self, route: RoutedRequest, cause: str) -> Worker | None:
        """Return where to send the request now, None if nowhere (any more)."""
        model, tries = route.model, len(route.tried)
        if not tries:
            return self._choose(route)
        if tries >= route.routing.retries.max_tries:
            return None
        worker = self._choose(route)
        if worker is None:
            return None
        if cause != _FREE_TO_RETRY and not model.budget.spend():
            self._metrics.retries_refused(model.name)
            return None
        self._metrics.retries[cause].inc()
        return worker

    def _choose(self, route: RoutedRequest) -> Worker | None:
        worker = route.variant.choose(route.tried, route.keys())
        if worker is not None:
            return worker
        for other in route.others():
            worker = other.choose(route.tried, route.keys())
            if worker is not None:
                self._metrics.variant_fallback(route.model.name, other.name)
                route.move_to(other)
                return worker
        return route.variant.choose(route.tried, last_resort=True)

    async def _open_hedged(
        self, route: RoutedRequest, attempt: Attempt, after_s: float
    ) -> tuple[Attempt, str]:
        def second() -> Opening | None:
            if len(route.tried) >= route.routing.retries.max_tries:
                return None
            worker = route.variant.choose(route.tried, route.keys())
            if worker is None or not route.model.budget.spend():
                return None
            self._metrics.hedged(route.model.name)
            other = route.begin(worker)
            return other, other.open(*route.wire())

        first = attempt, attempt.open(*route.wire())
        winner, cause = await open_hedged(first, second, after_s)
        if winner is not attempt and not cause:
            self._metrics.hedge_won(route.model.name)
        return winner, cause


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
