"""Interval of the recovery: accuracy of the candidate over that of the baseline, on the same items.

The hybrid of Wilson's intervals of Bonett and Price, "Confidence intervals for a ratio of binomial
proportions based on paired data", Statistics in Medicine 25, 2006; recommended by Fagerland,
Lydersen, Laake, "Recommended tests and confidence intervals for paired binomial proportions",
Statistics in Medicine 33, 2014. Items that neither model answers say nothing about the ratio and
are left out.
"""

import math

from taut_deploy.validate.paired.counts import PairedCounts
from taut_deploy.validate.paired.wilson import wilson_interval


def recovery_interval(counts: PairedCounts, z: float) -> tuple[float, float]:
    """Interval of the ratio of accuracies.

    Args:
        counts: with at least one item that the baseline answered rightly.
        z: quantile of the normal distribution, 1.96 for 95 %.

    Returns:
        The ends; the upper is infinite where Wilson's lower end of the baseline is 0.
    """
    used = counts.items - counts.neither
    right, other = counts.candidate_right, counts.baseline_right
    ratio = (counts.flips + 2) / ((right + 1) * (other + 1))
    narrowed = z * math.sqrt(ratio) / (_spread(right, used) + _spread(other, used))
    low, high = wilson_interval(right, used, narrowed)
    other_low, other_high = wilson_interval(other, used, narrowed)
    return low / other_high, (high / other_low if other_low > 0 else math.inf)


def _spread(right: int, used: int) -> float:
    return math.sqrt((1 - (right + 1) / (used + 2)) / (right + 1))
