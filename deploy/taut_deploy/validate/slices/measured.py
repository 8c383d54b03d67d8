"""Values of two models over the prompts of a slice, as metrics with intervals."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from taut_deploy.validate.divergence import Comparison
from taut_deploy.validate.outcome import Metric
from taut_deploy.validate.paired.clusters import ClusterRatio, ratio_interval
from taut_deploy.validate.paired.shares import share_metrics
from taut_deploy.validate.paired.wilson import wilson_interval

Z, Z_ONE_SIDED = 1.959964, 1.644854


@dataclass(frozen=True, slots=True)
class Measured:
    """What a slice came to.

    Args:
        metrics: by the names of the policy.
        items: prompts that both models answered.
        values: what the metrics are made of, each model's own, by what it is.
        parts: the same by parts of the slice (languages), where it has some.
        not_measured: metric to the reason why it is missing.
    """

    metrics: Mapping[str, Metric]
    items: int
    values: Mapping[str, Mapping[str, float]]
    parts: Mapping[str, float] = field(default_factory=dict)
    not_measured: Mapping[str, str] = field(default_factory=dict)


def share_difference(
    baseline: Sequence[bool], candidate: Sequence[bool], seed: int
) -> tuple[Metric, dict[str, float]]:
    """Share of the candidate less that of the baseline, and both.

    Args:
        baseline: [prompts] whether its answer is good.
        candidate: likewise.
        seed: of the bootstrap, which single prompts need none of.
    """
    first, second = np.array(baseline, bool), np.array(candidate, bool)
    metric = share_metrics(first, second, None, Z, resamples=200, seed=seed)["difference"]
    return metric, {"baseline": float(first.mean()), "candidate": float(second.mean())}


def share(agreeing: Sequence[bool]) -> Metric:
    """Share of prompts on which both models agree."""
    right, items = sum(agreeing), len(agreeing)
    low, high = wilson_interval(right, items, Z)
    one_low, one_high = wilson_interval(right, items, Z_ONE_SIDED)
    return Metric(right / items, low, high, one_low, one_high)


def ratio(
    above: Sequence[float], below: Sequence[float], *, resamples: int, seed: int
) -> Metric | None:
    """Ratio of two sums over prompts; None where the lower sum is 0."""
    sums = ClusterRatio(np.array(above, np.float64), np.array(below, np.float64))
    if sums.below.sum() <= 0:
        return None
    low, high = ratio_interval(sums, 0.05, resamples=resamples, seed=seed)
    one_low, one_high = ratio_interval(sums, 0.1, resamples=resamples, seed=seed)
    return Metric(float(sums.above.sum() / sums.below.sum()), low, high, one_low, one_high)


def likelihood_metrics(
    comparisons: Sequence[Comparison], *, resamples: int, seed: int
) -> dict[str, Metric]:
    """``perplexity_ratio`` and ``mean_kl`` over texts of different lengths, texts resampled.

    Args:
        comparisons: one a text, arrays [positions].
        resamples: of the bootstrap.
        seed: of the bootstrap.
    """
    counts = [float(c.kl.size) for c in comparisons]
    delta = [float((c.candidate_nll - c.baseline_nll).sum()) for c in comparisons]
    kl = [float(c.kl.sum()) for c in comparisons]
    change = ratio(delta, counts, resamples=resamples, seed=seed)
    mean = ratio(kl, counts, resamples=resamples, seed=seed)
    assert change is not None  # noqa: S101 - there are positions
    assert mean is not None  # noqa: S101
    bound = any(c.kl_is_lower_bound for c in comparisons)
    return {
        "perplexity_ratio": _mapped(change, lambda end: math.exp(min(end, 700.0))),
        "mean_kl": replace(_mapped(mean, lambda end: max(end, 0.0)), is_lower_bound=bound),
    }


def perplexities(comparisons: Sequence[Comparison]) -> dict[str, float]:
    """Each model's perplexity over all texts."""
    found: dict[str, Any] = {}
    for role in ("baseline", "candidate"):
        values = np.concatenate([getattr(c, f"{role}_nll") for c in comparisons])
        found[role] = math.exp(min(float(values.mean()), 700.0))
    return found


def _mapped(metric: Metric, increasing: Callable[[float], float]) -> Metric:
    """A metric passed through an increasing function, ends and all."""
    return Metric(
        estimate=increasing(metric.estimate),
        low=increasing(metric.low),
        high=increasing(metric.high),
        one_sided_low=increasing(metric.one_sided_low),
        one_sided_high=increasing(metric.one_sided_high),
    )
