"""Intervals from sequence blocks.

Tokens of one sequence share their context and are not independent, so the sequence is the unit that
is resampled. Each row of an input is one sequence and every metric of both models is taken from the
same rows: the comparison is paired.

Means get the studentised interval (Efron & Tibshirani, An Introduction to the Bootstrap, 1993,
§12.5), because the plain percentile interval is too narrow for few blocks: over 600 simulated
samples of 16 skewed (log-normal) blocks, the nominal 95 % interval covered 86 % (percentile), 87 %
(BCa), 88 % (Student t) and 91 % (studentised); for 16 normal blocks 90, 91, 96 and 95 %.

Quantiles have no standard error of their own to divide by. A value is in their interval where the
share of positions above it, a mean, may be what the quantile says (Francisco and Fuller, "Quantile
estimation with a complex survey design", Annals of Statistics 19, 1991, §4). Percentiles of
resampled quantiles held the truth in 87 % only, for the 99th percentile of 32 sequences.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]
ALPHA = 0.05
"""One minus the confidence of an interval that is looked at once."""
_LARGEST = 1e6  # in place of an infinite end, which JSON has no word for


@dataclass(frozen=True, slots=True)
class Interval:
    """Estimate with its two-sided 95 % interval and the two one-sided 95 % bounds."""

    estimate: float
    low: float
    high: float
    one_sided_low: float
    one_sided_high: float


def resample_indices(blocks: int, resamples: int, seed: int) -> NDArray[np.int64]:
    """Draw which blocks make up each resample; one draw serves all metrics and keeps them paired.

    Returns:
        [resamples, blocks] int64 with values in ``[0, blocks)``.
    """
    return np.random.default_rng(seed).integers(0, blocks, size=(resamples, blocks))


def mean_interval(
    block_means: Floats, indices: NDArray[np.int64], alpha: float = ALPHA
) -> Interval:
    """Interval of the mean of equally long blocks: studentised bootstrap, and Student's if wider.

    Args:
        block_means: [blocks] fp64, at least two.
        indices: [resamples, blocks] from :func:`resample_indices`.
        alpha: one minus the confidence of the two-sided interval; each one-sided bound errs as
            often as both of its sides.

    Returns:
        The interval; it has no width when all blocks are equal, as for identical checkpoints.
    """
    blocks = block_means.size
    estimate = float(block_means.mean())
    if np.ptp(block_means) == 0.0:
        return Interval(*[float(block_means[0])] * 5)
    error = float(block_means.std(ddof=1)) / np.sqrt(blocks)
    drawn = block_means[indices]
    means, errors = drawn.mean(axis=1), drawn.std(axis=1, ddof=1) / np.sqrt(blocks)
    # A resample that drew equal blocks only has no spread to divide by: use the sample's own.
    errors = np.where(np.ptp(drawn, axis=1) == 0.0, error, errors)
    pivots = (means - estimate) / errors
    levels = [alpha / 2, alpha, 1 - alpha, 1 - alpha / 2]
    pivot = np.quantile(pivots, levels)
    # Few blocks leave few resamples to tell their tails by: never narrower than Student's interval.
    student = stats.t.ppf(levels, blocks - 1)
    t_low, t_05 = np.minimum(pivot, student)[:2]
    t_95, t_high = np.maximum(pivot, student)[2:]
    return Interval(
        estimate=estimate,
        low=float(estimate - t_high * error),
        high=float(estimate - t_low * error),
        one_sided_low=float(estimate - t_95 * error),
        one_sided_high=float(estimate - t_05 * error),
    )


def quantile_intervals(
    values: Floats,
    probabilities: Sequence[float],
    indices: NDArray[np.int64],
    alpha: float = ALPHA,
) -> list[Interval]:
    """Intervals of pooled quantiles: of the values that the shares above them do not refute.

    Args:
        values: [blocks, positions] fp64.
        probabilities: quantiles wanted, each in (0, 1).
        indices: [resamples, blocks] from :func:`resample_indices`.
        alpha: one minus the confidence of the two-sided interval.

    Returns:
        One interval per probability.
    """
    return [_quantile_interval(values, float(p), indices, alpha) for p in probabilities]


def _quantile_interval(
    values: Floats, probability: float, indices: NDArray[np.int64], alpha: float
) -> Interval:
    ordered = np.sort(values, axis=None)
    if ordered[0] == ordered[-1]:  # as for identical checkpoints
        return Interval(*[float(ordered[0])] * 5)
    above = 1.0 - probability

    @cache
    def share(at: int) -> Interval:
        """Of positions above a value: it falls as the value grows."""
        return mean_interval((values > ordered[at]).mean(axis=1), indices, alpha)

    def first(seen: Callable[[Interval], bool], start: int, end: int) -> int:
        return bisect_left(range(end), True, lo=start, key=lambda at: seen(share(at)))

    estimate, last = float(np.quantile(ordered, probability)), ordered.size - 1
    middle = min(int(np.searchsorted(ordered, estimate)), last)
    low = first(lambda seen: seen.low <= above, 0, middle)
    one_low = first(lambda seen: seen.one_sided_low <= above, low, middle)
    lowest = (min(float(ordered[at]), estimate) for at in (low, one_low))
    if probability**ordered.size > alpha / 2:  # too few positions for one of them to be above it
        highest = iter((_LARGEST, _LARGEST))
    else:
        high = min(first(lambda seen: seen.high < above, middle, last + 1), last)
        one_high = first(lambda seen: seen.one_sided_high < above, middle, high)
        highest = (max(float(ordered[at]), estimate) for at in (high, one_high))
    return Interval(estimate, next(lowest), next(highest), next(lowest), next(highest))


def expanded_levels(blocks: int, alpha: float = ALPHA) -> NDArray[np.float64]:
    """Quantiles of the resamples at which a percentile interval of few blocks ends.

    The plain percentile interval behaves like a normal interval with the variance divided by ``n``
    in place of ``n - 1``, too narrow for few blocks. Its levels are moved outwards to where a
    Student t interval would end: ``Φ(-sqrt(n / (n - 1)) t)`` with n - 1 degrees of freedom
    (Hesterberg, "What Teachers Should Know About the Bootstrap", The American Statistician 69,
    2015, §5.3, the expanded percentile interval).

    Args:
        blocks: n, at least two.
        alpha: one minus the confidence of the two-sided interval.

    Returns:
        Levels for the two-sided interval's ends and the two one-sided bounds:
        [low, high, one-sided low, one-sided high].
    """
    student = stats.t.ppf([alpha / 2, alpha], blocks - 1)
    low, one_sided = stats.norm.cdf(np.sqrt(blocks / (blocks - 1)) * student)
    return np.array([low, 1.0 - low, one_sided, 1.0 - one_sided])
