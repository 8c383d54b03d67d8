"""``/health/live``, ``/health/ready``, ``/health/drain``: what probes and stop hooks ask."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

from fastapi import FastAPI, Response
from pydantic import BaseModel

from taut_service.config.reload import Reloader
from taut_service.watch.drain import Drain
from taut_service.worker.worker import Worker, WorkerState


class Liveness(BaseModel):
    """The process answers."""

    status: Literal["live"] = "live"


class WorkerHealth(BaseModel):
    """One worker, since when it is as it is, and why."""

    name: str
    state: str
    since: str
    detail: str
    outstanding: int


class ModelHealth(BaseModel):
    """A model is ready when one of its workers is."""

    ready: bool
    workers: list[WorkerHealth]


class Readiness(BaseModel):
    """Whether this gateway should get requests."""

    status: Literal["ready", "not_ready", "draining"]
    models: dict[str, ModelHealth]


class Emptiness(BaseModel):
    """How many requests are under way, and whether new ones are to stay away."""

    draining: bool
    live: int


def add_health(api: FastAPI, reloader: Reloader, drain: Drain) -> None:
    """Add the three routes.

    Args:
        api: the application.
        reloader: holds the configuration in force.
        drain: whether the gateway is ending, and what is under way.
    """

    # What clients of vLLM ask before they begin; SageMaker asks /ping.
    @api.get("/health", include_in_schema=False)
    @api.get("/ping", include_in_schema=False)
    @api.post("/ping", include_in_schema=False)
    async def able(response: Response) -> Readiness:
        return await ready(response)

    @api.get("/health/live", tags=["operations"], summary="The process answers")
    async def live() -> Liveness:
        return Liveness()

    @api.get(
        "/health/ready",
        tags=["operations"],
        summary="Every model has a ready worker",
        responses={503: {"model": Readiness, "description": "Not ready, or draining"}},
    )
    async def ready(response: Response) -> Readiness:
        report = readiness(reloader, drain)
        response.status_code = 200 if report.status == "ready" else 503
        return report

    @api.get(
        "/health/drain",
        tags=["operations"],
        summary="No request is under way",
        responses={503: {"model": Emptiness, "description": "Requests are under way"}},
    )
    async def empty(response: Response) -> Emptiness:
        response.status_code = 503 if drain.live else 200
        return Emptiness(draining=drain.draining, live=drain.live)


def readiness(reloader: Reloader, drain: Drain) -> Readiness:
    """Say how each worker is.

    Args:
        reloader: holds the configuration in force.
        drain: whether the gateway is ending.
    """
    generation = reloader.current
    models = {name: ModelHealth(ready=False, workers=[]) for name in generation.models}
    for model, _, worker in generation.workers():
        entry = models[model.name]
        entry.ready = entry.ready or worker.ready
        entry.workers.append(_describe(worker, draining=drain.draining))
    every = all(entry.ready for entry in models.values())
    status: Literal["ready", "not_ready"] = "ready" if every else "not_ready"
    return Readiness(status="draining" if drain.draining else status, models=models)


def _describe(worker: Worker, *, draining: bool) -> WorkerHealth:
    works = worker.state is WorkerState.READY
    state = WorkerState.DRAINING if works and (draining or worker.draining) else worker.state
    return WorkerHealth(
        name=worker.name,
        state=state.value,
        since=datetime.fromtimestamp(worker.since, UTC).isoformat(timespec="milliseconds"),
        detail=worker.detail,
        outstanding=worker.outstanding,
    )
