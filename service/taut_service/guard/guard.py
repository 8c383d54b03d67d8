"""The live guard: draws a share of the answers, compares them beside the requests, keeps evidence.

Invariant: a request waits for nothing of this. What is drawn goes into a queue of fixed length;
what finds no room, is beyond the CPU budget, or comes while clients wait for admission, is dropped
and counted. Nothing of a prompt outlives its comparison unless ``guard.keep: examples`` says so,
and nobody is charged.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from taut_service.admit.admission import Admission
from taut_service.config.settings import GuardSettings, VariantSettings
from taut_service.guard.budget import CpuBudget
from taut_service.guard.change import BLOCK
from taut_service.guard.compare import COMPARED, OF_VARIANT, Comparison, compare
from taut_service.guard.course import Course
from taut_service.guard.evidence import Evidence, bounds_of, nats_of
from taut_service.guard.examples import ExampleFiles
from taut_service.guard.reader import Reader
from taut_service.guard.tap import Heard, Tap
from taut_service.route.variants import Model, Variant

if TYPE_CHECKING:
    from taut_service.call import Call
    from taut_service.config.generation import Generation
    from taut_service.config.reload import Reloader
    from taut_service.watch.guard_metrics import GuardMetrics

logger = logging.getLogger(__name__)

_ROUTES = ("completions", "chat_completions")
Pair = tuple[str, str]
"""Public name of a model, and one of its variants that is not the baseline."""
Counted = Callable[[str, str, dict[str, int]], None]


class Guard:
    """Belongs to one event loop.

    Args:
        settings: share, bounds, sizes.
        reloader: holds the configuration in force.
        admission: tells whether clients wait.
        metrics: counts what came of each answer.

    Raises:
        SettingsError: the folder for examples cannot be used.
    """

    def __init__(
        self,
        settings: GuardSettings,
        reloader: Reloader,
        admission: Admission,
        metrics: GuardMetrics,
    ) -> None:
        self.settings = settings
        self._reloader, self._admission, self._metrics = reloader, admission, metrics
        self.bounds, self._nats = bounds_of(settings), nats_of(settings)
        self.budget = CpuBudget(settings.max_cpu_share)
        self._drawn_below = int(settings.sample * 2**64)
        self._salt = secrets.token_bytes(16)
        self._queue: asyncio.Queue[Heard] = asyncio.Queue(settings.max_queued)
        self._tasks: list[asyncio.Task[None]] = []
        self._comparing = 0
        self._turn = 0
        self._examples = None if settings.examples is None else ExampleFiles(settings.examples)
        self._evidence: dict[Pair, tuple[str, Evidence]] = {}
        self._courses: dict[Pair, Course] = {}
        self.focus: dict[str, str] = {}
        """Model → the variant that its baseline's own answers are compared with; else in turn."""
        self.on_counted: Counted = lambda model, variant, counts: None
        """Told of everything that is added to the evidence."""
        reloader.on_change(self.follow)

    def follow(self, generation: Generation) -> None:
        """Have exactly the series of a configuration."""
        self._metrics.apply(list(_pairs(generation)))

    def start(self) -> None:
        """Begin to compare."""
        self.follow(self._reloader.current)
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._compare_all()) for _ in range(self.settings.concurrency)
        ]
        for task in self._tasks:
            task.add_done_callback(_tell_end)

    async def close(self) -> None:
        """Stop; what waits is forgotten."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def draw(self, call: Call, model: Model, body: bytes) -> None:
        """Have the answer kept, if the request is one of those that are compared.

        Args:
            call: its ``tap`` is set then.
            model: that is asked.
            body: of the request.
        """
        if model.settings.baseline is None or call.route.name not in _ROUTES:
            return
        drawn = hashlib.blake2b(call.request_id, digest_size=8, key=self._salt).digest()
        if int.from_bytes(drawn, "big") < self._drawn_below:
            call.tap = Tap(body, partial(self._offer, model.name))

    def served(self, call: Call) -> None:
        """Count the end of a client's request as work that comparisons are a share of."""
        self.budget.served(call.answer.events)

    def _offer(self, name: str, heard: Heard | None) -> None:
        if heard is None:
            self._metrics.ended(name, "", "too_large")
        elif self._admission.of(name).queued:
            self._metrics.ended(name, "", "load")
        elif self._queue.full():
            self._metrics.ended(name, "", "queue_full")
        elif not self.budget.allows(self._queue.qsize() + self._comparing):
            self._metrics.ended(name, "", "cpu_budget")
        else:
            self._queue.put_nowait(heard)

    async def _compare_all(self) -> None:
        while True:
            heard = await self._queue.get()
            self._comparing += 1
            try:
                await self.budget.charge(self._compare_one(heard))
            finally:
                self._comparing -= 1

    async def _compare_one(self, heard: Heard) -> None:
        model = self._reloader.current.names.get(heard.model)
        candidate = None if model is None else self._candidate(model, heard.variant)
        if model is None or candidate is None or model.settings.baseline is None:
            return  # a reload has taken it away
        baseline = model.variants[model.settings.baseline]
        if why_paused(candidate, baseline):
            self._metrics.ended(model.name, candidate.name, "paused")
            return
        readers = Reader(candidate, self.settings), Reader(baseline, self.settings)
        by_candidate = heard.variant == candidate.name
        identity = _identity(candidate.settings, baseline.settings)
        found = await compare(heard, *readers, self.settings, by_candidate=by_candidate)
        self._metrics.ended(model.name, candidate.name, found.result)
        if found.result.endswith("_failed"):
            text = "guard: %s of %s: %s: %s"
            logger.warning(text, candidate.name, model.name, found.result, found.why)
        if found.values:
            self._take_down((model.name, candidate.name), identity, found)
        if self._examples is not None and found.result == COMPARED:
            try:
                await asyncio.to_thread(self._examples.keep, model.name, candidate.name, found)
            except OSError as error:
                logger.error("guard: an example was not kept: %s", error.strerror or error)

    def _candidate(self, model: Model, served: str) -> Variant | None:
        if served != model.settings.baseline:
            return model.variants.get(served)
        focus = self.focus.get(model.name)
        if focus is not None:
            return model.variants.get(focus)
        others = [v for v in model.variants.values() if v.name != model.settings.baseline]
        self._turn += 1
        return others[self._turn % len(others)]

    def _take_down(self, pair: Pair, identity: str, found: Comparison) -> None:
        evidence = self._known(pair, identity)
        counted = evidence.observe(found.kind, found.values, found.tokens)
        if evidence.answers % BLOCK == 0:
            evidence.forget_old()
        self.course(*pair).note(evidence.tally(OF_VARIANT))
        self._metrics.observed(*pair, found)
        self.on_counted(*pair, counted)

    def _known(self, pair: Pair, identity: str) -> Evidence:
        known = self._evidence.get(pair)
        if known is None or known[0] != identity:
            if known is not None:
                logger.info("guard: %s of %s was replaced: its evidence begins anew", *pair[::-1])
            known = identity, Evidence(self.bounds, nats=self._nats)
            self._evidence[pair] = known
            self._courses[pair] = Course()
        return known[1]

    def _variants(self, pair: Pair) -> tuple[Variant, Variant]:
        model = self._reloader.current.models[pair[0]]
        return model.variants[pair[1]], model.variants[model.settings.baseline or ""]

    def identity(self, model: str, variant: str) -> str:
        """Name what evidence about a variant holds for: it and its baseline as configured now."""
        candidate, baseline = self._variants((model, variant))
        return _identity(candidate.settings, baseline.settings)

    def evidence(self, model: str, variant: str) -> Evidence:
        """Return the evidence about a variant as it is configured now; empty if there is none."""
        return self._known((model, variant), self.identity(model, variant))

    def course(self, model: str, variant: str) -> Course:
        """Return how the agreement of a variant with its baseline went."""
        return self._courses.setdefault((model, variant), Course())

    def paused(self, model: str, variant: str) -> str:
        """Say why a variant cannot be compared now, ``""`` if it can."""
        if all(task.done() for task in self._tasks):
            return "the guard has stopped: see the log"
        return why_paused(*self._variants((model, variant)))

    @property
    def sampled(self) -> float:
        """Share of the answers that was drawn lately and could be afforded."""
        return self.settings.sample * self.budget.kept

    @property
    def queued(self) -> int:
        """Answers that wait to be compared."""
        return self._queue.qsize()

    def pairs(self) -> Iterator[Pair]:
        """Yield every guarded variant."""
        yield from _pairs(self._reloader.current)


def _tell_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        logger.critical("guard: a comparison failed by itself", exc_info=task.exception())


def why_paused(candidate: Variant, baseline: Variant) -> str:
    """Say why two variants cannot be compared now, ``""`` if they can."""
    for variant in (baseline, candidate):
        if not variant.has_ready:
            return f"no worker of {variant.name!r} is ready"
    return ""


def _pairs(generation: Generation) -> Iterator[Pair]:
    for model in generation.models.values():
        if model.settings.baseline is not None:
            for name in model.variants:
                if name != model.settings.baseline:
                    yield model.name, name


def _identity(*settings: VariantSettings) -> str:
    """Digest what makes an answer: another share, price or address does not change it."""
    told = [s.model_dump_json(include={"name", "served_name", "provenance"}) for s in settings]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]
