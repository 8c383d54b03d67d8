"""A task judged: metrics from the answers, limits against intervals, more items if need be."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from taut_deploy.validate.bounds import TaskBounds
from taut_deploy.validate.gate import combine, judge_bounds
from taut_deploy.validate.outcome import Metric, RuleOutcome, Verdict
from taut_deploy.validate.paired.shares import share_metrics
from taut_deploy.validate.paired.spending import boundaries, looks
from taut_deploy.validate.tasks.answers import Ask, TaskAnswers
from taut_deploy.validate.tasks.items import Item

PART = "tasks"
FIRST_LOOK = 200
"""Items before anything is judged."""
_MORE = "give the task more items, or raise max_items"


@dataclass(frozen=True, slots=True)
class Judged:
    """What a task came to.

    Args:
        answers: of both models.
        metrics: with intervals of the look that decided.
        rules: the limits, judged.
        looks: numbers of items at which it was judged.
        planned: numbers of items at which it would have been, all used.
        z: quantile that the intervals are built with.
    """

    answers: TaskAnswers
    metrics: dict[str, Metric]
    rules: tuple[RuleOutcome, ...]
    looks: tuple[int, ...]
    planned: tuple[int, ...]
    z: float


def shuffled(items: Sequence[Item], most: int, seed: int) -> list[Item]:
    """Items in the order they are asked in: drawn, so that any look is a sample of all."""
    order = np.random.default_rng(seed).permutation(len(items))[:most]
    return [items[at] for at in order]


def ask_until_decided(
    answers: TaskAnswers,
    items: Sequence[Item],
    bounds: TaskBounds,
    ask: Ask,
    *,
    resamples: int,
    seed: int,
    on_item: Callable[[int, int], None],
    first_look: int = FIRST_LOOK,
) -> Judged:
    """Ask items until every limit is kept, one is broken, or all were asked.

    Args:
        answers: filled on the way, so that what was asked is known where asking fails.
        items: in the order to ask them in.
        bounds: the limits; without one, all items are asked.
        ask: gives both models' answers.
        resamples: of the bootstrap over sub-tasks.
        seed: of the bootstrap.
        on_item: called with items done and items in all.
        first_look: items before the limits are judged.

    Returns:
        The state at the last look.
    """
    sizes = looks(first_look, len(items)) if bounds.limits else (len(items),)
    used: list[int] = []
    for size, z in zip(sizes, boundaries(sizes), strict=True):
        for item in items[len(answers.items) : size]:
            baseline, candidate = ask(item)
            answers.items.append(item)
            answers.baseline.append(baseline)
            answers.candidate.append(candidate)
            on_item(len(answers.items), len(items))
        used.append(size)
        judged = judge_task(answers, bounds, z, resamples=resamples, seed=seed)
        verdict = combine(rule.verdict for rule in judged[1])
        if verdict is not Verdict.INCONCLUSIVE:
            break
    return Judged(answers, *judged, tuple(used), sizes, z)


def judge_task(
    answers: TaskAnswers, bounds: TaskBounds, z: float, *, resamples: int, seed: int
) -> tuple[dict[str, Metric], tuple[RuleOutcome, ...]]:
    """Metrics of what was answered so far, and the limits against them."""
    metrics = share_metrics(
        answers.right("baseline", bounds.score),
        answers.right("candidate", bounds.score),
        answers.groups,
        z,
        resamples=resamples,
        seed=seed,
    )
    return metrics, judge_bounds(PART, answers.name, bounds, metrics, more=_MORE)
