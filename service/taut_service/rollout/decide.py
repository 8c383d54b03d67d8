"""What a rollout should do now: a pure function of its state and of what is known."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from taut_service.config.settings import RolloutSettings
from taut_service.guard.evidence import ALL_KINDS, Evidence
from taut_service.rollout.pace import Medians
from taut_service.rollout.state import WATCHED, Rollout

Action = Literal["wait", "promote", "complete", "rollback"]


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known at this moment.

    Args:
        evidence: the guard's, with clients' errors.
        alpha: error rate of its tests.
        paused: why nothing can be compared now, ``""`` if it can.
        watched_s: how long the step was watched.
        jumped_s: by how much a clock jumped within it.
        candidate: pace of its clients' streams.
        baseline: likewise.
    """

    evidence: Evidence
    alpha: float
    paused: str
    watched_s: float
    jumped_s: float
    candidate: Medians
    baseline: Medians


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do, and why, for people; ``percent`` where the candidate's share changes."""

    action: Action
    why: str
    percent: float = 0.0


def decide(state: Rollout, facts: Facts, settings: RolloutSettings) -> Decision:
    """Decide.

    Args:
        state: of the rollout.
        facts: what is known.
        settings: what a step needs.

    Returns:
        ``rollback`` on evidence of harm in every phase that is watched; ``promote`` or
        ``complete`` only from ``running`` and only when nothing is missing.
    """
    if state.phase not in WATCHED:
        return Decision("wait", state.why)
    harm = facts.evidence.harm()
    if harm.log_evidence >= math.log(1.0 / facts.alpha):
        return Decision("rollback", _harm_text(facts, harm.measure, harm.kind))
    if state.phase != "running":
        return Decision("wait", state.why)
    missing = why_not_yet(state, facts, settings)
    if missing:
        return Decision("wait", missing)
    following = [percent for percent in settings.steps if percent > state.percent]
    held = f"bounds held with {facts.evidence.answers} answers, {facts.evidence.tokens} tokens"
    if too_few := _too_few_streams(facts, settings):
        held += f"; {too_few}"
    if not following:
        return Decision("complete", held, state.percent)
    return Decision("promote", held, following[0])


def why_not_yet(state: Rollout, facts: Facts, settings: RolloutSettings) -> str:
    """Say what a step still needs, ``""`` if nothing."""
    evidence = facts.evidence
    answers, tokens = evidence.answers - state.answers, evidence.tokens - state.tokens
    if facts.paused:
        return f"paused: {facts.paused}"
    if facts.watched_s < settings.min_step_s:
        jump = f"; a clock jumped by {facts.jumped_s:+.0f} s" if facts.jumped_s else ""
        return f"{facts.watched_s:.0f} of {settings.min_step_s:g} s at this step{jump}"
    if answers < settings.min_answers:
        return f"{answers} of {settings.min_answers} compared answers at this step"
    if tokens < settings.min_tokens:
        return f"{tokens} of {settings.min_tokens} compared tokens at this step"
    for measure in evidence.lacking(facts.alpha):
        bound = evidence.said(measure, evidence.bounds[measure])
        return f"{measure} is not proven to stay below {bound} yet"
    return _above(evidence) or _slower(facts, settings)


def _above(evidence: Evidence) -> str:
    """Say which mean lies above its bound as far as it was seen, though that proves no harm yet."""
    for measure, bound in evidence.bounds.items():
        if evidence.tally(measure).mean > bound:
            return f"{measure} is {_beside_bound(evidence, measure, ALL_KINDS)}"
    return ""


def _beside_bound(evidence: Evidence, measure: str, kind: str) -> str:
    tally = evidence.tally(measure, kind)
    mean, bound = evidence.said(measure, tally.mean), evidence.bounds[measure]
    return f"{mean} over {tally.size}, at most {evidence.said(measure, bound)} is allowed"


def _too_few_streams(facts: Facts, settings: RolloutSettings) -> str:
    """Say that times to first and between tokens were not judged; only streams have them."""
    streams = min(facts.baseline.streams, facts.candidate.streams)
    if streams >= settings.min_streams:
        return ""
    return f"times of tokens not judged: {streams} of {settings.min_streams} streams"


def _slower(facts: Facts, settings: RolloutSettings) -> str:
    """Say which median may be above its bound; the interval's worst ends are compared."""
    ours, theirs = facts.baseline, facts.candidate
    if _too_few_streams(facts, settings):
        return ""
    for name, own, other, most in (
        ("first token", ours.first_token, theirs.first_token, settings.max_first_token_ratio),
        ("tokens", ours.per_token, theirs.per_token, settings.max_inter_token_ratio),
    ):
        if other.high_s <= most * own.low_s:
            continue
        said = f"{name}: median {other.estimate_s:.3g} s"
        if other.estimate_s > most * own.estimate_s:
            return f"{said}, at most {most:g} times {own.estimate_s:.3g} s are allowed"
        return f"{said} is not proven to stay below {most:g} times {own.estimate_s:.3g} s yet"
    return ""


def _harm_text(facts: Facts, measure: str, kind: str) -> str:
    return f"harm: {measure} of {kind} answers is {_beside_bound(facts.evidence, measure, kind)}"
