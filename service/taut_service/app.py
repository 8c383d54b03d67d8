"""Puts the gateway together: :func:`create_app` and the lifespan, nothing else."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

from fastapi import FastAPI

from taut_service.admit.admission import Admission
from taut_service.admit.auth import ApiKeys
from taut_service.admit.first_look import look_at_workers
from taut_service.admit.key_file import KeyFileWatch
from taut_service.admit.limits.limiter import RateLimiter
from taut_service.admit.limits.store import build_store, read_store
from taut_service.call import ROUTES
from taut_service.config.reload import Reloader
from taut_service.config.settings import Settings
from taut_service.guard.guard import Guard
from taut_service.http.api import Lifespan, create_api
from taut_service.http.front import Front
from taut_service.rollout.controller import Rollouts
from taut_service.rollout.journal import build_journal
from taut_service.route.fleet import Fleet
from taut_service.route.gateway import Gateway
from taut_service.watch.access_log import AccessLog
from taut_service.watch.drain import Drain
from taut_service.watch.guard_metrics import GuardMetrics, read_guard
from taut_service.watch.key_usage import KeyUsage
from taut_service.watch.metrics import Metrics
from taut_service.watch.readings import read_admission, read_discovery, read_drain, read_workers
from taut_service.watch.rollout_metrics import read_rollouts
from taut_service.watch.tracing import Tracing
from taut_service.worker.discovery.supervisor import Supervisor
from taut_service.worker.prober import ProbeTimes


@dataclass(frozen=True, slots=True)
class _Parts:
    """What lives as long as the process."""

    metrics: Metrics
    usage: KeyUsage
    admission: Admission
    keys: ApiKeys
    limiter: RateLimiter
    drain: Drain
    fleet: Fleet
    reloader: Reloader
    discovery: Supervisor
    access_log: AccessLog
    tracing: Tracing | None
    guard: Guard | None
    rollouts: Rollouts | None


def create_app(
    settings: Settings,
    *,
    path: Path | None = None,
    probe_times: ProbeTimes | None = None,
    log_stream: TextIO | None = None,
) -> Front:
    """Build the ASGI application.

    Args:
        settings: the configuration.
        path: the file it came from, to be read again by a reload.
        probe_times: how often workers are probed; tests make it quicker.
        log_stream: where the access log goes; standard output if None.

    Returns:
        The outermost ASGI callable; its lifespan must run.

    Raises:
        SettingsError: a file that the configuration names cannot be used.
    """
    times = probe_times or ProbeTimes()
    parts = _build_parts(settings, path, times, log_stream or sys.stdout)
    _connect(parts, settings)
    front = Front(
        create_api(
            parts.reloader, parts.drain, parts.metrics, _lifespan_of(parts, times.first_look_s)
        ),
        {path: route for route in ROUTES for path in (route.path, route.path + "/")},
        Gateway(parts.reloader, parts.admission, parts.metrics),
        parts.reloader,
        parts.keys,
        parts.limiter,
        parts.drain,
        parts.metrics,
        parts.usage,
        parts.access_log,
        parts.tracing,
        parts.guard,
    )
    if settings.admin is not None:
        front.admin = _admin_of(parts, settings.admin.host)
    return front


def _build_parts(
    settings: Settings, path: Path | None, probe_times: ProbeTimes, log_stream: TextIO
) -> _Parts:
    metrics = Metrics()
    usage = KeyUsage(metrics.families, settings.metrics.max_keys)
    admission = Admission(settings)
    keys = ApiKeys(settings)
    fleet = Fleet(probe_times, metrics.retries["stale"].inc)
    reloader = Reloader(
        settings, path, fleet, keys, admission, partial(metrics.reloaded, "configuration")
    )
    guard = _guard_of(settings, reloader, admission, metrics)
    log = settings.access_log
    return _Parts(
        metrics=metrics,
        usage=usage,
        admission=admission,
        keys=keys,
        limiter=RateLimiter(
            build_store(settings.rate_limits), lambda limit: metrics.rate_limited[limit].inc()
        ),
        drain=Drain(),
        fleet=fleet,
        reloader=reloader,
        discovery=Supervisor(reloader.discovered),
        access_log=AccessLog(
            log_stream if log.enabled else None, log.ratio, metrics.log_lines_dropped.inc
        ),
        tracing=Tracing(settings.tracing) if settings.tracing is not None else None,
        guard=guard,
        rollouts=_rollouts_of(settings, guard, reloader, metrics),
    )


def _guard_of(
    settings: Settings, reloader: Reloader, admission: Admission, metrics: Metrics
) -> Guard | None:
    if settings.guard is None:
        return None
    guard = Guard(settings.guard, reloader, admission, GuardMetrics(metrics.families))
    metrics.add_source(read_guard(guard))
    return guard


def _rollouts_of(
    settings: Settings, guard: Guard | None, reloader: Reloader, metrics: Metrics
) -> Rollouts | None:
    if settings.rollout is None or guard is None:
        return None
    journal = build_journal(settings.rollout)
    rollouts = Rollouts(settings.rollout, journal, guard, reloader, metrics)
    metrics.add_source(read_rollouts(rollouts))
    return rollouts


def _connect(parts: _Parts, settings: Settings) -> None:
    """Have metrics read the parts, and metrics and discovery follow the configuration."""
    metrics, reloader, keys = parts.metrics, parts.reloader, parts.keys
    for source in (
        read_workers(reloader),
        read_admission(parts.admission, reloader),
        read_drain(parts.drain),
        read_discovery(parts.discovery),
        read_store(parts.limiter.store, lambda: len(keys)),
    ):
        metrics.add_source(source)
    routes = [route.name for route in ROUTES]
    metrics.apply(settings.models, routes)
    reloader.on_change(lambda generation: metrics.apply(generation.settings.models, routes))
    reloader.on_change(lambda generation: parts.usage.follow(generation.settings))
    reloader.on_change(lambda generation: parts.discovery.follow(generation.settings))


def _lifespan_of(parts: _Parts, first_look_s: float) -> Lifespan:
    keys = parts.keys
    key_watch = KeyFileWatch(
        lambda: keys.file, keys.replace_file_keys, partial(parts.metrics.reloaded, "keys")
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        parts.fleet.start()
        parts.discovery.follow(parts.reloader.current.settings)
        await parts.limiter.store.open()
        watching = key_watch.start()
        if parts.guard is not None:
            parts.guard.start()
        if parts.rollouts is not None:
            await parts.rollouts.start_watching()
        await look_at_workers(parts.reloader, parts.discovery, first_look_s)
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.wait([watching])
            if parts.rollouts is not None:
                await parts.rollouts.close()
            if parts.guard is not None:
                await parts.guard.close()
            await parts.discovery.close()
            await parts.fleet.close()
            await parts.limiter.store.close()
            if parts.tracing is not None:
                await asyncio.to_thread(parts.tracing.close)
            await parts.access_log.close()

    return lifespan


def _admin_of(parts: _Parts, host: str) -> FastAPI:
    # Imported late: its models cost a start without an admin port 50 ms.
    from taut_service.rollout.commands import RolloutCommands
    from taut_service.watch.admin import Controls, create_admin
    from taut_service.watch.admin_rollout import RolloutControls

    rollouts, reloader = parts.rollouts, parts.reloader
    rollout = None
    if parts.guard is not None:
        commands = None if rollouts is None else RolloutCommands(rollouts, reloader)
        rollout = RolloutControls(parts.guard, reloader, rollouts, commands)
    return create_admin(
        Controls(
            reloader=parts.reloader,
            admission=parts.admission,
            discovery=parts.discovery,
            drain=parts.drain,
            keys=parts.keys,
            usage=parts.usage,
            metrics=parts.metrics,
            host=host,
            rollout=rollout,
        )
    )
