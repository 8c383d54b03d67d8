"""A gateway takes connections only once it knows its workers, or after a moment's patience.

One that listens before its first probes are back answers 503 to requests that its workers could
have served. Until it listens a balancer in front of it uses its other replicas.
"""

from __future__ import annotations

import asyncio
import contextlib

from taut_service.config.reload import Reloader
from taut_service.route.variants import Model
from taut_service.worker.discovery.supervisor import Supervisor

_POLL_S = 0.01


async def look_at_workers(reloader: Reloader, discovery: Supervisor, patience_s: float) -> None:
    """Wait until it is known of every model whether a worker is ready for it.

    That is so as soon as one is ready, or each has been probed and each discovery has asked once.

    Args:
        reloader: holds the configuration in force.
        discovery: looks for workers.
        patience_s: longest wait; a worker that hangs must not keep ``/health/live`` away.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            while not _all_known(reloader, discovery):  # noqa: ASYNC110 - three things change it
                await asyncio.sleep(_POLL_S)


def _all_known(reloader: Reloader, discovery: Supervisor) -> bool:
    asking = {model for model, _, state in discovery.states() if not state.asked}
    models = reloader.current.models.values()
    return all(_known(model, complete=model.name not in asking) for model in models)


def _known(model: Model, *, complete: bool) -> bool:
    workers = [worker for variant in model.variants.values() for worker in variant.workers]
    if any(worker.ready for worker in workers):
        return True
    return complete and all(worker.probed for worker in workers)
