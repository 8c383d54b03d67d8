"""Counts requests. Children of the families are looked up once and kept.

``labels()`` costs more than ``inc()``, so there is one object for each (model, route), each model
and each (model, variant) of the configuration; :meth:`Metrics.apply` makes those of a new
configuration and drops those of the old one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.exposition import generate_latest

from taut_service.config.settings import ModelSettings, Price
from taut_service.http.sse import Usage
from taut_service.watch.families import STATUS_CLASSES, Families
from taut_service.watch.gauges import Gauges, Source
from taut_service.watch.latencies import Latencies
from taut_service.watch.scrape import Scrape
from taut_service.watch.tallies import TallyGroup
from taut_service.watch.tally import CounterTally

UNKNOWN_MODEL = "unknown"
"""Label of requests that name no configured model."""


class ModelMetrics:
    """The children of one model.

    Args:
        families: where they belong.
        model: a configured name, or ``unknown``.
    """

    def __init__(self, families: Families, model: str) -> None:
        self._tallies = tallies = families.tallies.group()
        counter, histogram = tallies.counter, tallies.histogram
        self.queue_wait = histogram(families.queue_wait.labels(model))
        self.prompt_tokens = counter(families.prompt_tokens.labels(model))
        self.generated_tokens = counter(families.generated_tokens.labels(model))
        self.retries_refused = families.retries_refused.labels(model)
        self.hedges = families.hedges.labels(model)
        self.hedges_won = families.hedges_won.labels(model)


class RouteMetrics:
    """The children of one model on one route.

    Args:
        families: where they belong.
        of_model: the model's own.
        model: a configured name, or ``unknown``.
        route: a short fixed name.
    """

    def __init__(self, families: Families, of_model: ModelMetrics, model: str, route: str) -> None:
        self._tallies = tallies = families.tallies.group()
        counter, histogram = tallies.counter, tallies.histogram
        self._model = of_model
        self._requests = _by_status(tallies, families.requests, model, route)
        self._duration = histogram(families.duration.labels(model, route))
        self._first_token = histogram(families.first_token.labels(model, route))
        self._inter_token = histogram(families.inter_token.labels(model, route))
        self._disconnects = counter(families.disconnects.labels(model, route))

    def finished(self, status: int, seconds: float, usage: Usage | None) -> None:
        """Count one answered request.

        Args:
            status: the HTTP status sent.
            seconds: from arrival to the last byte.
            usage: tokens, where the worker told.
        """
        self._requests[STATUS_CLASSES[status // 100 - 2]].inc()
        self._duration.observe(seconds)
        if usage is not None:
            self._model.prompt_tokens.inc(usage.prompt_tokens)
            self._model.generated_tokens.inc(usage.completion_tokens)

    def abandoned(self) -> None:
        """Count one request whose client left."""
        self._requests["disconnect"].inc()
        self._disconnects.inc()

    def waited(self, seconds: float) -> None:
        """Record the time a request spent before it was admitted."""
        self._model.queue_wait.observe(seconds)

    def first_token(self, seconds: float) -> None:
        """Record arrival to first event of a stream."""
        self._first_token.observe(seconds)

    def next_tokens(self, seconds: float, events: int) -> None:
        """Record the mean pause between the events of one read of a stream."""
        self._inter_token.observe(seconds / events)


class Served(Protocol):
    """Told of a variant's requests as they are counted."""

    def finished(self, status: int) -> None:
        """Take note of an answered request and its HTTP status."""

    def streamed(self, first_token_s: float, per_token_s: float) -> None:
        """Take note of the pace of a stream."""


