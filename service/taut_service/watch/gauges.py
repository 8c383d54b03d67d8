"""Metrics that are read from their owners at scrape time, so that they cannot drift from them.

Each family is declared here; *sources* read the owners. Sources run on the event loop, where the
owners live, and only copy numbers; what they gave is turned into text in another thread (see
:mod:`taut_service.watch.scrape`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class Reading(NamedTuple):
    """One sample: the family's name without ``taut_``, label values in its order, the value."""

    family: str
    labels: tuple[str, ...]
    value: float


Source = Callable[[], Iterable[Reading]]

_MODEL = ("model",)
_WORKER = ("worker",)
_VARIANT = ("model", "variant")
GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "inflight_requests": ("Requests admitted and not ended", ()),
    "queued_requests": ("Requests waiting for admission", ()),
    "live_requests": ("Requests that have arrived and not ended, refused ones included", ()),
    "draining": ("1 while the gateway refuses new requests because it is to end", ()),
    "model_inflight_requests": ("Requests admitted and not ended", _MODEL),
    "model_inflight_tokens": ("Tokens of admitted requests, as estimated", _MODEL),
    "model_queued_requests": ("Requests waiting for admission", _MODEL),
    "brown_out": ("1 while requests go to the smaller variant", _MODEL),
    "retry_budget_remaining": ("Retries that may be made now", _MODEL),
    "variant_weight": ("Configured or set share of the traffic, not normalised", _VARIANT),
    "worker_info": ("1; tells which variant a worker serves", ("worker", *_VARIANT)),
    "worker_ready": ("1 if the worker works and is not drained", _WORKER),
    "worker_draining": ("1 if an operator drains the worker", _WORKER),
    "worker_outstanding_requests": ("Requests it holds", _WORKER),
    "worker_outstanding_tokens": ("Tokens of the requests it holds, as estimated", _WORKER),
    "worker_breaker_state": ("Circuit breaker: 0 closed, 1 half-open, 2 open", _WORKER),
    "discovered_workers": ("Workers that discovery knows now", _VARIANT),
    "limit_store_up": ("1 while the shared store of rate limits answers", ()),
    "api_keys": ("API keys in force", ()),
    "guard_queued_answers": ("Answers that wait to be compared with the baseline's", ()),
    "guard_sampled_ratio": ("Share of the answers that guard.max_cpu_share lets be compared", ()),
    "guard_paused": ("1 while a variant cannot be compared: a side has no ready worker", _VARIANT),
    "guard_harm_log_evidence": ("Log of the evidence that a variant does harm", _VARIANT),
    "guard_excess": ("Mean of a measure beyond the baseline's noise", (*_VARIANT, "measure")),
    "guard_compared_tokens": ("Tokens that the evidence rests on", _VARIANT),
    "rollout_percent": ("Share of the traffic that a candidate has, in percent", _VARIANT),
    "rollout_phase": ("1 for the phase of a model's rollout", ("model", "phase")),
    "rollout_journal_up": ("1 while rollouts can be decided and written down", ()),
    "configuration_generation": ("Counts the configurations in use since the start", ()),
}
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "guard_cpu_seconds": ("CPU time of comparisons with the baseline, a little too high", ()),
    "rollout_rollbacks": ("Rollbacks in the audit log", _MODEL),
    "rollout_webhook_failures": ("Changes that the webhook did not take", ()),
    "rollout_event_failures": ("Changes of which Kubernetes has no Event", ()),
    "limit_store_losses": ("Times the shared store of rate limits was lost", ()),
    "worker_breaker_opened": ("Times the circuit breaker of a worker opened", _WORKER),
    "discovery_failures": ("Look-ups that failed; the last known workers stay", _VARIANT),
    "discovery_changes": ("Times discovery found other workers", _VARIANT),
}


class Gauges(Collector):
    """A prometheus_client collector of what the sources read last."""

    def __init__(self) -> None:
        self._sources: list[Source] = []
        self._readings: dict[str, list[Reading]] = {}

    def add(self, source: Source) -> None:
        """Read one more owner from now on."""
        self._sources.append(source)

    def read(self) -> None:
        """Ask every source; call on the event loop.

        Raises:
            KeyError: a source gave a family that is not declared here.
        """
        readings: dict[str, list[Reading]] = {name: [] for name in (*GAUGES, *COUNTERS)}
        for source in self._sources:
            for reading in source():
                readings[reading.family].append(reading)
        self._readings = readings

    def collect(self) -> Iterator[Metric]:
        """Yield the families; safe in any thread."""
        readings = self._readings
        for name, (text, labels) in GAUGES.items():
            gauge = GaugeMetricFamily(f"taut_{name}", text, labels=labels)
            for reading in readings.get(name, ()):
                gauge.add_metric(reading.labels, reading.value)
            yield gauge
        for name, (text, labels) in COUNTERS.items():
            counter = CounterMetricFamily(f"taut_{name}", text, labels=labels)
            for reading in readings.get(name, ()):
                counter.add_metric(reading.labels, reading.value)
            yield counter

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: the names are known not to clash, and nothing was read yet."""
        return iter(())
