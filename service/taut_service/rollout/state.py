"""Where a model's rollout stands. A value: every change makes another one, and a line of the log.

``running`` climbs by itself, ``held`` stays where it is, ``complete`` has all traffic and is still
watched, ``rolled_back`` has none. ``manual``: an operator set weights by hand, the rollout is over.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

Phase = Literal["running", "held", "complete", "rolled_back", "manual"]
PHASES: tuple[Phase, ...] = get_args(Phase)
WATCHED = ("running", "held", "complete")
"""Phases in which harm leads to a rollback."""
CLIMBING = ("running", "held")


@dataclass(frozen=True, slots=True)
class Rollout:
    """One model's rollout.

    Args:
        model: public name.
        candidate: variant that takes over.
        baseline: variant that it is compared with.
        id: names this rollout; evidence belongs to it.
        phase: see the module.
        percent: share of the candidate.
        since: wall time of the last change, seconds since the epoch.
        why: of the last change, for people.
        answers: compared when the step began.
        tokens: likewise.
    """

    model: str
    candidate: str
    baseline: str
    id: str
    phase: Phase
    percent: float
    since: float
    why: str
    answers: int = 0
    tokens: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @property
    def weighs(self) -> bool:
        """Whether it decides the weights of its two variants."""
        return self.phase != "manual"


def rollout_of(document: Any) -> Rollout:
    """Read one back.

    Raises:
        ValueError: it is none.
    """
    try:
        found = Rollout(**document)
    except TypeError as error:
        raise ValueError("is no state of a rollout") from error
    if found.phase not in PHASES:
        raise ValueError(f"has the unknown phase {str(found.phase)[:40]!r}")
    return found
