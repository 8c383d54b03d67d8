"""How much error each look at growing data may spend.

Whoever looks at the data several times and stops at the first clear answer errs more often than one
look would. Lan and DeMets, "Discrete sequential boundaries for clinical trials", Biometrika 70,
1983: the error that may have been spent after a share ``t`` of the planned data is a function of
``t``; the function here is theirs for O'Brien and Fleming's boundaries, which spends little early.
The boundaries follow from the distribution of the sums that have not crossed one (Armitage,
McPherson, Rowe, "Repeated significance tests on accumulating data", JRSS A 132, 1969), integrated
on a grid.
"""

import math
from collections.abc import Sequence
from functools import cache, partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.optimize import brentq

Floats = NDArray[np.float64]
ALPHA = 0.025
"""Error of one side over all looks: that of one two-sided 95 % interval."""
_POINTS = 801
_LOWEST = -8.0  # in standard deviations; what is below it has no weight


def looks(first: int, most: int) -> tuple[int, ...]:
    """Numbers of items to look at: doubling, and all of them.

    Args:
        first: items before the first look.
        most: items there are, or may be used.
    """
    at: list[int] = []
    count = min(first, most)
    while count < most:
        at.append(count)
        count *= 2
    return (*at, most)


def boundaries(sizes: Sequence[int]) -> tuple[float, ...]:
    """Quantiles to build each look's interval with, in place of 1.96.

    Args:
        sizes: data at each look, increasing; the last is all that may be used.

    Returns:
        One a look, decreasing but for rounding; 1.96 for a single look.
    """
    return _boundaries(tuple(size / sizes[-1] for size in sizes))


@cache
def _boundaries(times: tuple[float, ...]) -> tuple[float, ...]:
    found = [float(stats.norm.isf(_spent(times[0])))]
    if len(times) == 1:
        return (float(stats.norm.isf(ALPHA)),)
    # Density of the sum S(t) = Z(t) sqrt(t) on paths that have not crossed.
    grid = np.linspace(_LOWEST, found[0], _POINTS) * math.sqrt(times[0])
    density = stats.norm.pdf(grid, scale=math.sqrt(times[0]))
    for before, now in pairwise(times):
        step = math.sqrt(now - before)
        weights = _simpson(grid) * density
        crossed = partial(_crossed, grid=grid, weights=weights, step=step, root=math.sqrt(now))
        due = _spent(now) - _spent(before)
        bound = float(brentq(lambda z, due=due, crossed=crossed: crossed(z) - due, 0.0, 10.0))
        found.append(bound)
        following = np.linspace(_LOWEST, bound, _POINTS) * math.sqrt(now)
        density = stats.norm.pdf((following[:, None] - grid[None]) / step) @ weights / step
        grid = following
    return tuple(found)


def _crossed(z: float, *, grid: Floats, weights: Floats, step: float, root: float) -> float:
    """Chance that a path on the grid has crossed ``z`` at its next look."""
    return float(weights @ stats.norm.sf((z * root - grid) / step))


def _spent(time: float) -> float:
    return float(2 * stats.norm.sf(stats.norm.isf(ALPHA / 2) / math.sqrt(time)))


def _simpson(grid: Floats) -> Floats:
    weights = np.full(len(grid), 2.0)
    weights[1::2] = 4.0
    weights[[0, -1]] = 1.0
    scaled: Floats = weights * (grid[1] - grid[0]) / 3
    return scaled
