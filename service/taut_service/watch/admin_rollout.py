"""The operator's part of rollouts: where they stand, what they rest on, and the few commands.

``/admin/rollout/analysis`` needs the guard only: Argo Rollouts asks it by GET and reads
``verdict``, Flagger by POST and looks at the status.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from taut_service.config.reload import Reloader
from taut_service.errors import ConflictError, UnavailableError
from taut_service.guard.compare import OF_VARIANT
from taut_service.guard.evidence import Evidence, Shown
from taut_service.guard.guard import Guard
from taut_service.rollout.audit import TamperedError, check_lines
from taut_service.rollout.commands import RolloutCommands
from taut_service.rollout.controller import Rollouts
from taut_service.rollout.journal import JournalLostError
from taut_service.rollout.state import Rollout
from taut_service.watch.admin_agreement import add_agreement, require_watched

Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE"]
_Text = Annotated[str, Field(max_length=500)]
_Name = Annotated[str, Field(min_length=1, max_length=256)]


@dataclass(frozen=True, slots=True)
class RolloutControls:
    """What the routes act on.

    Args:
        guard: has the evidence.
        reloader: holds the configuration in force.
        rollouts: where they stand; None without the section ``rollout``.
        commands: changes them; likewise.
    """

    guard: Guard
    reloader: Reloader
    rollouts: Rollouts | None
    commands: RolloutCommands | None


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StartRequest(_Body):
    """Which variant is to take over; ``force`` also in the cooldown, or of all traffic."""

    model: _Name
    candidate: _Name
    force: bool = False


class ChangeRequest(_Body):
    """Whose rollout, and why, for the log."""

    model: _Name
    why: _Text = ""


class EvidenceReport(BaseModel):
    """What the guard knows of one variant."""

    variant: str
    verdict: Verdict
    why: str
    paused: str
    answers: int
    tokens: int
    alpha: float
    agreement: float | None
    measures: dict[str, Shown]


class RolloutReport(BaseModel):
    """One model's rollout: None where it never had one."""

    model: str
    baseline: str
    candidate: str | None
    phase: str
    percent: float | None
    since: datetime | None
    why: str
    next: str
    weights: dict[str, float]
    evidence: list[EvidenceReport]


class SampleReport(BaseModel):
    """Which share of the answers the guard compares.

    ``wanted`` is ``guard.sample``; ``kept`` what of it ``max_cpu_share`` could afford lately.
    """

    wanted: float
    kept: float
    max_cpu_share: float | None


class RolloutList(BaseModel):
    """Every model with a baseline."""

    journal_up: bool
    steps: list[float]
    sample: SampleReport
    rollouts: list[RolloutReport]


class Moved(BaseModel):
    """Where a rollout stands now."""

    model: str
    candidate: str
    phase: str
    percent: float
    why: str


class History(BaseModel):
    """Lines of the audit log, oldest first; the chain up to ``head`` was checked just now."""

    lines: int
    head: str
    entries: list[dict[str, Any]]


class Analysis(BaseModel):
    """A verdict; ``value`` is 1, 0 or 0.5 for those who compare numbers."""

    verdict: Verdict
    value: float
    why: str
    answers: int
    tokens: int


def add_rollout(admin: FastAPI, controls: RolloutControls) -> None:
    """Add the routes.

    Args:
        admin: the application; its own dependency decides who may call.
        controls: what they act on.
    """
    _add_report(admin, controls)
    add_agreement(admin, controls.guard)
    _add_analysis(admin, controls)
    if controls.rollouts is not None and controls.commands is not None:
        _add_commands(admin, controls.commands)
        _add_history(admin, controls.rollouts)


def _add_report(admin: FastAPI, controls: RolloutControls) -> None:
    @admin.get("/admin/rollout", summary="Rollouts, and what the guard knows of each variant")
    async def show_rollouts() -> RolloutList:
        rollouts = controls.rollouts
        # Copied at once: a reload may come in between. Intervals cost some milliseconds each.
        reports = [
            _report(controls, name)
            for name, model in controls.reloader.current.models.items()
            if model.settings.baseline is not None
        ]
        guard = controls.guard
        sample = SampleReport(
            wanted=guard.settings.sample,
            kept=guard.sampled,
            max_cpu_share=guard.settings.max_cpu_share,
        )
        finished = await asyncio.to_thread(lambda: [make() for make in reports])
        return RolloutList(
            journal_up=rollouts is None or rollouts.up,
            steps=[] if rollouts is None else list(rollouts.settings.steps),
            sample=sample,
            rollouts=finished,
        )


