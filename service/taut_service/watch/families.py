"""Every metric the gateway counts itself, declared in one place; gauges.py has what it reads.

Label values come from the configuration and from the fixed lists below, never from a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from taut_service.built import how_built
from taut_service.http.client_rules import CLOSE_REASONS
from taut_service.watch.tallies import Tallies

STATUS_CLASSES = ("2xx", "3xx", "4xx", "5xx", "disconnect")
RETRY_CAUSES = ("connect", "reset", "protocol", "timeout", "stale", "429", "502", "503")
REJECT_REASONS = (
    "queue_full",
    "queue_timeout",
    "no_ready_worker",
    "draining",
    "unauthorized",
    "forbidden",
    "rate_limited",
    "limits_unavailable",
    "invalid",
    "too_large",
    "key_inflight",
    "too_many_bytes",
)
RATE_LIMITS = ("requests", "tokens")
RELOADED = ("configuration", "keys", "certificate")
_BY_ROUTE = ("model", "route")
_BY_VARIANT = ("model", "variant")
_DURATION_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)


class Families:
    """The metric families of one registry.

    Args:
        registry: where they are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.tallies = Tallies()
        self._declare_by_route()
        self._declare_by_model()
        self._declare_by_variant()
        self._declare_by_key()
        self._declare_guard()
        self._declare_fixed()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"taut_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Iterable[float], *labels: str) -> Histogram:
        return Histogram(
            f"taut_{name}", text, labels, registry=self._registry, buckets=tuple(buckets)
        )

    def _declare_by_route(self) -> None:
        self.requests = self._counter("requests", "Requests ended", *_BY_ROUTE, "status")
        self.duration = self._histogram(
            "request_duration_seconds",
            "Arrival to last byte, requests that were answered",
            _DURATION_BUCKETS,
            *_BY_ROUTE,
        )
        self.first_token = self._histogram(
            "time_to_first_token_seconds",
            "Arrival to first event of a stream",
            _DURATION_BUCKETS,
            *_BY_ROUTE,
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds",
            "Pause between events of a stream, mean over one read",
            _ITL_BUCKETS,
            *_BY_ROUTE,
        )
        self.disconnects = self._counter("disconnects", "Clients that left early", *_BY_ROUTE)

    def _declare_by_model(self) -> None:
        counter = self._counter
        self.queue_wait = self._histogram(
            "queue_wait_seconds", "Arrival to admission", _DURATION_BUCKETS, "model"
        )
        self.prompt_tokens = counter("prompt_tokens", "Tokens in, as workers report", "model")
        self.generated_tokens = counter(
            "generated_tokens", "Tokens out, as workers report", "model"
        )
        self.retries_refused = counter(
            "retries_refused", "Retries not made because their budget was spent", "model"
        )
        self.hedges = counter("hedges", "Second copies sent because the first was slow", "model")
        self.hedges_won = counter("hedges_won", "Second copies that answered first", "model")

    def _declare_by_variant(self) -> None:
        counter, histogram = self._counter, self._histogram
        self.variant_requests = counter(
            "variant_requests", "Requests that a worker of the variant took", *_BY_VARIANT, "status"
        )
        self.variant_duration = histogram(
            "variant_request_duration_seconds",
            "Arrival to last byte, requests that were answered",
            _DURATION_BUCKETS,
            *_BY_VARIANT,
        )
        self.variant_first_token = histogram(
            "variant_time_to_first_token_seconds",
            "Arrival to first event of a stream",
            _DURATION_BUCKETS,
            *_BY_VARIANT,
        )
        self.variant_per_token = histogram(
            "variant_time_per_output_token_seconds",
            "Mean pause between the events of one whole stream",
            _ITL_BUCKETS,
            *_BY_VARIANT,
        )
        self.variant_prompt_tokens = counter(
            "variant_prompt_tokens", "Tokens in, as workers report", *_BY_VARIANT
        )
        self.variant_generated_tokens = counter(
            "variant_generated_tokens", "Tokens out, as workers report", *_BY_VARIANT
        )
        self.variant_cost = counter(
            "variant_cost", "Cost of tokens, in the unit of the configured prices", *_BY_VARIANT
        )
        self.variant_fallbacks = counter(
            "variant_fallbacks",
            "Requests that this variant took because their own had no worker for them",
            *_BY_VARIANT,
        )

    def _declare_by_key(self) -> None:
        counter, labels = self._counter, ("key", "model")
        self.key_requests = counter("key_requests", "Requests that a worker took", *labels)
        self.key_prompt_tokens = counter(
            "key_prompt_tokens", "Tokens in, as workers report", *labels
        )
        self.key_generated_tokens = counter(
            "key_generated_tokens", "Tokens out, as workers report", *labels
        )
        self.key_cost = counter("key_cost", "Cost of these tokens at the variants' prices", *labels)

    def _declare_guard(self) -> None:
        self.guard_answers = self._counter(
            "guard_answers",
            "Answers drawn for comparison, by what came of them",
            *_BY_VARIANT,
            "result",
        )
        self.guard_first_divergence = self._histogram(
            "guard_first_divergence_token",
            "First place of a compared answer where the most probable tokens differ",
            (0, 1, 2, 4, 8, 16, 32, 64, 128, 256),
            *_BY_VARIANT,
        )
        self.guard_length_ratio = self._histogram(
            "guard_length_ratio",
            "Length of the variant's answer over the baseline's",
            (0.1, 0.25, 0.5, 0.8, 0.95, 1.05, 1.25, 2, 4, 10),
            *_BY_VARIANT,
        )

    def _declare_fixed(self) -> None:
        counter = self._counter
        self.retries = _children(
            counter("retries", "Requests sent again before the first byte", "cause"), RETRY_CAUSES
        )
        self.rejected = _children(
            counter("rejected", "Requests refused by the gateway itself", "reason"), REJECT_REASONS
        )
        self.rate_limited = _children(
            counter("rate_limited", "Refusals by a caller's own limit", "limit"), RATE_LIMITS
        )
        self.clients_closed = _children(
            counter(
                "client_connections_closed", "Clients' connections cut by the gateway", "reason"
            ),
            CLOSE_REASONS,
        )
        self.log_lines_dropped = counter(
            "log_lines_dropped", "Lines of the access log lost because its reader is too slow"
        )
        reloads = counter(
            "reloads", "Times changed files were taken into use, or refused", "what", "result"
        )
        self.reloads = {
            (what, good): reloads.labels(what, "ok" if good else "refused")
            for what in RELOADED
            for good in (True, False)
        }
        build = Gauge(
            "taut_build_info",
            "1; tells the version, and whether the hot path is compiled",
            ("version", "build"),
            registry=self._registry,
        )
        build.labels(taut_version(), how_built()).set(1)


def _children(family: Counter, values: Sequence[str]) -> dict[str, Counter]:
    return {value: family.labels(value) for value in values}


def taut_version() -> str:
    """Return the installed version of this project, ``0`` in a bare source tree."""
    try:
        return version("taut")
    except PackageNotFoundError:
        return "0"
