"""The choice itself: one candidate a unit, for the least loss within a size or the reverse.

Greedy on each unit's lower convex hull of loss over bytes, the steepest step first (the linear
relaxation of the multiple-choice knapsack; Sinha & Zoltners, Operations Research 27, 1979, §2).
Where the budget ends on a step this is the optimum; elsewhere it misses at most the gain of the one
step that did not fit, which later and smaller steps then fill up.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Option:
    """One candidate for one unit.

    Args:
        candidate: its position in the recipe.
        bytes: of the unit on disk.
        loss: what it costs the model, in nats.
    """

    candidate: int
    bytes: int
    loss: float


@dataclass(frozen=True)
class Step:
    """From one option of a unit to the next larger one on its hull."""

    unit: int
    to: Option
    bytes: int
    gain: float


def within_bytes(units: Sequence[Sequence[Option]], budget: int) -> list[Option] | None:
    """The least loss that fits.

    Args:
        units: the options of each, at least one.
        budget: bytes of all together.

    Returns:
        One option a unit; None where even the smallest do not fit.
    """
    smallest = [hull(options)[0] for options in units]
    spare = budget - sum(option.bytes for option in smallest)
    return None if spare < 0 else _climb(units, lambda spent, _: spent <= spare)


def within_loss(units: Sequence[Sequence[Option]], limit: float) -> list[Option] | None:
    """The fewest bytes whose loss is within a limit.

    Args:
        units: the options of each, at least one.
        limit: loss of all together, in nats.

    Returns:
        One option a unit; None where even the best lose more.
    """
    start = sum(hull(options)[0].loss for options in units)
    best = sum(hull(options)[-1].loss for options in units)
    if best > limit:
        return None
    needed = start - limit
    # A step is taken while those before it did not gain enough.
    return _climb(units, lambda _, gained_before: gained_before < needed)


def hull(options: Sequence[Option]) -> list[Option]:
    """Options on the lower convex hull: growing bytes, falling loss, ever smaller gains a byte."""
    found: list[Option] = []
    for option in sorted(options, key=lambda one: (one.bytes, one.loss, one.candidate)):
        if found and option.loss >= found[-1].loss:
            continue
        while len(found) > 1 and _slope(found[-2], found[-1]) <= _slope(found[-2], option):
            found.pop()
        found.append(option)
    return found


def _slope(small: Option, large: Option) -> float:
    """Gain a byte between two options."""
    return (small.loss - large.loss) / (large.bytes - small.bytes)


def _climb(
    units: Sequence[Sequence[Option]], allowed: Callable[[int, float], bool]
) -> list[Option]:
    """Take steps, the steepest first, wherever they are allowed.

    Args:
        units: the options of each.
        allowed: (bytes spent with the step, loss gained before it) -> whether it is taken.
    """
    hulls = [hull(options) for options in units]
    steps = [
        Step(unit, large, large.bytes - small.bytes, small.loss - large.loss)
        for unit, points in enumerate(hulls)
        for small, large in pairwise(points)
    ]
    # A stable sort: of one unit the smaller option comes first, of equal steps the earlier unit.
    steps.sort(key=lambda step: -step.gain / step.bytes)
    chosen = [points[0] for points in hulls]
    blocked: set[int] = set()
    spent, gained = 0, 0.0
    for step in steps:
        if step.unit in blocked or not allowed(spent + step.bytes, gained):
            blocked.add(step.unit)  # the steps after it lead on from it
            continue
        spent, gained = spent + step.bytes, gained + step.gain
        chosen[step.unit] = step.to
    return chosen