def _report(controls: RolloutControls, name: str) -> Callable[[], RolloutReport]:
    """Copy what is known of a model; what is returned makes the report of it, in any thread."""
    model = controls.reloader.current.models[name]
    rollouts = controls.rollouts
    state = None if rollouts is None else rollouts.state(name)
    decision = None if rollouts is None else rollouts.decisions.get(name)
    watched = [variant for known, variant in controls.guard.pairs() if known == name]
    evidence = [_evidence(controls.guard, name, variant) for variant in watched]
    weights = model.weights
    return lambda: RolloutReport(
        model=name,
        baseline=model.settings.baseline or "",
        candidate=None if state is None else state.candidate,
        phase="none" if state is None else state.phase,
        percent=None if state is None else state.percent,
        since=None if state is None else datetime.fromtimestamp(state.since, UTC),
        why="" if state is None else state.why,
        next="" if decision is None else decision.why,
        weights=weights,
        evidence=[make() for make in evidence],
    )


def _evidence(guard: Guard, model: str, variant: str) -> Callable[[], EvidenceReport]:
    known, alpha = guard.evidence(model, variant), guard.settings.alpha
    verdict, why = _judge(guard, model, variant)
    paused, counts = guard.paused(model, variant), dict(known.counts)

    def make() -> EvidenceReport:
        copy = Evidence(known.bounds, counts, known.nats)
        shown = copy.shown(alpha)
        differing = shown.get(OF_VARIANT)
        return EvidenceReport(
            variant=variant,
            verdict=verdict,
            why=why,
            paused=paused,
            answers=copy.answers,
            tokens=copy.tokens,
            alpha=alpha,
            agreement=None if differing is None else 1.0 - differing.mean,
            measures=shown,
        )

    return make


def _judge(guard: Guard, model: str, variant: str) -> tuple[Verdict, str]:
    evidence, alpha = guard.evidence(model, variant), guard.settings.alpha
    harm = evidence.harm()
    if harm.log_evidence >= math.log(1.0 / alpha):
        return "FAIL", f"{harm.measure} of {harm.kind} answers is above its bound"
    if paused := guard.paused(model, variant):
        return "INCONCLUSIVE", f"paused: {paused}"
    if lacking := evidence.lacking(alpha):
        return "INCONCLUSIVE", f"not proven yet: {', '.join(lacking)}"
    return "PASS", "every bound is proven"


def _add_analysis(admin: FastAPI, controls: RolloutControls) -> None:
    def judged(model: str, variant: str) -> Analysis:
        require_watched(controls.guard, model, variant)
        verdict, why = _judge(controls.guard, model, variant)
        evidence = controls.guard.evidence(model, variant)
        value = {"PASS": 1.0, "FAIL": 0.0}.get(verdict, 0.5)
        return Analysis(
            verdict=verdict,
            value=value,
            why=why,
            answers=evidence.answers,
            tokens=evidence.tokens,
        )

    @admin.get("/admin/rollout/analysis", summary="The guard's verdict, for Argo Rollouts")
    async def analyse(model: Annotated[str, Query()], variant: Annotated[str, Query()]) -> Analysis:
        return judged(model, variant)

    @admin.post("/admin/rollout/analysis", summary="The same for Flagger: 409 unless it is PASS")
    async def gate(model: Annotated[str, Query()], variant: Annotated[str, Query()]) -> Analysis:
        found = judged(model, variant)
        if found.verdict != "PASS":
            raise ConflictError(f"{found.verdict}: {found.why}", code="verdict")
        return found


def _add_commands(admin: FastAPI, commands: RolloutCommands) -> None:
    @admin.post("/admin/rollout/start", summary="Begin a rollout, or let a held one go on")
    async def start(request: Request, body: StartRequest) -> Moved:
        actor = operator_of(request)
        return _moved(await commands.start(body.model, body.candidate, actor, force=body.force))

    @admin.post("/admin/rollout/hold", summary="Stay at this step")
    async def hold(request: Request, body: ChangeRequest) -> Moved:
        return _moved(await commands.hold(body.model, operator_of(request), body.why))

    @admin.post("/admin/rollout/rollback", summary="Give all traffic back to the baseline")
    async def rollback(request: Request, body: ChangeRequest) -> Moved:
        return _moved(await commands.rollback(body.model, operator_of(request), body.why))


def operator_of(request: Request) -> str:
    """Name who asks, for logs."""
    return request.state.operator or "(no keys)"


def _moved(state: Rollout) -> Moved:
    return Moved(
        model=state.model,
        candidate=state.candidate,
        phase=state.phase,
        percent=state.percent,
        why=state.why,
    )


def _add_history(admin: FastAPI, rollouts: Rollouts) -> None:
    @admin.get("/admin/rollout/history", summary="The audit log, its chain of hashes checked")
    async def show_history(
        model: Annotated[str | None, Query()] = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 100,
    ) -> History:
        try:
            known = await rollouts.entries()
            lines = [entry.line for entry in known]
            await asyncio.to_thread(check_lines, lines, "the audit log")
        except (JournalLostError, TamperedError) as error:
            raise UnavailableError(str(error), code="journal_lost", retry_after_s=1.0) from error
        wanted = [entry for entry in known if model is None or entry.state.model == model]
        return History(
            lines=len(known),
            head=known[-1].hash if known else "",
            entries=[entry.document for entry in wanted[-limit:]],
        )
