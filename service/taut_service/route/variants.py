"""A public model and its variants: the same model in several precisions, each with its workers.

A request goes to one variant, by weight or, where the model is sticky, by a hash of its caller or
session over the weights, so that replicas agree and a change of weights moves only the share it
must. Another variant is used only while the first has no worker for the request.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Mapping

from taut_service.admit.request_checks import ModelLimits
from taut_service.config.settings import Affinity, ModelSettings, Retries, VariantSettings
from taut_service.route.balance import Balancer
from taut_service.route.rendezvous import rank_by_weight
from taut_service.route.retry_budget import RetryBudget
from taut_service.worker.worker import Worker


class UnknownVariantError(Exception):
    """A model has no variant of that name; ``str()`` says which it has."""


class Variant:
    """One precision of a model.

    Args:
        settings: with every default filled in (:meth:`ModelSettings.every_variant`).
        affinity: the model's.
        workers: that serve it now; replaced as discovery finds others.
        rng: seeded by tests.
    """

    def __init__(
        self,
        settings: VariantSettings,
        affinity: Affinity,
        workers: tuple[Worker, ...],
        rng: random.Random | None = None,
    ) -> None:
        self.settings = settings
        self.name = settings.name
        self.header = settings.name.encode()
        self.served_name = settings.served_name or ""
        self.weight = settings.weight
        self.workers = workers
        self._balancer = Balancer(settings.name, affinity, rng)

    @property
    def has_ready(self) -> bool:
        """Whether any worker works and is not drained."""
        for worker in self.workers:  # noqa: SIM110 - a generator costs more than the look
            if worker.ready:
                return True
        return False

    def choose(
        self,
        tried: Collection[Worker] = (),
        keys: Iterable[int] = (),
        *,
        last_resort: bool = False,
    ) -> Worker | None:
        """Return the worker for a request, as :meth:`.balance.Balancer.choose` does."""
        return self._balancer.choose(self.workers, tried, keys, last_resort=last_resort)


class Model:
    """One public model.

    Args:
        settings: of the model.
        limits: what a request may ask of it.
        variants: in the order of the configuration.
        retries: what fills the budget.
        rng: seeded by tests.
    """

    def __init__(
        self,
        settings: ModelSettings,
        limits: ModelLimits,
        variants: tuple[Variant, ...],
        retries: Retries,
        rng: random.Random | None = None,
    ) -> None:
        self.settings = settings
        self.name = settings.name
        self.aliases = settings.aliases
        self.limits = limits
        self.variants = {variant.name: variant for variant in variants}
        self.budget = RetryBudget(retries)
        self._only = variants[0] if len(variants) == 1 else None
        self._total = sum(variant.weight for variant in variants)
        # Not for secrets: which requests are a canary's share.
        self._rng = rng or random.Random()  # noqa: S311

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each variant now."""
        return {name: variant.weight for name, variant in self.variants.items()}

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Change the share of some variants, from the next request on.

        Args:
            weights: variant name → weight, 0 or more; variants not named keep theirs.

        Raises:
            UnknownVariantError: a name is not a variant of this model.
            ValueError: a weight is negative or not finite, or none would be positive.
        """
        self.check_weights(weights)
        for name, weight in weights.items():
            self.variants[name].weight = float(weight)
        self._total = sum(variant.weight for variant in self.variants.values())

    def check_weights(self, weights: Mapping[str, float]) -> None:
        """Raise what :meth:`set_weights` would."""
        for name, weight in weights.items():
            self.variant(name)
            if not (math.isfinite(weight) and weight >= 0):
                raise ValueError(f"the weight of {name!r} must be a finite number, 0 or more")
        if not any({**self.weights, **weights}.values()):
            raise ValueError(f"the weights of {self.name!r} would all be 0")

    def variant(self, name: str) -> Variant:
        """Return a variant.

        Raises:
            UnknownVariantError: there is none of that name.
        """
        found = self.variants.get(name)
        if found is None:
            known = ", ".join(self.variants)
            raise UnknownVariantError(f"{self.name!r} has no variant {name[:64]!r}, only {known}")
        return found

    def choose(self, sticky_key: bytes | None = None) -> Variant:
        """Return the variant a request belongs to.

        Args:
            sticky_key: what keeps it at one variant; None draws by weight.

        Returns:
            A variant with a positive weight, whether or not it has a worker now.
        """
        if self._only is not None:
            return self._only
        if sticky_key is not None:
            return self.variants[rank_by_weight(sticky_key, self.weights.items())[0]]
        point = self._rng.random() * self._total
        for variant in self.variants.values():
            point -= variant.weight
            if point < 0:
                return variant
        # Reached by rounding only.
        return max(self.variants.values(), key=lambda variant: variant.weight)

    def others(self, chosen: Variant, sticky_key: bytes | None = None) -> list[Variant]:
        """Return where a request may go while its own variant has no worker for it, best first.

        Variants with weight 0 get no request that did not ask for them.
        """
        weights = self.weights
        if sticky_key is not None:
            names = rank_by_weight(sticky_key, weights.items())
        else:
            names = sorted((name for name in weights if weights[name]), key=lambda n: -weights[n])
        return [self.variants[name] for name in names if name != chosen.name]
