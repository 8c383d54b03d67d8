"""Brings together what is known of a candidate: the guard's counts here and at other gateways.

What the journal could not take is lost rather than counted twice: evidence would be too strong.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from taut_service.guard.evidence import Evidence
from taut_service.guard.guard import Guard
from taut_service.rollout.journal import Journal, JournalLostError
from taut_service.rollout.pace import Pace
from taut_service.rollout.state import Rollout

if TYPE_CHECKING:
    from taut_service.watch.metrics import Metrics


class Gathering:
    """Belongs to one event loop.

    Args:
        journal: keeps counts.
        guard: counts answers.
        metrics: tells how clients fare.
    """

    def __init__(self, journal: Journal, guard: Guard, metrics: Metrics) -> None:
        self._journal = journal
        self._guard = guard
        self._metrics = metrics
        self._paces: defaultdict[tuple[str, str], Pace] = defaultdict(Pace)
        self._pending: dict[str, Counter[str]] = {}
        self._keys: dict[tuple[str, str], str] = {}
        guard.on_counted = self._on_counted

    def of(self, state: Rollout) -> Evidence:
        """Return the evidence about a rollout's candidate."""
        return self._guard.evidence(state.model, state.candidate)

    def pace(self, model: str, variant: str) -> Pace:
        """Return how the clients of a variant fare."""
        return self._paces[model, variant]

    def begin(self, state: Rollout, *, anew: bool) -> None:
        """Take note of a new step; ``anew`` of a new rollout."""
        for variant in (state.candidate, state.baseline):
            self._paces[state.model, variant].forget_streams()
        if anew:
            self.of(state).replace({})

    def listen(self, state: Rollout) -> None:
        """Count for a rollout from now on, here."""
        pair = state.model, state.candidate
        if state.weighs:
            self._keys[pair] = self._key(state)
        else:
            self._keys.pop(pair, None)
        for variant in (state.candidate, state.baseline):
            self._metrics.variant(state.model, variant).listener = self._paces[state.model, variant]

    def _key(self, state: Rollout) -> str:
        return f"{state.id}|{self._guard.identity(state.model, state.candidate)}"

    def _on_counted(self, model: str, variant: str, counts: dict[str, int]) -> None:
        key = self._keys.get((model, variant))
        if key is not None:
            self._pending.setdefault(key, Counter()).update(counts)

    async def gather(self, state: Rollout) -> None:
        """Put what was counted here into the journal, and everybody's counts into the evidence.

        Raises:
            JournalLostError: what was counted here is lost.
        """
        key = self._key(state)
        pending = self._pending.pop(key, Counter())
        evidence = self.of(state)
        errors = self._paces[state.model, state.candidate].take_errors()
        pending.update(evidence.in_block(errors))
        self._paces[state.model, state.baseline].take_errors()
        counts = Counter(await self._journal.add_counts(key, pending))
        # What was observed meanwhile is in the evidence and not in the journal yet.
        counts.update(self._pending.get(key, Counter()))
        if evidence.counts != counts:
            try:
                evidence.replace(counts)
            except ValueError as error:
                evidence.replace({})
                raise JournalLostError(
                    f"the evidence about {state.candidate!r} of {state.model!r} holds what is no "
                    "count of it; start the rollout anew"
                ) from error
            if old := evidence.forget_old():
                await self._journal.forget(key, old)
