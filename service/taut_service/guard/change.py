"""Evidence that a mean has risen above its bound at some time, not only on the whole.

What was good for a million answers would hide what goes wrong now: the capital lost on them has to
be won back first. So half of the capital begins at the start and the rest at the beginning of each
block of answers, the j-th with a share of 1 / ((j + 1) (j + 2)); until then it lies idle. Such a
mixture over times of change is an e-process too, so the rate of false alarms holds for ever, and a
change after n blocks costs 2 ln n. Beginnings further back than :data:`BLOCKS` are given up, which
only makes the evidence weaker. Source: mixtures as in Shin, Ramdas and Rinaldo, E-detectors, 2022
(arXiv:2203.03532), there with other weights and another aim.
"""

from __future__ import annotations

from collections.abc import Mapping

from taut_service.guard.betting import SHARES, BetLogs, log_mean, mixture

BLOCK = 50
"""Answers between two beginnings."""
BLOCKS = 20
"""Newest beginnings that are kept."""


def log_risen(whole: BetLogs, blocks: Mapping[int, BetLogs], newest: int) -> float:
    """Return the log of the evidence that the mean is, or has come to be, above a bound.

    Args:
        whole: bets on everything that was seen.
        blocks: number → bets on what was seen in it; those that are given up are left out.
        newest: number of the newest block.
    """
    logs = [mixture(whole.logs)]
    weights = [0.5]
    since = [0.0] * len(SHARES)
    for number in range(newest, max(-1, newest - BLOCKS), -1):
        if (block := blocks.get(number)) is not None:
            since = [a + b for a, b in zip(since, block.logs, strict=True)]
        logs.append(mixture(since))
        weights.append(0.5 / ((number + 1) * (number + 2)))
    # Beginnings that have not come yet hold what they were given.
    logs.append(0.0)
    weights.append(0.5 / (newest + 2))
    return log_mean(logs, weights)
