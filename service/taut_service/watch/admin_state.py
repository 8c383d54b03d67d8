"""What ``GET /admin/state`` shows: the configuration in force and everything that runs."""

from __future__ import annotations

from datetime import UTC, datetime

from pydantic import BaseModel

from taut_service.admit.admission import Admission
from taut_service.config.generation import Generation
from taut_service.route.variants import Model, Variant
from taut_service.watch.drain import Drain
from taut_service.watch.latencies import LatencyReport
from taut_service.watch.metrics import Metrics
from taut_service.worker.discovery.supervisor import Supervisor
from taut_service.worker.discovery.watch import DiscoveryState
from taut_service.worker.worker import Worker


class ReportedState(BaseModel):
    """What a worker said of itself on its ``/metrics``."""

    running: float
    waiting: float
    kv_usage: float


class WorkerReport(BaseModel):
    """One worker."""

    name: str
    url: str
    state: str
    detail: str
    since: datetime
    draining: bool
    breaker: str
    outstanding: int
    outstanding_tokens: int
    idle_connections: int
    reported: ReportedState | None


class DiscoveryReport(BaseModel):
    """What discovery knows of a variant."""

    source: str
    workers: int
    failures: int
    detail: str


class VariantReport(BaseModel):
    """One variant."""

    weight: float
    served_name: str
    discovery: DiscoveryReport | None
    latency: LatencyReport
    workers: list[WorkerReport]


class ModelReport(BaseModel):
    """One model."""

    aliases: list[str]
    inflight: int
    inflight_tokens: int
    queued: int
    brown_out: bool
    variants: dict[str, VariantReport]


class GatewayState(BaseModel):
    """The whole gateway."""

    generation: int
    loaded_at: datetime
    draining: bool
    live: int
    guarded: bool
    models: dict[str, ModelReport]


def describe(
    generation: Generation,
    admission: Admission,
    discovery: Supervisor,
    drain: Drain,
    metrics: Metrics,
    *,
    guarded: bool,
) -> GatewayState:
    """Copy the state of everything.

    Args:
        generation: in force.
        admission: what runs and waits.
        discovery: the watches.
        drain: the door.
        metrics: tells how long variants' answers take.
        guarded: whether variants are compared with a baseline.
    """
    watched = {(model, variant): state for model, variant, state in discovery.states()}
    return GatewayState(
        generation=generation.number,
        loaded_at=datetime.fromtimestamp(generation.loaded_at, UTC),
        draining=drain.draining,
        live=drain.live,
        guarded=guarded,
        models={
            name: _model(model, admission, watched, metrics)
            for name, model in generation.models.items()
        },
    )


def _model(
    model: Model,
    admission: Admission,
    watched: dict[tuple[str, str], DiscoveryState],
    metrics: Metrics,
) -> ModelReport:
    controller = admission.of(model.name)
    return ModelReport(
        aliases=list(model.aliases),
        inflight=controller.inflight,
        inflight_tokens=controller.inflight_tokens,
        queued=controller.queued,
        brown_out=controller.under_pressure,
        variants={
            name: _variant(
                variant,
                watched.get((model.name, name)),
                metrics.variant(model.name, name).latencies.report(),
            )
            for name, variant in model.variants.items()
        },
    )


def _variant(
    variant: Variant, state: DiscoveryState | None, latency: LatencyReport
) -> VariantReport:
    return VariantReport(
        weight=variant.weight,
        served_name=variant.served_name,
        discovery=None
        if state is None
        else DiscoveryReport(
            source=state.source,
            workers=len(state.workers),
            failures=state.failures,
            detail=state.detail,
        ),
        latency=latency,
        workers=[worker_report(worker) for worker in variant.workers],
    )


def worker_report(worker: Worker) -> WorkerReport:
    """Copy the state of one worker."""
    reported = worker.reported
    return WorkerReport(
        name=worker.name,
        url=worker.settings.url,
        state=worker.state.value,
        detail=worker.detail,
        since=datetime.fromtimestamp(worker.since, UTC),
        draining=worker.draining,
        breaker=worker.breaker.state,
        outstanding=worker.outstanding,
        outstanding_tokens=worker.outstanding_tokens,
        idle_connections=worker.client.idle,
        reported=None
        if reported is None
        else ReportedState(
            running=reported.running, waiting=reported.waiting, kv_usage=reported.kv_usage
        ),
    )
