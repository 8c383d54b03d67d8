"""Puts the gateway together: :func:`create_app` and the lifespan, nothing else."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TextIO

from fastapi import FastAPI

from taut_service.access_log import AccessLog
from taut_service.admission import AdmissionController
from taut_service.api import create_api
from taut_service.auth import ApiKeys
from taut_service.call import ROUTES
from taut_service.drain import Drain
from taut_service.front import Front, FrontSettings
from taut_service.gateway import Gateway
from taut_service.metrics import UNKNOWN_MODEL, Metrics
from taut_service.pool import WorkerPool, build_pool
from taut_service.prober import Prober, ProbeTimes
from taut_service.request_checks import ModelLimits
from taut_service.settings import Settings

logger = logging.getLogger(__name__)


def create_app(
    settings: Settings,
    *,
    probe_times: ProbeTimes | None = None,
    log_stream: TextIO | None = None,
) -> Front:
    """Build the ASGI application.

    Args:
        settings: the configuration.
        probe_times: how often workers are probed; tests make it quicker.
        log_stream: where the access log goes; standard output if None.

    Returns:
        The outermost ASGI callable; its lifespan must run.
    """
    metrics = Metrics()
    admission = AdmissionController(settings.admission)
    drain = Drain()
    pool = build_pool(settings, on_stale=metrics.retries["stale"].inc)
    metrics.watch(admission, pool)
    for route in ROUTES:
        for model in (UNKNOWN_MODEL, *(model.name for model in settings.models)):
            metrics.route(model, route.name)
    access_log = AccessLog((log_stream or sys.stdout) if settings.access_log else None)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        tasks = _start_probers(settings, pool, probe_times or ProbeTimes())
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            pool.close()
            access_log.flush()

    return Front(
        create_api(settings, pool, drain, metrics, lifespan),
        {route.path: route for route in ROUTES},
        Gateway(pool, admission, metrics),
        FrontSettings(_model_limits(settings), settings.limits, settings.timeouts),
        ApiKeys(settings.api_keys),
        drain,
        metrics,
        access_log,
    )


def _model_limits(settings: Settings) -> dict[str, ModelLimits]:
    per_token = settings.limits.chars_per_token
    return {
        model.name: ModelLimits(model.max_model_len, model.max_model_len * per_token)
        for model in settings.models
    }


def _start_probers(
    settings: Settings, pool: WorkerPool, times: ProbeTimes
) -> list[asyncio.Task[None]]:
    def report(task: asyncio.Task[None]) -> None:
        # A defect of ours: the worker is out of routing (see Prober.run), and the log says why.
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a prober ended", exc_info=error)

    golden = {model.name: model.golden for model in settings.models}
    tasks = [
        asyncio.create_task(Prober(worker, model, golden[model], times).run())
        for model, worker in pool.all()
    ]
    for task in tasks:
        task.add_done_callback(report)
    return tasks
