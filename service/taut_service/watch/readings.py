"""Reads the gateway's own objects into gauges: workers, variants, admission, discovery, drain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from taut_service.admit.admission import Admission
from taut_service.config.generation import Generation
from taut_service.watch.drain import Drain
from taut_service.watch.gauges import Reading, Source
from taut_service.worker.discovery.watch import DiscoveryState
from taut_service.worker.worker import Worker

BREAKER_VALUES = {"closed": 0.0, "half_open": 1.0, "open": 2.0}


class HoldsGeneration(Protocol):
    """Knows the configuration in force: a :class:`taut_service.config.reload.Reloader`."""

    current: Generation


class HoldsDiscovery(Protocol):
    """Knows what every watch has found, as the supervisor of discovery does."""

    def states(self) -> Iterator[tuple[str, str, DiscoveryState]]:
        """Yield (model, variant, state)."""


def read_workers(holder: HoldsGeneration) -> Source:
    """Return a source of everything that belongs to a worker or a variant."""

    def source() -> Iterator[Reading]:
        generation = holder.current
        yield Reading("configuration_generation", (), generation.number)
        seen: set[str] = set()
        for model, variant, worker in generation.workers():
            yield Reading("worker_info", (worker.name, model.name, variant.name), 1)
            # One server may serve two variants; a series given twice would spoil the scrape.
            if worker.name not in seen:
                seen.add(worker.name)
                yield from _readings_of(worker)
        for model in generation.models.values():
            yield Reading("retry_budget_remaining", (model.name,), model.budget.balance)
            for variant in model.variants.values():
                yield Reading("variant_weight", (model.name, variant.name), variant.weight)

    return source


def _readings_of(worker: Worker) -> Iterator[Reading]:
    label = (worker.name,)
    yield Reading("worker_ready", label, worker.ready)
    yield Reading("worker_draining", label, worker.draining)
    yield Reading("worker_outstanding_requests", label, worker.outstanding)
    yield Reading("worker_outstanding_tokens", label, worker.outstanding_tokens)
    yield Reading("worker_breaker_state", label, BREAKER_VALUES[worker.breaker.state])
    yield Reading("worker_breaker_opened", label, worker.breaker.opened)


def read_admission(admission: Admission, holder: HoldsGeneration) -> Source:
    """Return a source of what is admitted and what waits."""

    def source() -> Iterator[Reading]:
        yield Reading("inflight_requests", (), admission.inflight)
        yield Reading("queued_requests", (), admission.queued)
        for model in holder.current.models:
            controller = admission.of(model)
            yield Reading("model_inflight_requests", (model,), controller.inflight)
            yield Reading("model_inflight_tokens", (model,), controller.inflight_tokens)
            yield Reading("model_queued_requests", (model,), controller.queued)
            yield Reading("brown_out", (model,), controller.under_pressure)

    return source


def read_drain(drain: Drain) -> Source:
    """Return a source of the end of the gateway's life."""

    def source() -> Iterator[Reading]:
        yield Reading("live_requests", (), drain.live)
        yield Reading("draining", (), drain.draining)

    return source


def read_discovery(discovery: HoldsDiscovery) -> Source:
    """Return a source of what the watches know."""

    def source() -> Iterator[Reading]:
        for model, variant, state in discovery.states():
            labels = (model, variant)
            yield Reading("discovered_workers", labels, len(state.workers))
            yield Reading("discovery_failures", labels, state.failures)
            yield Reading("discovery_changes", labels, state.changes)

    return source
