"""Watches every rollout, decides once in a while, and does what an operator asks.

A change is a line in the journal first; weights, webhook, Events and log follow from it. All
gateways that share a journal watch; whoever appends first has decided, the others read it and
follow.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from taut_service.config.settings import RolloutSettings
from taut_service.errors import ConflictError, UnavailableError
from taut_service.guard.guard import Guard
from taut_service.rollout.audit import GATEWAY, Entry, write_line
from taut_service.rollout.decide import Decision, Facts, decide
from taut_service.rollout.gathering import Gathering
from taut_service.rollout.journal import Journal, JournalLostError
from taut_service.rollout.kubernetes_events import kubernetes_events
from taut_service.rollout.outbox import Outbox
from taut_service.rollout.pace import ERROR
from taut_service.rollout.shares import apply_shares, why_not_there
from taut_service.rollout.state import Rollout
from taut_service.rollout.step_clock import StepClock
from taut_service.rollout.webhook import webhook

if TYPE_CHECKING:
    from taut_service.config.reload import Reloader
    from taut_service.watch.metrics import Metrics

logger = logging.getLogger(__name__)
_EVENTS = {"promote": "promoted", "complete": "completed", "rollback": "rolled_back"}
_TRIES = 5


class Rollouts:
    """Belongs to one event loop.

    Args:
        settings: steps and what they need.
        journal: remembers.
        guard: gives evidence.
        reloader: holds the configuration in force.
        metrics: tells how clients fare.
        clock: makes the clock of a step; given by tests.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        journal: Journal,
        guard: Guard,
        reloader: Reloader,
        metrics: Metrics,
        clock: Callable[[], StepClock] = StepClock,
    ) -> None:
        self.settings = settings
        self.journal = journal
        self.guard = guard
        self._evidence = Gathering(journal, guard, metrics)
        self._reloader = reloader
        self._webhook = None if settings.webhook is None else webhook(settings.webhook)
        self._events = None if settings.events is None else kubernetes_events(settings.events)
        self._states: dict[str, tuple[int, Rollout]] = {}
        self._read = 0
        self._clocks: defaultdict[str, StepClock] = defaultdict(clock)
        self._one_at_a_time = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self.decisions: dict[str, Decision] = {}
        """The newest decision about each model."""
        self.up = True
        self.rollbacks: Counter[str] = Counter()
        guard.bounds[ERROR] = settings.max_error_rate
        reloader.on_change(lambda generation: self._follow())

    @property
    def webhook_failures(self) -> int:
        """Changes that the webhook did not take."""
        return 0 if self._webhook is None else self._webhook.failures

    @property
    def event_failures(self) -> int:
        """Changes of which Kubernetes has no Event."""
        return 0 if self._events is None else self._events.failures

    @property
    def _outboxes(self) -> list[Outbox[Entry]]:
        return [outbox for outbox in (self._webhook, self._events) if outbox is not None]

    def state(self, model: str) -> Rollout | None:
        """Return where a model's rollout stands, None if it never had one."""
        found = self._states.get(model)
        return None if found is None else found[1]

    async def start_watching(self) -> None:
        """Read the journal, put what it says in force, begin to decide."""
        try:
            await self._catch_up()
        except JournalLostError as error:
            self._lose(error)
        for outbox in self._outboxes:
            outbox.start()
        self._task = asyncio.get_running_loop().create_task(self._watch())
        self._task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Stop; evidence that waits is saved."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            try:
                await self._gather_all()
                await self.journal.close()
            except JournalLostError as error:
                logger.error("rollout: evidence was not saved: %s", error)
            await asyncio.gather(*(outbox.close() for outbox in self._outboxes))

    async def entries(self) -> list[Entry]:
        """Return all lines of the journal, those that others have just appended included.

        Raises:
            JournalLostError: it cannot be reached, or was tampered with.
        """
        # Two that read new lines at once would both add them.
        async with self._one_at_a_time:
            await self.journal.refresh()
            await self.journal.check()
            return list(self.journal.entries)

    def moved(self, state: Rollout, **changes: Any) -> Rollout:
        """Return a state at the beginning of a step: evidence counts anew towards its share."""
        evidence = None if self.missing(state) else self._evidence.of(state)
        return dataclasses.replace(
            state,
            since=time.time(),
            answers=state.answers if evidence is None else evidence.answers,
            tokens=state.tokens if evidence is None else evidence.tokens,
            **changes,
        )

    async def change(
        self,
        model: str,
        actor: str,
        change: Callable[[Rollout | None], tuple[str, Rollout]],
        facts: dict[str, Any] | None = None,
    ) -> Rollout:
        """Append a change and put it in force.

        Args:
            model: public name.
            actor: who changes it.
            change: from the state now to an event and the state from then on; may raise.
            facts: what it rests on.

        Raises:
            ConflictError: others were faster again and again.
            UnavailableError: the journal cannot be written.
        """
        async with self._one_at_a_time:
            try:
                for _ in range(_TRIES):
                    await self.journal.refresh()
                    self._take_over()
                    event, state = change(self.state(model))
                    last = self.journal.entries[-1] if self.journal.entries else None
                    entry = write_line(last, event, actor, state, facts or {})
                    if await self.journal.append(entry):
                        self._take_over()
                        for outbox in self._outboxes:
                            outbox.put(entry)
                        logger.info("rollout: %s %s by %s: %s", model, event, actor, state.why)
                        return state
            except JournalLostError as error:
                self._lose(error)
                raise UnavailableError(
                    f"the rollout's journal cannot be used: {error}",
                    code="journal_lost",
                    retry_after_s=1.0,
                ) from error
        raise ConflictError("other gateways change the rollout all the time", code="contended")

    def _take_over(self) -> None:
        """Put lines in force that were not yet, this gateway's own and others'."""
        for entry in self.journal.entries[self._read :]:
            self._states[entry.state.model] = entry.seq, entry.state
            self.rollbacks[entry.state.model] += entry.event == "rolled_back"
            self._began(entry)
        self._read = len(self.journal.entries)
        self._follow()

    def _began(self, entry: Entry) -> None:
        if not self.missing(entry.state):
            self._evidence.begin(entry.state, anew=entry.event == "started")

    def _follow(self) -> None:
        """Let weights, the guard and the metrics be as the states say."""
        for model, (_, state) in self._states.items():
            apply_shares(state, self._reloader.current.models.get(model))
            if state.weighs:
                self.guard.focus[model] = state.candidate
            else:
                self.guard.focus.pop(model, None)
            if not self.missing(state):
                self._evidence.listen(state)

    def missing(self, state: Rollout) -> str:
        """Say what the configuration in force lacks of a rollout, ``""`` if nothing."""
        return why_not_there(state, self._reloader.current.models.get(state.model))

    async def _gather_all(self) -> None:
        for _, state in list(self._states.values()):
            if state.weighs and not self.missing(state):
                await self._evidence.gather(state)

    async def _catch_up(self) -> None:
        async with self._one_at_a_time:
            await self.journal.refresh()
            self._take_over()
            await self._gather_all()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self.settings.every_s)
            try:
                await self._catch_up()
                self._find()
                for model in list(self._states):
                    await self._decide(model)
            except JournalLostError as error:
                self._lose(error)
            except (UnavailableError, ConflictError) as error:
                logger.warning("rollout: %s", error)

    def facts(self, state: Rollout) -> Facts:
        """Return what is known of a rollout whose variants are configured."""
        seq, _ = self._states[state.model]
        clock = self._clocks[state.model]
        watched = clock.look(seq)
        return Facts(
            evidence=self._evidence.of(state),
            alpha=self.guard.settings.alpha,
            paused=self.guard.paused(state.model, state.candidate),
            watched_s=watched,
            jumped_s=clock.jumped_s,
            candidate=self._evidence.pace(state.model, state.candidate).medians(),
            baseline=self._evidence.pace(state.model, state.baseline).medians(),
        )

    async def _decide(self, model: str) -> None:
        _, state = self._states[model]
        if missing := self.missing(state):
            self.decisions[model] = Decision("wait", missing)
            return
        facts = self.facts(state)
        decision = self.decisions[model] = decide(state, facts, self.settings)
        if decision.action == "wait":
            return
        phase = {"rollback": "rolled_back", "complete": "complete"}.get(decision.action, "running")
        moved = self.moved(state, phase=phase, percent=decision.percent, why=decision.why)

        def decided(now: Rollout | None) -> tuple[str, Rollout]:
            if now != state:
                raise ConflictError("another gateway has decided", code="contended")
            return _EVENTS[decision.action], moved

        await self.change(model, GATEWAY, decided, _told(facts))

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self.up = False
            logger.critical("rollout: nothing is decided any more", exc_info=task.exception())

    def _lose(self, error: JournalLostError) -> None:
        if self.up:
            logger.error("rollout: the journal is lost, nothing is decided: %s", error)
        self.up = False

    def _find(self) -> None:
        if not self.up:
            logger.info("rollout: the journal is back")
        self.up = True


def _told(facts: Facts) -> dict[str, Any]:
    """Return what a decision rested on, for the log."""
    evidence = facts.evidence
    return {
        "answers": evidence.answers,
        "tokens": evidence.tokens,
        "watched_s": round(facts.watched_s, 3),
        "harm_log_evidence": round(evidence.harm().log_evidence, 6),
        "means": {
            measure: round(evidence.tally(measure).mean, 6)
            for measure in evidence.bounds
            if evidence.tally(measure).size
        },
    }
