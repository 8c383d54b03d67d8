"""A task as plain data, for the report."""

import dataclasses
from typing import Any

from taut_deploy.validate.bounds import TaskBounds
from taut_deploy.validate.paired.counts import PairedCounts, count_pairs
from taut_deploy.validate.paired.mcnemar import mid_p_value
from taut_deploy.validate.paired.shares import items_needed
from taut_deploy.validate.tasks.answers import TaskAnswers
from taut_deploy.validate.tasks.judged import Judged

_FLIPS_SHOWN = 5
_SHOWN = 200
INTERVAL = (
    "two-sided 95 % over all looks: Bonett-Price (recovery), Newcombe (difference), Wilson "
    "(flips); studentised bootstrap over sub-tasks where every item names one"
)


def task_section(
    judged: Judged, bounds: TaskBounds, kind: str, source: str, sha256: str | None, available: int
) -> dict[str, Any]:
    """Describe a task.

    Args:
        judged: what it came to.
        bounds: its section of the policy.
        kind: ``choices``, ``generated`` or ``harness``.
        source: file or name that it came from.
        sha256: of the file; None for a task of the harness.
        available: items it has.
    """
    answers = judged.answers
    by = bounds.score if kind == "choices" else "sum"
    rights = {role: answers.right(role, by) for role in ("baseline", "candidate")}
    counts = count_pairs(rights["baseline"], rights["candidate"])
    pairs = zip(answers.baseline, answers.candidate, strict=True)
    return {
        "kind": kind,
        "source": source,
        "sha256": sha256,
        "score": by,
        "items": counts.items,
        "items_available": available,
        "looks": list(judged.looks),
        "looks_planned": list(judged.planned),
        "z": judged.z,
        "subtasks": None if answers.groups is None else len(set(answers.groups)),
        "accuracy": _accuracies(answers, kind),
        "counts": dataclasses.asdict(counts),
        "answers_changed": sum(first.said != second.said for first, second in pairs) / counts.items,
        "metrics": {name: dataclasses.asdict(value) for name, value in judged.metrics.items()},
        "mcnemar_p": mid_p_value(counts),
        "power": power(counts, bounds),
        "flipped": _flipped(answers, by),
    }


def _accuracies(answers: TaskAnswers, kind: str) -> dict[str, dict[str, float | None]]:
    return {
        role: {
            "sum": float(answers.right(role).mean()),
            "per_byte": _per_byte(answers, role) if kind == "choices" else None,
        }
        for role in ("baseline", "candidate")
    }


def _per_byte(answers: TaskAnswers, role: str) -> float:
    return float(answers.right(role, "per_byte").mean())


def power(counts: PairedCounts, bounds: TaskBounds) -> dict[str, Any]:
    """Items that would show an equally good candidate within the limits, at the flips seen.

    Args:
        counts: of the items asked.
        bounds: limits; the narrowest that bounds a loss counts.
    """
    accuracy = counts.baseline_right / counts.items
    margin = bounds.margin(accuracy)
    flips = counts.flips / counts.items
    needed = None if margin is None else items_needed(flips, margin)
    return {"margin": margin, "flips": flips, "items_for_80": needed}


def _flipped(answers: TaskAnswers, by: str) -> list[dict[str, Any]]:
    """Some items that one model alone answered rightly."""
    ours, theirs = answers.right("candidate", by), answers.right("baseline", by)
    found = [at for at in range(len(answers.items)) if ours[at] != theirs[at]][:_FLIPS_SHOWN]
    return [
        {
            "id": answers.items[at].id,
            "prompt": answers.items[at].prompt[-_SHOWN:],
            "baseline": answers.baseline[at].said[:_SHOWN],
            "candidate": answers.candidate[at].said[:_SHOWN],
            "right": "candidate" if ours[at] else "baseline",
        }
        for at in found
    ]
