"""Ratios candidate ÷ baseline of latency and throughput, with intervals from blocks.

The data are nested: gaps between tokens lie in requests, requests in blocks. What lies in one block
shares the state of the machine at that moment (clock rate, neighbours, a batch that ran together)
and is not independent: hundreds of gaps of one slow second say about as much as one. So the block
is the unit that is resampled, whole, and together with its partner of the other model, which ran
beside it in time: the comparison is paired. Requests inside a drawn block are not drawn again;
resampling both levels counts the inner spread twice (Davison & Hinkley, Bootstrap Methods and Their
Application, 1997, §3.8).

Quantiles are of all answers pooled, throughput is tokens ÷ seconds over all blocks. Intervals are
expanded percentile intervals (:func:`taut_deploy.validate.bootstrap.expanded_levels`). In 400
simulated runs each of 8, 12 and 24 blocks, calm and drifting by half, the nominal 95 % held the
truth in 94 to 99.5 % (medians), 91 to 97.5 % (95th percentiles) and 91 to 95 % (throughput).

Failed requests have no latency and no tokens, but their time counts in the throughput. The share of
them has the exact interval of Clopper & Pearson (Biometrika 26, 1934), requests taken as
independent.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from taut_deploy.validate.bootstrap import Floats, expanded_levels, resample_indices
from taut_deploy.validate.job import Metric
from taut_deploy.validate.latency.measure import Block, Level

LEAST_USABLE_BLOCKS = 6
_PROBABILITIES = {"p50": 0.5, "p95": 0.95}
SAMPLES: dict[str, Callable[[Block], list[float]]] = {
    "ttft": lambda block: [answer.ttft_s for answer in block.whole],
    "itl": lambda block: [gap for answer in block.whole for gap in answer.gaps_s],
    "e2e": lambda block: [answer.e2e_s for answer in block.whole],
}
"""Seconds of a block, by kind of latency."""
RATIOS = (*(f"{kind}_{p}_ratio" for kind in SAMPLES for p in _PROBABILITIES), "throughput_ratio")
"""Names of the ratios, in the order of reports."""


def level_ratios(level: Level, resamples: int, seed: int) -> dict[str, Metric]:
    """Compute the ratios of one concurrency.

    Args:
        level: its blocks.
        resamples: of the bootstrap.
        seed: of the bootstrap.

    Returns:
        Metrics by name of :data:`RATIOS`; those with too few usable blocks are absent.
    """
    found = {}
    for kind, samples in SAMPLES.items():
        quantiles = _quantile_ratios(level, samples, resamples, seed)
        if quantiles is not None:
            for name, metric in zip(_PROBABILITIES, quantiles, strict=True):
                found[f"{kind}_{name}_ratio"] = metric
    throughput = _throughput_ratio(level, resamples, seed)
    if throughput is not None:
        found["throughput_ratio"] = throughput
    return {name: found[name] for name in RATIOS if name in found}


def _quantile_ratios(
    level: Level, samples: Callable[[Block], list[float]], resamples: int, seed: int
) -> list[Metric] | None:
    rows = [(samples(baseline), samples(candidate)) for baseline, candidate in level.pairs]
    usable = [(np.asarray(b), np.asarray(c)) for b, c in rows if b and c]
    if len(usable) < LEAST_USABLE_BLOCKS:
        return None
    probabilities = list(_PROBABILITIES.values())

    def ratio(choice: Sequence[int]) -> Floats:
        sides = (np.concatenate([usable[i][side] for i in choice]) for side in (0, 1))
        below, above = (np.quantile(side, probabilities) for side in sides)
        return np.asarray(above / below)

    indices = resample_indices(len(usable), resamples, seed)
    drawn = np.array([ratio(choice) for choice in indices.tolist()])
    estimate = ratio(range(len(usable)))
    return [
        _metric(float(estimate[column]), drawn[:, column], len(usable))
        for column in range(len(probabilities))
    ]


def _throughput_ratio(level: Level, resamples: int, seed: int) -> Metric | None:
    """Tokens per second; a block without a token of the baseline has nothing to compare with."""
    usable = [pair for pair in level.pairs if pair[0].whole]
    if len(usable) < LEAST_USABLE_BLOCKS:
        return None
    # Both are [blocks, 2], the baseline's column first.
    tokens = np.array([[_tokens(block) for block in pair] for pair in usable], dtype=float)
    seconds = np.array([[block.wall_s for block in pair] for pair in usable])
    indices = resample_indices(len(usable), resamples, seed)
    rates = tokens[indices].sum(axis=1) / seconds[indices].sum(axis=1)
    whole = tokens.sum(axis=0) / seconds.sum(axis=0)
    return _metric(float(whole[1] / whole[0]), rates[:, 1] / rates[:, 0], len(usable))


def _tokens(block: Block) -> int:
    return sum(answer.tokens for answer in block.whole)


def _metric(estimate: float, drawn: NDArray[np.float64], blocks: int) -> Metric:
    low, high, one_low, one_high = map(float, np.quantile(drawn, expanded_levels(blocks)))
    return Metric(estimate, low, high, one_low, one_high)


def error_rate(failed: int, sent: int) -> Metric:
    """The share of failed requests with its exact interval.

    Args:
        failed: requests that gave no whole answer.
        sent: all requests, at least one.
    """
    test = stats.binomtest(failed, sent)
    two, one = (test.proportion_ci(level, "exact") for level in (0.95, 0.90))
    return Metric(failed / sent, float(two.low), float(two.high), float(one.low), float(one.high))
