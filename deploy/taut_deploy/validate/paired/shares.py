"""What is said of two models that answered the same items rightly or wrongly.

Recovery, difference and flips with their intervals: from the counts where items stand alone, by the
bootstrap over groups where they belong to some. Groups that are all alike have nothing to tell
their spread by: there the interval is that of the counts.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from taut_deploy.validate.outcome import Metric
from taut_deploy.validate.paired.clusters import (
    ClusterRatio,
    Floats,
    has_spread,
    ratio_interval,
)
from taut_deploy.validate.paired.counts import Bools, PairedCounts, count_pairs
from taut_deploy.validate.paired.difference import difference_interval
from taut_deploy.validate.paired.recovery import recovery_interval
from taut_deploy.validate.paired.wilson import wilson_interval

_LARGEST = 1e6  # in place of an infinite end, which JSON has no word for


def share_metrics(
    baseline: Bools,
    candidate: Bools,
    groups: Sequence[str] | None,
    z: float,
    *,
    resamples: int,
    seed: int,
) -> dict[str, Metric]:
    """Compare two rows of answers.

    Args:
        baseline: [items] whether the baseline was right.
        candidate: [items] whether the candidate was.
        groups: [items] group of each item, or None where items are independent; a single group
            says nothing about other groups and is left out of account.
        z: quantile that intervals are built with: 1.96, or a boundary of sequential looks.
        resamples: of the bootstrap over groups.
        seed: of the bootstrap.

    Returns:
        ``difference`` and ``flips``, and ``recovery`` where the baseline was ever right.
    """
    counts = count_pairs(baseline, candidate)
    estimates = {
        "difference": (counts.candidate_right - counts.baseline_right) / counts.items,
        "flips": counts.flips / counts.items,
    }
    if counts.baseline_right:
        estimates["recovery"] = counts.candidate_right / counts.baseline_right
    # The quantile of the one-sided bound: twice the error on its one side.
    one_sided = float(stats.norm.isf(min(2 * stats.norm.sf(z), 0.5)))
    members = None if groups is None else _members(groups)
    found = {}
    for name, estimate in estimates.items():
        ends: list[float] = []
        sums = None if members is None else _sums(name, baseline, candidate, members)
        for quantile in (z, one_sided):
            if sums is None or not has_spread(sums):
                ends += _independent(name, counts, quantile)
            else:
                alpha = float(2 * stats.norm.sf(quantile))
                ends += ratio_interval(sums, alpha, resamples=resamples, seed=seed)
        low, high, one_low, one_high = (min(end, _LARGEST) for end in ends)
        found[name] = Metric(estimate, low, high, one_low, one_high)
    return found


def _independent(name: str, counts: PairedCounts, z: float) -> tuple[float, float]:
    if name == "difference":
        return difference_interval(counts, z)
    if name == "flips":
        return wilson_interval(counts.flips, counts.items, z)
    return recovery_interval(counts, z)


def _members(groups: Sequence[str]) -> Floats | None:
    """[groups, items] 1 where an item belongs to a group; None for a single group."""
    names = sorted(set(groups))
    if len(names) < 2:
        return None
    return np.array([[float(group == name) for group in groups] for name in names])


def _sums(name: str, baseline: Bools, candidate: Bools, members: Floats) -> ClusterRatio:
    ours, theirs = candidate.astype(np.float64), baseline.astype(np.float64)
    above = {"difference": ours - theirs, "flips": np.abs(ours - theirs), "recovery": ours}[name]
    below = theirs if name == "recovery" else np.ones_like(theirs)
    return ClusterRatio(members @ above, members @ below)


def items_needed(flips: float, margin: float, power: float = 0.8) -> int | None:
    """Items that show a candidate as good as its baseline to be within ``margin`` of it.

    The difference of paired answers has variance ``flips / items`` where the accuracies are equal;
    a one-sided test at 2.5 % then finds it within the margin with the given power. However few the
    flips, it takes the items at which Wilson's interval of none ends at the margin.

    Args:
        flips: share of items that one of the two alone answers rightly.
        margin: how much accuracy may be lost, positive.
        power: chance to find it.

    Returns:
        The number; None where no margin is left.
    """
    if margin <= 0:
        return None
    z = float(stats.norm.isf(0.025))
    without_flips = z**2 * (1 - margin) / margin
    with_flips = (z + float(stats.norm.ppf(power))) ** 2 * flips / margin**2
    return max(2, math.ceil(without_flips), math.ceil(with_flips))
