"""What an operator may ask of rollouts: start, hold, roll back, or take the weights over."""

from __future__ import annotations

import secrets
import time

from taut_service.config.reload import Reloader
from taut_service.errors import ConflictError, NotFoundError
from taut_service.rollout.controller import Rollouts
from taut_service.rollout.state import CLIMBING, Rollout
from taut_service.route.variants import Model


class RolloutCommands:
    """Checks a command and has it done.

    Each raises NotFoundError for a model or variant that is not there, ConflictError for what
    cannot be done now, UnavailableError if the journal cannot be written.

    Args:
        rollouts: does it.
        reloader: holds the configuration in force.
    """

    def __init__(self, rollouts: Rollouts, reloader: Reloader) -> None:
        self._rollouts = rollouts
        self._reloader = reloader

    async def start(self, name: str, candidate: str, actor: str, *, force: bool = False) -> Rollout:
        """Begin a rollout, or let a held one go on.

        Args:
            name: of the model, or an alias.
            candidate: variant that is to take over.
            actor: who asks.
            force: also within the cooldown after a rollback, or where it has all traffic.
        """
        model, baseline = self._checked(name, candidate)

        def change(now: Rollout | None) -> tuple[str, Rollout]:
            if now is not None and now.phase in CLIMBING:
                return "resumed", self._resumed(now, candidate)
            self._check_not_complete(now, candidate, force=force)
            self._check_cooldown(now, candidate, force=force)
            new = Rollout(
                model=model.name,
                candidate=candidate,
                baseline=baseline,
                id=secrets.token_hex(6),
                phase="running",
                percent=self._rollouts.settings.steps[0],
                since=time.time(),
                why="started",
            )
            return "started", new

        return await self._rollouts.change(model.name, actor, change)

    async def hold(self, name: str, actor: str, why: str = "") -> Rollout:
        """Stay at the step until it is started again."""

        def change(now: Rollout | None) -> tuple[str, Rollout]:
            if now is None or now.phase != "running":
                raise ConflictError(
                    f"no rollout of {name[:100]!r} is running{_is(now)}", code="not_running"
                )
            return "held", self._rollouts.moved(now, phase="held", why=why or "held by hand")

        return await self._rollouts.change(self._model(name).name, actor, change)

    async def rollback(self, name: str, actor: str, why: str = "") -> Rollout:
        """Give all traffic back to the baseline."""

        def change(now: Rollout | None) -> tuple[str, Rollout]:
            if now is None or now.phase in ("rolled_back", "manual"):
                raise ConflictError(
                    f"there is nothing to roll back of {name[:100]!r}{_is(now)}",
                    code="not_running",
                )
            return "rolled_back", self._rollouts.moved(
                now, phase="rolled_back", percent=0.0, why=why or "rolled back by hand"
            )

        return await self._rollouts.change(self._model(name).name, actor, change)

    async def overridden(self, model: str, actor: str) -> None:
        """End a rollout because somebody sets weights by hand."""
        state = self._rollouts.state(model)
        if state is None or not state.weighs:
            return

        def change(now: Rollout | None) -> tuple[str, Rollout]:
            return "manual", self._rollouts.moved(
                now or state, phase="manual", why="weights were set by hand"
            )

        await self._rollouts.change(model, actor, change)

    def _resumed(self, now: Rollout, candidate: str) -> Rollout:
        if now.candidate != candidate or now.phase == "running":
            raise ConflictError(
                f"a rollout of {now.candidate!r} is {now.phase} already; roll it back first to "
                "start another",
                code="rollout_active",
            )
        return self._rollouts.moved(now, phase="running", why="resumed")

    def _check_not_complete(self, now: Rollout | None, candidate: str, *, force: bool) -> None:
        if now is None or now.phase != "complete" or now.candidate != candidate or force:
            return
        if not self._rollouts.missing(now):
            raise ConflictError(
                f"{candidate!r} has all traffic already; with 'force' it begins anew at the first "
                "step",
                code="rollout_complete",
            )

    def _check_cooldown(self, now: Rollout | None, candidate: str, *, force: bool) -> None:
        if now is None or now.phase != "rolled_back" or now.candidate != candidate or force:
            return
        # A clock that was put back counts as no time passed.
        left = self._rollouts.settings.cooldown_s - max(0.0, time.time() - now.since)
        if left > 0:
            raise ConflictError(
                f"{candidate!r} was rolled back ({now.why}); it may start again in {left:.0f} s, "
                "or now with 'force'",
                code="cooldown",
            )

    def _model(self, name: str) -> Model:
        found = self._reloader.current.names.get(name)
        if found is None:
            raise NotFoundError(f"there is no model {name[:100]!r}", code="model_not_found")
        return found

    def _checked(self, name: str, candidate: str) -> tuple[Model, str]:
        model = self._model(name)
        baseline = model.settings.baseline
        if baseline is None:
            raise ConflictError(
                f"the model {model.name!r} names no 'baseline' in the configuration",
                code="no_baseline",
            )
        if candidate not in model.variants or candidate == baseline:
            others = ", ".join(other for other in model.variants if other != baseline)
            raise NotFoundError(
                f"{candidate[:64]!r} is no candidate of {model.name!r}; there is {others}",
                param="candidate",
                code="variant_not_found",
            )
        return model, baseline


def _is(now: Rollout | None) -> str:
    return "" if now is None else f": it is {now.phase}"