class VariantMetrics:
    """The children of one variant of a model: what comparing two variants needs.

    Args:
        families: where they belong.
        model: a configured name.
        variant: one of its variants.
    """

    def __init__(self, families: Families, model: str, variant: str) -> None:
        self._tallies = tallies = families.tallies.group()
        counter, histogram = tallies.counter, tallies.histogram
        self._requests = _by_status(tallies, families.variant_requests, model, variant)
        self._duration = histogram(families.variant_duration.labels(model, variant))
        self._first_token = histogram(families.variant_first_token.labels(model, variant))
        self._per_token = histogram(families.variant_per_token.labels(model, variant))
        self._prompt_tokens = counter(families.variant_prompt_tokens.labels(model, variant))
        self._generated_tokens = counter(families.variant_generated_tokens.labels(model, variant))
        self._cost = counter(families.variant_cost.labels(model, variant))
        self.fallbacks = families.variant_fallbacks.labels(model, variant)
        self.listener: Served | None = None
        self.latencies = Latencies()
        self.price(Price())

    def price(self, price: Price) -> None:
        """Take another price from the next request on."""
        self._per_prompt_token = price.prompt_per_million / 1e6
        self._per_generated_token = price.completion_per_million / 1e6

    def finished(self, status: int, seconds: float, usage: Usage | None) -> None:
        """Count one request that a worker of the variant took.

        Args:
            status: the HTTP status sent, 0 if the client left.
            seconds: from arrival to the last byte.
            usage: tokens, where the worker told.
        """
        if status:
            self._requests[STATUS_CLASSES[status // 100 - 2]].inc()
            self._duration.observe(seconds)
            if status < 400:
                self.latencies.answered(seconds)
            if self.listener is not None:
                self.listener.finished(status)
        else:
            self._requests["disconnect"].inc()
        if usage is not None:
            self._prompt_tokens.inc(usage.prompt_tokens)
            self._generated_tokens.inc(usage.completion_tokens)
            self._cost.inc(self.cost_of(usage))

    def cost_of(self, usage: Usage | None) -> float:
        """Return what tokens cost, in the unit of the configured price."""
        if usage is None:
            return 0.0
        cost = usage.prompt_tokens * self._per_prompt_token
        return cost + usage.completion_tokens * self._per_generated_token

    def streamed(self, first_token_s: float, rest_s: float, events: int) -> None:
        """Record the pace of one stream.

        Args:
            first_token_s: arrival to first event.
            rest_s: first event to last event.
            events: number of events.
        """
        self._first_token.observe(first_token_s)
        if events < 2:
            self.latencies.streamed(first_token_s, None)
            return
        per_token_s = rest_s / (events - 1)
        self._per_token.observe(per_token_s)
        self.latencies.streamed(first_token_s, per_token_s)
        if self.listener is not None:
            self.listener.streamed(first_token_s, per_token_s)


class Metrics:
    """The registry and what counts into it. One per application, never global."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.families = families = Families(self.registry)
        self.retries = families.retries
        self.rejected = families.rejected
        self.rate_limited = families.rate_limited
        self.clients_closed = families.clients_closed
        self.log_lines_dropped = families.log_lines_dropped
        self._gauges = Gauges()
        self.registry.register(self._gauges)
        # Memory, CPU time, open files and start time of this process, from /proc.
        ProcessCollector(namespace="taut", registry=self.registry)
        self._scrape = Scrape(self.registry, self._gauges)
        self._models: dict[str, ModelMetrics] = {}
        self._routes: dict[tuple[str, str], RouteMetrics] = {}
        self._variants: dict[tuple[str, str], VariantMetrics] = {}
        self._dropped_models: list[str] = []
        self._dropped_routes: list[tuple[str, str]] = []
        self._dropped_variants: list[tuple[str, str]] = []

    def add_source(self, source: Source) -> None:
        """Read gauges from one more owner at scrape time."""
        self._gauges.add(source)

    def model(self, model: str) -> ModelMetrics:
        """Return the kept children of a configured model, or ``unknown``."""
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = ModelMetrics(self.families, model)
        return found

    def route(self, model: str, route: str) -> RouteMetrics:
        """Return the kept children of a configured model, or ``unknown``, on a route."""
        key = (model, route)
        found = self._routes.get(key)
        if found is None:
            found = RouteMetrics(self.families, self.model(model), model, route)
            self._routes[key] = found
        return found

    def variant(self, model: str, variant: str) -> VariantMetrics:
        """Return the kept children of a configured variant."""
        key = (model, variant)
        found = self._variants.get(key)
        if found is None:
            found = self._variants[key] = VariantMetrics(self.families, model, variant)
        return found

    def variant_fallback(self, model: str, variant: str) -> None:
        """Count a request that ``variant`` took because its own had no worker for it."""
        self.variant(model, variant).fallbacks.inc()

    def retries_refused(self, model: str) -> None:
        """Count a retry that was not made because the model's budget was spent."""
        self.model(model).retries_refused.inc()

    def hedged(self, model: str) -> None:
        """Count a second copy of a request."""
        self.model(model).hedges.inc()

    def hedge_won(self, model: str) -> None:
        """Count a second copy that answered first."""
        self.model(model).hedges_won.inc()

    def reloaded(self, what: str, good: bool) -> None:
        """Count a changed file: taken into use, or refused.

        Args:
            what: ``configuration``, ``keys`` or ``certificate``.
            good: whether it is in use now.
        """
        self.families.reloads[what, good].inc()

    def apply(self, models: Sequence[ModelSettings], routes: Iterable[str]) -> None:
        """Have exactly the series of a configuration: make the new ones, drop the others.

        A request of the old configuration that is still under way counts into series that nobody
        sees any more: what was dropped is kept, out of sight, until the next call.

        Args:
            models: that are served from now on.
            routes: metric names of the routes.
        """
        names = (UNKNOWN_MODEL, *(model.name for model in models))
        wanted_routes = {(name, route) for name in names for route in routes}
        prices = {
            (model.name, variant.name): variant.price
            for model in models
            for variant in model.every_variant()
        }
        families = self.families
        self._let_go()
        for key in self._routes.keys() - wanted_routes:
            self._dropped_routes.append(key)
            _forget(key, families.duration, families.first_token, families.inter_token)
            _forget(key, families.disconnects)
            _forget_statuses(families.requests, key)
        for key in self._variants.keys() - prices.keys():
            self._dropped_variants.append(key)
            _forget(key, families.variant_duration, families.variant_first_token)
            _forget(key, families.variant_per_token, families.variant_prompt_tokens)
            _forget(key, families.variant_generated_tokens, families.variant_cost)
            _forget(key, families.variant_fallbacks)
            _forget_statuses(families.variant_requests, key)
        for name in self._models.keys() - set(names):
            self._dropped_models.append(name)
            _forget((name,), families.queue_wait, families.prompt_tokens)
            _forget((name,), families.generated_tokens, families.retries_refused)
            _forget((name,), families.hedges, families.hedges_won)
        for key in sorted(wanted_routes):
            self.route(*key)
        for key, price in prices.items():
            self.variant(*key).price(price)

    def _let_go(self) -> None:
        for name in self._dropped_models:
            del self._models[name]
        for key in self._dropped_routes:
            del self._routes[key]
        for key in self._dropped_variants:
            del self._variants[key]
        self._dropped_models, self._dropped_routes, self._dropped_variants = [], [], []

    def exposition(self) -> bytes:
        """Return the text format now, on the caller's thread; for tests and tools."""
        self.families.tallies.bring_in()
        self._gauges.read()
        return generate_latest(self.registry)

    async def text(self) -> bytes:
        """Return the text format, version 0.0.4, written off the event loop."""
        self.families.tallies.bring_in()
        return await self._scrape.text()


def _by_status(tallies: TallyGroup, family: Counter, *labels: str) -> dict[str, CounterTally]:
    """Children of a family whose last label is the class of a status."""
    return {status: tallies.counter(family.labels(*labels, status)) for status in STATUS_CLASSES}


def _forget(labels: tuple[str, ...], *families: Counter | Histogram) -> None:
    for family in families:
        family.remove(*labels)


def _forget_statuses(family: Counter, labels: tuple[str, ...]) -> None:
    for status in STATUS_CLASSES:
        family.remove(*labels, status)
