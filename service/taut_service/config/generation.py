"""Everything that one configuration describes, built once and replaced as a whole by a reload."""

from __future__ import annotations

import time
from collections.abc import Iterator

from taut_service.admit.request_checks import ModelLimits
from taut_service.config.settings import ModelSettings, Settings, VariantSettings, WorkerSettings
from taut_service.route.fleet import Fleet
from taut_service.route.variants import Model, Variant
from taut_service.worker.worker import Worker


class Generation:
    """The objects of one configuration. A request uses the one that was current when it came.

    Args:
        number: 1 for the first, counted up by each reload.
        settings: the configuration.
        models: in its order.
    """

    def __init__(self, number: int, settings: Settings, models: tuple[Model, ...]) -> None:
        self.number = number
        self.loaded_at = time.time()
        self.settings = settings
        self.models = {model.name: model for model in models}
        self.only = models[0].name if len(models) == 1 else None
        """The model of requests that name none; None if there are several."""
        self.names = {name: model for model in models for name in (model.name, *model.aliases)}

    def workers(self) -> Iterator[tuple[Model, Variant, Worker]]:
        """Yield every worker with what it serves, in the order of the configuration."""
        for model in self.models.values():
            for variant in model.variants.values():
                for worker in variant.workers:
                    yield model, variant, worker

    def worker(self, name: str) -> Worker | None:
        """Return a worker by its name."""
        return next((worker for _, _, worker in self.workers() if worker.name == name), None)


def build_generation(
    number: int, settings: Settings, fleet: Fleet, previous: Generation | None = None
) -> Generation:
    """Build the objects of a configuration.

    Args:
        number: of the generation.
        settings: the configuration.
        fleet: gives the workers, those that stay as the same objects.
        previous: what discovery has found is taken over from it.

    Returns:
        The generation; nothing points at it yet.
    """

    def variant_of(model: ModelSettings, entry: VariantSettings) -> Variant:
        workers = entry.workers or _found_before(previous, model.name, entry)
        served_name = entry.served_name or model.name
        return Variant(
            entry,
            model.affinity,
            tuple(fleet.employ(w, served_name, entry.golden, settings) for w in workers),
        )

    per_token, choices = settings.limits.chars_per_token, settings.limits.max_choices
    return Generation(
        number,
        settings,
        tuple(
            Model(
                model,
                ModelLimits(model.max_model_len, model.max_model_len * per_token, choices),
                tuple(variant_of(model, entry) for entry in model.every_variant()),
                settings.routing.retries,
            )
            for model in settings.models
        ),
    )


def _found_before(
    previous: Generation | None, model: str, entry: VariantSettings
) -> tuple[WorkerSettings, ...]:
    """Return what discovery had found for a variant whose discovery has not changed."""
    known = previous.models.get(model) if previous is not None else None
    variant = known.variants.get(entry.name) if known is not None else None
    if variant is None or variant.settings.discover != entry.discover:
        return ()
    return tuple(worker.settings for worker in variant.workers)
