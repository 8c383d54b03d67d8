"""Replaces the configuration while requests run: a validated new one at once, or none of it.

Requests under way keep the objects they began with. Workers that stay keep their state and their
connections; those that go finish what they hold. What belongs to the process and not to the
configuration, such as the listening address, cannot change: a file that changes it is refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from taut_service.admit.admission import Admission
from taut_service.admit.auth import ApiKeys
from taut_service.config.generation import Generation, build_generation
from taut_service.config.settings import Settings, SettingsError, WorkerSettings, load_settings
from taut_service.config.worker_keys import read_worker_keys
from taut_service.route.fleet import Fleet

logger = logging.getLogger(__name__)
_FIXED = (
    *("listen", "admin", "rate_limits", "tracing", "access_log", "drain_timeout_s"),
    *("guard", "rollout"),
)
"""Sections that are read once, when the process starts."""


class Reloader:
    """Holds the current generation and makes the next one. Belongs to one event loop.

    Args:
        settings: the first configuration.
        path: the file it came from; None cannot be reloaded.
        fleet: the workers.
        keys: callers, told of a new configuration.
        admission: bounds, told of a new configuration.
        on_outcome: told of each reload whether it was good.
    """

    def __init__(
        self,
        settings: Settings,
        path: Path | None,
        fleet: Fleet,
        keys: ApiKeys,
        admission: Admission,
        on_outcome: Callable[[bool], None] = lambda good: None,
    ) -> None:
        self.path = path
        self._on_outcome = on_outcome
        self._fleet, self._keys, self._admission = fleet, keys, admission
        self._one_at_a_time = asyncio.Lock()
        self._listeners: list[Callable[[Generation], None]] = []
        fleet.keys = read_worker_keys(settings)
        self.current = build_generation(1, settings, fleet)

    def on_change(self, listener: Callable[[Generation], None]) -> None:
        """Call a function after each swap, with the new generation."""
        self._listeners.append(listener)

    async def reload(self) -> Generation:
        """Read the file again and put it in force.

        Returns:
            The new generation.

        Raises:
            SettingsError: the file is wrong or changes what cannot change; one line a reason. The
                old configuration stays in force, all of it.
        """
        async with self._one_at_a_time:
            try:
                if self.path is None:
                    raise SettingsError("the gateway was started without a configuration file")
                settings = await asyncio.to_thread(load_settings, self.path)
                _refuse_fixed(self.path, self.current.settings, settings)
                worker_keys = await asyncio.to_thread(read_worker_keys, settings)
                self._keys.apply(settings)
            except SettingsError as error:
                self._on_outcome(False)
                for line in str(error).splitlines():
                    logger.error("configuration not reloaded: %s", line)
                raise
            self._fleet.keys = worker_keys
            generation = self._put_in_force(settings)
            self._on_outcome(True)
            return generation

    def _put_in_force(self, settings: Settings) -> Generation:
        # No await in here: a request sees the old configuration or the new one.
        self._admission.apply(settings)
        generation = build_generation(
            self.current.number + 1, settings, self._fleet, previous=self.current
        )
        self.current = generation
        self._fleet.keep_only({worker for _, _, worker in generation.workers()})
        for listener in self._listeners:
            listener(generation)
        logger.info("configuration reloaded: generation %d", generation.number)
        return generation

    def discovered(self, model: str, variant: str, found: Sequence[WorkerSettings]) -> bool:
        """Take over what discovery has found: new workers in, others out, those that stay stay.

        Args:
            model: public name.
            variant: one of its variants, with ``discover``.
            found: all workers it has now.

        Returns:
            False if the current configuration has no such variant to be discovered: stop looking.
        """
        current = self.current
        known = current.models.get(model)
        target = known.variants.get(variant) if known is not None else None
        if known is None or target is None or target.settings.discover is None:
            return False
        target.workers = tuple(
            self._fleet.employ(entry, target.served_name, target.settings.golden, current.settings)
            for entry in found
        )
        self._fleet.keep_only({worker for _, _, worker in current.workers()})
        return True


def _refuse_fixed(path: Path, old: Settings, new: Settings) -> None:
    changed = [name for name in _FIXED if getattr(old, name) != getattr(new, name)]
    if changed:
        raise SettingsError(
            "\n".join(
                f"{path}: {name}: cannot change while the gateway runs; restart it"
                for name in changed
            )
        )
