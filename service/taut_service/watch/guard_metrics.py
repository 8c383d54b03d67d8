"""What the guard counts, and what is read of its evidence at scrape time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from taut_service.guard.compare import Comparison
from taut_service.guard.guard import Guard
from taut_service.watch.families import Families
from taut_service.watch.gauges import Reading, Source

RESULTS = (
    *("compared", "unsupported", "too_long", "too_large", "queue_full", "load", "paused"),
    *("cpu_budget", "baseline_failed", "candidate_failed"),
)
NO_VARIANT = "none"
"""Label of answers that were dropped before it was known what to compare them with."""


class GuardMetrics:
    """The guard's own series.

    Args:
        families: where they belong.
    """

    def __init__(self, families: Families) -> None:
        self._answers = families.guard_answers
        self._first = families.guard_first_divergence
        self._ratio = families.guard_length_ratio
        self._pairs: set[tuple[str, str]] = set()

    def apply(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Have exactly the series of these guarded variants."""
        wanted = {*pairs, *((model, NO_VARIANT) for model, _ in pairs)}
        for pair in self._pairs - wanted:
            for result in RESULTS:
                self._answers.remove(*pair, result)
            if pair[1] != NO_VARIANT:
                self._first.remove(*pair)
                self._ratio.remove(*pair)
        for pair in wanted - self._pairs:
            for result in RESULTS:
                self._answers.labels(*pair, result)
            if pair[1] != NO_VARIANT:
                self._first.labels(*pair)
                self._ratio.labels(*pair)
        self._pairs = wanted

    def ended(self, model: str, variant: str, result: str) -> None:
        """Count an answer that was drawn.

        Args:
            model: public name.
            variant: that is compared, ``""`` if that was not known yet.
            result: one of :data:`RESULTS`.
        """
        if (pair := (model, variant or NO_VARIANT)) in self._pairs:
            self._answers.labels(*pair, result).inc()

    def observed(self, model: str, variant: str, found: Comparison) -> None:
        """Record what is no mean of a bounded measure."""
        if (model, variant) not in self._pairs:
            return
        if found.first is not None:
            self._first.labels(model, variant).observe(found.first)
        if found.length_ratio is not None:
            self._ratio.labels(model, variant).observe(found.length_ratio)


def read_guard(guard: Guard) -> Source:
    """Return a source of the guard's evidence."""

    def source() -> Iterator[Reading]:
        yield Reading("guard_queued_answers", (), guard.queued)
        yield Reading("guard_sampled_ratio", (), guard.sampled)
        yield Reading("guard_cpu_seconds", (), guard.budget.spent_s)
        for pair in guard.pairs():
            evidence = guard.evidence(*pair)
            yield Reading("guard_paused", pair, bool(guard.paused(*pair)))
            yield Reading("guard_harm_log_evidence", pair, evidence.harm().log_evidence)
            yield Reading("guard_compared_tokens", pair, evidence.tokens)
            for measure in evidence.bounds:
                tally = evidence.tally(measure)
                if tally.size:
                    yield Reading("guard_excess", (*pair, measure), tally.mean)

    return source
