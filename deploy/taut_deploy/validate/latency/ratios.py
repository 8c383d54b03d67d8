"""Ratios candidate ÷ baseline of latency and throughput, with intervals from blocks.

The data are nested: gaps between tokens lie in requests, requests in blocks. What lies in one block
shares the state of the machine at that moment (clock rate, neighbours, a batch that ran together)
and is not independent: hundreds of gaps of one slow second say about as much as one. So the block
is the unit that is left out or resampled, whole, and together with its partner of the other model,
which ran beside it in time: the comparison is paired. Requests inside a block are not drawn again;
resampling both levels counts the inner spread twice (Davison & Hinkley, Bootstrap Methods and Their
Application, 1997, §3.8).

Throughput is tokens ÷ seconds over all blocks. The interval of its ratio, and of the ratio of
medians, is that of the jackknife over pairs of blocks, on the logarithm (Miller, "The jackknife - a
review", Biometrika 61, 1974), with Student's quantiles of two degrees of freedom fewer than pairs:
two figures are estimated. The jackknife needs figures that move smoothly with the data, which a
sample's median does not (Shao & Wu, "A general theory for jackknife variance estimation", Annals of
Statistics 17, 1989): the medians are those of :func:`smooth_quantiles`.

The 95th percentiles are those of all answers pooled: a smoothed one would be that of the slowest
block. Their interval is the wider one of the expanded percentile interval
(:func:`taut_deploy.validate.bootstrap.expanded_levels`) and Student's with the bootstrap's standard
error. Where few blocks hold the tail, that error is itself known badly: a variance of n values with
kurtosis k has 2 n / (k - 1) degrees of freedom (Satterthwaite, "An approximate distribution of
estimates of variance components", Biometrics 2, 1946), where the values are the differences within
pairs of the shares of answers in the tail.

``tests/deploy/test_validate_ratios.py`` has how often these intervals hold the truth: 95 % within
one percent for medians and throughput of 12 and 24 blocks; 94 to 99 % for 95th percentiles of 12
blocks whose speed varies by a twentieth, a fifth or a half, the more the calmer the machine.
Outside of it lie eight blocks on a machine whose speed wanders by half (throughput, 93.5 % of 4,000
runs).

Failed requests have no latency and no tokens, but their time counts in the throughput. The share of
them has the exact interval of Clopper & Pearson (Biometrika 26, 1934), requests taken as
independent.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import numpy as np
from scipy import stats

from taut_deploy.validate.bootstrap import Floats, expanded_levels, resample_indices
from taut_deploy.validate.latency.measure import Block, Level
from taut_deploy.validate.outcome import Metric

LEAST_USABLE_BLOCKS = 6
_MEDIAN, _TAIL = 0.5, 0.95
_LEAST_FREEDOM = 2.0
_TINY = 1e-12
_LARGEST_LOG = 13.8  # about a million, in place of an infinite end, which JSON has no word for
SAMPLES: dict[str, Callable[[Block], list[float]]] = {
    "ttft": lambda block: [answer.ttft_s for answer in block.whole],
    "itl": lambda block: [gap for answer in block.whole for gap in answer.gaps_s],
    "e2e": lambda block: [answer.e2e_s for answer in block.whole],
}
"""Seconds of a block, by kind of latency."""
RATIOS = (*(f"{kind}_{p}_ratio" for kind in SAMPLES for p in ("p50", "p95")), "throughput_ratio")
"""Names of the ratios, in the order of reports."""
_Pairs = Sequence[tuple[Floats, Floats]]


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
        rows = [(samples(baseline), samples(candidate)) for baseline, candidate in level.pairs]
        usable = [(np.asarray(b), np.asarray(c)) for b, c in rows if b and c]
        if len(usable) >= LEAST_USABLE_BLOCKS:
            found[f"{kind}_p50_ratio"] = _median_ratio(usable)
            found[f"{kind}_p95_ratio"] = _tail_ratio(usable, resamples, seed)
    throughput = _throughput_ratio(level)
    if throughput is not None:
        found["throughput_ratio"] = throughput
    return {name: found[name] for name in RATIOS if name in found}


def smooth_quantiles(samples: Floats, probability: float, draws: int) -> Floats:
    """Quantiles that move smoothly with the data: what so many draws of them have on average.

    Source: Harrell and Davis, "A new distribution-free quantile estimator", Biometrika 69, 1982;
    there with as many draws as there are values, here with as many as are independent.

    Args:
        samples: [..., values], quantiles of the last axis are taken.
        probability: in (0, 1).
        draws: at least one.
    """
    weights = _weights(samples.shape[-1], probability, draws)
    found: Floats = np.sort(samples, axis=-1) @ weights
    return found


@lru_cache(maxsize=64)
def _weights(values: int, probability: float, draws: int) -> Floats:
    steps = np.arange(values + 1) / values
    parameters = (draws + 1) * probability, (draws + 1) * (1 - probability)
    found: Floats = np.diff(stats.beta.cdf(steps, *parameters))
    return found


def _median_ratio(pairs: _Pairs) -> Metric:
    def log_ratio(chosen: _Pairs) -> float:
        below, above = (
            smooth_quantiles(np.concatenate(side), _MEDIAN, len(pairs))
            for side in zip(*chosen, strict=True)
        )
        return math.log(above / below)

    return _jackknifed(log_ratio(pairs), [log_ratio(rest) for rest in _each_left_out(pairs)])


def _each_left_out(pairs: _Pairs) -> Iterator[_Pairs]:
    for at in range(len(pairs)):
        yield [*pairs[:at], *pairs[at + 1 :]]


def _throughput_ratio(level: Level) -> Metric | None:
    """Tokens per second; a block without a token of the baseline has nothing to compare with."""
    usable = [pair for pair in level.pairs if pair[0].whole]
    if len(usable) < LEAST_USABLE_BLOCKS:
        return None
    # Both are [blocks, 2], the baseline's column first.
    tokens = np.array([[_tokens(block) for block in pair] for pair in usable], dtype=float)
    seconds = np.array([[block.wall_s for block in pair] for pair in usable])
    if tokens[:, 1].sum() == 0.0:
        return Metric(0.0, 0.0, 0.0, 0.0, 0.0)
    rates = tokens.sum(axis=0) / seconds.sum(axis=0)
    left = (tokens.sum(axis=0) - tokens) / (seconds.sum(axis=0) - seconds)
    with np.errstate(divide="ignore"):  # all tokens of the candidate in one block
        logs = np.log(left[:, 1] / left[:, 0])
    return _jackknifed(math.log(rates[1] / rates[0]), logs.tolist())


def _tokens(block: Block) -> int:
    return sum(answer.tokens for answer in block.whole)


def _jackknifed(estimate: float, left_out: Sequence[float]) -> Metric:
    """Ratio and ends out of a logarithm, and what it is without each pair of blocks."""
    pairs = len(left_out)
    spread = np.asarray(left_out) - estimate
    error = math.sqrt((pairs - 1) / pairs * float(spread @ spread))
    two, one = (_student(pairs, alpha) * error for alpha in (0.025, 0.05))
    return Metric(
        math.exp(estimate),
        _ratio(estimate - two),
        _ratio(estimate + two),
        _ratio(estimate - one),
        _ratio(estimate + one),
    )


def _ratio(log: float) -> float:
    return math.exp(min(log, _LARGEST_LOG))


def _student(pairs: int, alpha: float) -> float:
    return float(stats.t.isf(alpha, pairs - 2))


def _tail_ratio(pairs: _Pairs, resamples: int, seed: int) -> Metric:
    def log_ratio(choice: Sequence[int]) -> float:
        sides = (np.concatenate([pairs[i][side] for i in choice]) for side in (0, 1))
        below, above = (float(np.quantile(side, _TAIL)) for side in sides)
        return math.log(above / below)

    indices = resample_indices(len(pairs), resamples, seed)
    drawn = np.array([log_ratio(choice) for choice in indices.tolist()])
    estimate = log_ratio(range(len(pairs)))
    low, high, one_low, one_high = np.quantile(drawn, expanded_levels(len(pairs)))
    error = float(drawn.std(ddof=1)) * math.sqrt(len(pairs) / (len(pairs) - 1))
    freedom = _freedom_of_tails(pairs)
    two, one = (float(stats.t.isf(alpha, freedom)) * error for alpha in (0.025, 0.05))
    return Metric(
        math.exp(estimate),
        _ratio(min(float(low), estimate - two)),
        _ratio(max(float(high), estimate + two)),
        _ratio(min(float(one_low), estimate - one)),
        _ratio(max(float(one_high), estimate + one)),
    )


def _freedom_of_tails(pairs: _Pairs) -> float:
    """Degrees of freedom of the standard error: fewer, the fewer blocks hold the tail."""
    tails = [np.quantile(np.concatenate(side), _TAIL) for side in zip(*pairs, strict=True)]
    shares = np.array(
        [
            [float(np.mean(of > tail)) for of, tail in zip(pair, tails, strict=True)]
            for pair in pairs
        ]
    )
    apart = shares[:, 1] - shares[:, 0]
    apart -= apart.mean()
    kurtosis = len(pairs) * float((apart**4).sum()) / max(float((apart**2).sum()) ** 2, _TINY)
    freedom = min(2 * len(pairs) / max(kurtosis - 1, _TINY), len(pairs))
    return max(freedom - 2, _LEAST_FREEDOM)


def error_rate(failed: int, sent: int) -> Metric:
    """The share of failed requests with its exact interval.

    Args:
        failed: requests that gave no whole answer.
        sent: all requests, at least one.
    """
    test = stats.binomtest(failed, sent)
    two, one = (test.proportion_ci(level, "exact") for level in (0.95, 0.90))
    return Metric(failed / sent, float(two.low), float(two.high), float(one.low), float(one.high))
