"""Newcombe's interval of the difference of two paired proportions.

Method 10 of Newcombe, "Improved confidence intervals for the difference between binomial
proportions based on paired data", Statistics in Medicine 17, 1998: Wilson's interval of each
proportion, squared and added, with their correlation (corrected for continuity).
"""

import math

from taut_deploy.validate.paired.counts import PairedCounts
from taut_deploy.validate.paired.wilson import wilson_interval


def difference_interval(counts: PairedCounts, z: float) -> tuple[float, float]:
    """Interval of accuracy of the candidate minus that of the baseline.

    Args:
        counts: at least one item.
        z: quantile of the normal distribution, 1.96 for 95 %.
    """
    items = counts.items
    p, q = counts.candidate_right / items, counts.baseline_right / items
    p_low, p_high = wilson_interval(counts.candidate_right, items, z)
    q_low, q_high = wilson_interval(counts.baseline_right, items, z)
    phi = _correlation(counts)
    below = _distance(p - p_low, q_high - q, phi)
    above = _distance(p_high - p, q - q_low, phi)
    return p - q - below, p - q + above


def _distance(first: float, second: float, phi: float) -> float:
    return math.sqrt(max(first**2 - 2 * phi * first * second + second**2, 0.0))


def _correlation(counts: PairedCounts) -> float:
    right, other = counts.candidate_right, counts.baseline_right
    wrong, other_wrong = counts.items - right, counts.items - other
    margins = right * wrong * other * other_wrong
    if margins == 0:
        return 0.0
    product = float(counts.both * counts.neither - counts.baseline_only * counts.candidate_only)
    if product > 0:
        product = max(product - counts.items / 2, 0.0)
    return product / math.sqrt(margins)
