"""Makes the store that the configuration asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from taut_service.admit.limits.bucket import LimitStore
from taut_service.admit.limits.memory import MemoryLimitStore
from taut_service.config.settings import RateLimits, SettingsError
from taut_service.watch.gauges import Reading, Source


def build_store(settings: RateLimits) -> LimitStore:
    """Make the store.

    Args:
        settings: which one, and where.

    Returns:
        It; :meth:`.bucket.LimitStore.open` is to be called in the event loop.

    Raises:
        SettingsError: what it needs is not installed, or cannot be read.
    """
    if settings.redis is None:
        return MemoryLimitStore()
    try:
        # Not imported without need: a gateway of its own does without the package.
        from taut_service.admit.limits.redis_store import RedisLimitStore
    except ModuleNotFoundError as error:
        raise SettingsError(
            "rate_limits.store: redis needs the Python package redis: pip install 'taut[redis]'"
        ) from error
    return RedisLimitStore(settings.redis)


def read_store(store: LimitStore, keys: Callable[[], int]) -> Source:
    """Return a source of gauges.

    Args:
        store: of rate limits.
        keys: how many API keys are in force.
    """

    def source() -> Iterator[Reading]:
        yield Reading("limit_store_up", (), store.up)
        yield Reading("limit_store_losses", (), store.losses)
        yield Reading("api_keys", (), keys())

    return source
