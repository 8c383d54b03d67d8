"""Intervals of a ratio of sums where items come in clusters.

Items of one sub-task are answered rightly or wrongly together: the cluster is what is resampled.
Every quantity here is a ratio of two sums over clusters; its standard error is that of the
linearised ratio (Cochran, "Sampling Techniques", 3rd ed., 1977, §2.11), and the interval is the
studentised bootstrap over clusters (Field and Welsh, "Bootstrapping clustered data", Journal of the
Royal Statistical Society B 69, 2007). It is never narrower than Student's interval.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from taut_deploy.validate.bootstrap import resample_indices

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ClusterRatio:
    """Sums by cluster.

    Args:
        above: [clusters] numerators.
        below: [clusters] denominators, of a positive sum.
    """

    above: Floats
    below: Floats


def ratio_interval(
    ratio: ClusterRatio, alpha: float, *, resamples: int, seed: int
) -> tuple[float, float]:
    """Two-sided interval of ``sum(above) / sum(below)``.

    Args:
        ratio: of at least two clusters.
        alpha: one minus its confidence, 0.05 for 95 %.
        resamples: of the bootstrap.
        seed: of the bootstrap.

    Returns:
        The ends; equal where all clusters have the same ratio.
    """
    above, below = ratio.above, ratio.below
    estimate, error = _estimate(above[None], below[None])
    if error[0] == 0.0:
        return float(estimate[0]), float(estimate[0])
    indices = resample_indices(len(above), resamples, seed)
    drawn, errors = _estimate(above[indices], below[indices])
    # A resample without spread has none to divide by: the sample's own.
    errors = np.where(errors == 0.0, error[0], errors)
    pivots = (drawn - estimate[0]) / errors
    levels = [alpha / 2, 1 - alpha / 2]
    quantiles = np.quantile(pivots[np.isfinite(pivots)], levels)
    student = stats.t.ppf(levels, len(above) - 1)
    low, high = min(quantiles[0], student[0]), max(quantiles[1], student[1])
    return float(estimate[0] - high * error[0]), float(estimate[0] - low * error[0])


def has_spread(ratio: ClusterRatio) -> bool:
    """Whether the clusters differ at all; without that, they do not tell how far others would."""
    _, error = _estimate(ratio.above[None], ratio.below[None])
    return bool(error[0] > 0.0)


def _estimate(above: Floats, below: Floats) -> tuple[Floats, Floats]:
    """Ratio and standard error of each row; a row of [rows, clusters] is one sample."""
    clusters = above.shape[1]
    total = below.sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        estimate = above.sum(axis=1) / total
        residual = above - estimate[:, None] * below
        variance = clusters / (clusters - 1) * (residual**2).sum(axis=1)
        error = np.sqrt(variance) / total
    return estimate, error
