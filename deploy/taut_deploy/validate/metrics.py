"""Metrics of a comparison, each with its interval.

With ``d = NLL_candidate - NLL_baseline`` and ``p`` the probability given to the true token, over
all positions: ``delta_nll`` mean d, ``perplexity_ratio`` exp(mean d), ``mean_kl`` and its quantiles
(nats), ``top1_agreement`` share of positions with the same most likely token, ``rms_delta_p`` root
mean square of the difference of p. The set is that of llama.cpp's ``--kl-divergence``.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from taut_deploy.validate.bootstrap import (
    ALPHA,
    Interval,
    mean_interval,
    quantile_intervals,
    resample_indices,
)
from taut_deploy.validate.divergence import Comparison, Floats
from taut_deploy.validate.outcome import Metric
from taut_deploy.validate.paired.wilson import wilson_interval

_BINS, _LEAST_SHOWN = 40, 1e-6  # of the histogram; less is rounding
QUANTILES = {"kl_p50": 0.5, "kl_p90": 0.9, "kl_p99": 0.99}
_KL_METRICS = ("mean_kl", *QUANTILES)


def stack(comparisons: Sequence[Comparison]) -> Comparison:
    """Join the comparisons of equally long sequences into arrays [sequences, positions]."""
    return _joined(comparisons, np.stack)


def joined(parts: Sequence[Comparison]) -> Comparison:
    """Join stacks of comparisons over further sequences, arrays [sequences, positions]."""
    return _joined(parts, np.concatenate)


def _joined(
    comparisons: Sequence[Comparison], join: Callable[[list[NDArray[Any]]], NDArray[Any]]
) -> Comparison:
    return Comparison(
        baseline_nll=join([one.baseline_nll for one in comparisons]),
        candidate_nll=join([one.candidate_nll for one in comparisons]),
        kl=join([one.kl for one in comparisons]),
        baseline_top1=join([one.baseline_top1 for one in comparisons]),
        candidate_top1=join([one.candidate_top1 for one in comparisons]),
        kl_is_lower_bound=any(one.kl_is_lower_bound for one in comparisons),
    )


def measure(
    comparison: Comparison,
    noise: Comparison | None,
    *,
    resamples: int,
    seed: int,
    alpha: float = ALPHA,
) -> dict[str, Metric]:
    """Compute every metric.

    Args:
        comparison: arrays [sequences, positions], at least two sequences.
        noise: the baseline against itself, for the noise floor.
        resamples: bootstrap resamples.
        seed: of the bootstrap.
        alpha: one minus the confidence of the intervals; less than 0.05 where data are looked at
            more than once.

    Returns:
        Metrics by name; :class:`taut_deploy.validate.policy.Requirements` has the same names.
    """
    floor = {} if noise is None else point_estimates(noise)
    indices = resample_indices(len(comparison.kl), resamples, seed)
    intervals = _intervals(
        comparison, lambda rows: mean_interval(rows.mean(axis=1), indices, alpha)
    )
    intervals["top1_agreement"] = _not_surer_than_counted(
        intervals["top1_agreement"], comparison, alpha
    )
    quantiles = quantile_intervals(comparison.kl, list(QUANTILES.values()), indices, alpha)
    intervals |= dict(zip(QUANTILES, quantiles, strict=True))
    return {
        name: Metric(
            **dataclasses.asdict(interval),
            noise=floor.get(name),
            is_lower_bound=comparison.kl_is_lower_bound and name in _KL_METRICS,
        )
        for name, interval in intervals.items()
    }


def _not_surer_than_counted(share: Interval, comparison: Comparison, alpha: float) -> Interval:
    """A share that is the same in every sequence, with Wilson's interval over all positions.

    Sequences that are all alike have nothing to tell their spread by, which is no proof unless the
    two models are one and the same.
    """
    same_model = np.array_equal(comparison.baseline_nll, comparison.candidate_nll)
    if share.low < share.high or (same_model and not comparison.kl.any()):
        return share
    agreeing = float((comparison.baseline_top1 == comparison.candidate_top1).sum())
    ends = [
        wilson_interval(agreeing, comparison.kl.size, float(stats.norm.isf(level)))
        for level in (alpha / 2, alpha)
    ]
    (low, high), (one_sided_low, one_sided_high) = ends
    return Interval(share.estimate, low, high, one_sided_low, one_sided_high)


def point_estimates(comparison: Comparison) -> dict[str, float]:
    """The metrics without intervals, for any number of sequences."""

    def point(rows: Floats) -> Interval:
        return Interval(*[float(rows.mean())] * 5)

    points = {name: value.estimate for name, value in _intervals(comparison, point).items()}
    quantiles = np.quantile(comparison.kl, list(QUANTILES.values()))
    return points | dict(zip(QUANTILES, map(float, quantiles), strict=True))


def kl_tail(comparison: Comparison) -> dict[str, float]:
    """Quantiles of the KL that are too far out for an interval, and its maximum."""
    return {
        "p99.9": float(np.quantile(comparison.kl, 0.999)),
        "max": float(comparison.kl.max()),
    }


def kl_histogram(kl: Floats) -> dict[str, Any]:
    """Positions by their KL, in bins of equal width on a logarithmic axis.

    Args:
        kl: of any shape, nats.

    Returns:
        ``edges`` of the bins in nats, ``counts``, and how many positions are ``below`` the first.
    """
    edges = np.geomspace(_LEAST_SHOWN, max(float(kl.max()) * 1.001, 10 * _LEAST_SHOWN), _BINS + 1)
    counts, _ = np.histogram(kl, edges)
    below = int((kl < _LEAST_SHOWN).sum())
    return {"edges": edges.tolist(), "counts": counts.tolist(), "below": below}


def perplexities(comparison: Comparison) -> dict[str, float]:
    """Perplexity of each model: exp of the mean negative log-likelihood."""
    return {
        "baseline": _exp(float(comparison.baseline_nll.mean())),
        "candidate": _exp(float(comparison.candidate_nll.mean())),
    }


def mean_delta_p(comparison: Comparison) -> float:
    """Mean change of the true token's probability, candidate minus baseline."""
    return float(_delta_p(comparison).mean())


def _exp(nats: float) -> float:
    """Exponential that stays finite, so that a report of a ruined model is still valid JSON."""
    return math.exp(min(nats, 700.0))


def _delta_p(comparison: Comparison) -> Floats:
    delta: Floats = np.exp(-comparison.candidate_nll) - np.exp(-comparison.baseline_nll)
    return delta


def _intervals(comparison: Comparison, mean: Callable[[Floats], Interval]) -> dict[str, Interval]:
    delta_nll = mean(comparison.candidate_nll - comparison.baseline_nll)
    same = (comparison.baseline_top1 == comparison.candidate_top1).astype(np.float64)
    square = mean(_delta_p(comparison) ** 2)
    return {
        "perplexity_ratio": _transform(delta_nll, _exp),
        "delta_nll": delta_nll,
        "mean_kl": _transform(mean(comparison.kl), lambda x: max(x, 0.0)),
        "top1_agreement": _transform(mean(same), lambda x: min(max(x, 0.0), 1.0)),
        "rms_delta_p": _transform(square, lambda x: max(x, 0.0) ** 0.5),
    }


def _transform(interval: Interval, increasing: Callable[[float], float]) -> Interval:
    """Map an interval through an increasing function; its coverage stays."""
    return Interval(*(float(increasing(end)) for end in dataclasses.astuple(interval)))
