"""Every metric the gateway exports, declared in one place.

Label values come from the configuration and from the fixed lists below, never from a request, so
the number of series is known when the gateway starts. Children are looked up once per (model,
route) and kept: ``labels()`` costs more than ``inc()``.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from taut_service.admission import AdmissionController
from taut_service.pool import Worker, WorkerPool
from taut_service.sse import Usage

UNKNOWN_MODEL = "unknown"
"""Label of requests that name no configured model."""
STATUS_CLASSES = ("2xx", "3xx", "4xx", "5xx", "disconnect")
RETRY_CAUSES = ("connect", "reset", "protocol", "stale", "502", "503")
REJECT_REASONS = (
    "queue_full",
    "queue_timeout",
    "no_ready_worker",
    "draining",
    "unauthorized",
    "invalid",
    "too_large",
)
_BY_ROUTE = ("model", "route")
_DURATION_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)


class RouteMetrics:
    """The children of one model on one route.

    Args:
        metrics: the families.
        model: a configured name, or ``unknown``.
        route: a short fixed name.
    """

    def __init__(self, metrics: Metrics, model: str, route: str) -> None:
        self._requests = {
            status: metrics.requests.labels(model, route, status) for status in STATUS_CLASSES
        }
        self._duration = metrics.duration.labels(model, route)
        self._first_token = metrics.first_token.labels(model, route)
        self._inter_token = metrics.inter_token.labels(model, route)
        self._queue_wait = metrics.queue_wait.labels(model)
        self._prompt_tokens = metrics.prompt_tokens.labels(model)
        self._generated_tokens = metrics.generated_tokens.labels(model)
        self._disconnects = metrics.disconnects.labels(model, route)

    def finished(self, status: int, seconds: float, usage: Usage | None) -> None:
        """Count one answered request.

        Args:
            status: the HTTP status sent.
            seconds: from arrival to the last byte.
            usage: tokens, where the worker told.
        """
        self._requests[STATUS_CLASSES[status // 100 - 2]].inc()
        self._duration.observe(seconds)
        if usage is not None:
            self._prompt_tokens.inc(usage.prompt_tokens)
            self._generated_tokens.inc(usage.completion_tokens)

    def abandoned(self) -> None:
        """Count one request whose client left."""
        self._requests["disconnect"].inc()
        self._disconnects.inc()

    def waited(self, seconds: float) -> None:
        """Record the time a request spent before it was admitted."""
        self._queue_wait.observe(seconds)

    def first_token(self, seconds: float) -> None:
        """Record arrival to first event of a stream."""
        self._first_token.observe(seconds)

    def next_tokens(self, seconds: float, events: int) -> None:
        """Record the mean pause between the events of one read of a stream."""
        self._inter_token.observe(seconds / events)


class Metrics:
    """The registry and the families. One per application, never global."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"taut_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: Iterable[float], *labels: str) -> Histogram:
            return Histogram(
                f"taut_{name}", text, labels, registry=registry, buckets=tuple(buckets)
            )

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"taut_{name}", text, labels, registry=registry)

        self.requests = counter("requests", "Requests ended", *_BY_ROUTE, "status")
        self.duration = histogram(
            "request_duration_seconds",
            "Arrival to last byte, requests that were answered",
            _DURATION_BUCKETS,
            *_BY_ROUTE,
        )
        self.first_token = histogram(
            "time_to_first_token_seconds",
            "Arrival to first event of a stream",
            _DURATION_BUCKETS,
            *_BY_ROUTE,
        )
        self.inter_token = histogram(
            "inter_token_latency_seconds",
            "Pause between events of a stream, mean over one read",
            _ITL_BUCKETS,
            *_BY_ROUTE,
        )
        self.queue_wait = histogram(
            "queue_wait_seconds", "Arrival to admission", _DURATION_BUCKETS, "model"
        )
        self.prompt_tokens = counter("prompt_tokens", "Tokens in, as workers report", "model")
        self.generated_tokens = counter(
            "generated_tokens", "Tokens out, as workers report", "model"
        )
        self.disconnects = counter("disconnects", "Clients that left early", *_BY_ROUTE)
        retries = counter("retries", "Requests sent again before the first byte", "cause")
        self.retries = {cause: retries.labels(cause) for cause in RETRY_CAUSES}
        rejected = counter("rejected", "Requests refused by the gateway itself", "reason")
        self.rejected = {reason: rejected.labels(reason) for reason in REJECT_REASONS}
        self._inflight = gauge("inflight_requests", "Requests admitted and not ended")
        self._queued = gauge("queued_requests", "Requests waiting for admission")
        self._worker_ready = gauge("worker_ready", "1 if the worker gets requests", "worker")
        self._outstanding = gauge("worker_outstanding_requests", "Requests it holds", "worker")
        self._routes: dict[tuple[str, str], RouteMetrics] = {}

    def watch(self, admission: AdmissionController, pool: WorkerPool) -> None:
        """Read the gauges from their owners at scrape time, so that they cannot drift from them."""
        self._inflight.set_function(lambda: admission.inflight)
        self._queued.set_function(lambda: admission.queued)
        for _, worker in pool.all():
            self._watch_worker(worker)

    def _watch_worker(self, worker: Worker) -> None:
        self._worker_ready.labels(worker.name).set_function(lambda: worker.ready)
        self._outstanding.labels(worker.name).set_function(lambda: worker.outstanding)

    def route(self, model: str, route: str) -> RouteMetrics:
        """Return the kept children of a configured model, or ``unknown``, on a route."""
        key = (model, route)
        found = self._routes.get(key)
        if found is None:
            found = self._routes[key] = RouteMetrics(self, model, route)
        return found

    def exposition(self) -> bytes:
        """Return the text format, version 0.0.4."""
        return generate_latest(self.registry)
