"""What a comparison costs the process beyond what its own steps show, learnt while clients work.

The loop reads workers' answers in callbacks of its own, and clients' requests find their caches
cold after a comparison. No clock shows that, so it is estimated: the CPU time of the process over
windows of a quarter of a second is a sum of what requests, their events and the seen steps of
comparisons cost each. Comparisons come at random among the requests, which is what tells
them apart. It is Bayesian linear regression with known prior and estimated noise (Bishop, Pattern
Recognition and Machine Learning, 2006, §3.3), in which old windows fade: without data, or with
data too noisy to tell, the prior stands, and it counts too much rather than too little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_PRIOR = ((0.5e-3, 5e-3), (20e-6, 200e-6), (2.0, 0.7))
"""Mean and standard deviation of the CPU seconds of a request, of an event of a stream, and of a
second seen in comparisons. Not of a second that passes: of a process that is never idle, that alone
would explain everything."""
_WEIGHTS = range(len(_PRIOR))
BOUNDS = 1.0, 6.0
"""Of the factor: never less than was seen, and no fault of the clocks stops the guard for good."""
_FADE = 1 - 1 / 2400
"""Of what was learnt, with each window: ten minutes of work count."""
_LATELY = 0.02
_LEAST_NOISE = 0.03
_LEAST_S = 0.5e-3
"""A window with less work is as noisy as one with this."""


class CostModel:
    """Learns what comparisons cost, from windows of the process's work."""

    def __init__(self) -> None:
        # In units of the prior: it has mean 0 and precision 1 in each direction.
        self._precision = [[0.0] * len(_PRIOR) for _ in _WEIGHTS]
        self._moment = [0.0] * len(_PRIOR)
        self._found = [0.0] * len(_PRIOR)
        self._noise = 0.25**2
        self.factor = _PRIOR[-1][0] + _PRIOR[-1][1]
        """CPU seconds for each second seen in comparisons: a standard deviation above the mean."""

    def learn(self, work: Sequence[float], spent_s: float) -> None:
        """Take down one window.

        Args:
            work: requests that ended, events they had, seconds of CPU time seen in the steps of
                comparisons.
            spent_s: CPU time of the process.
        """
        if not 0.0 <= spent_s < math.inf or min(work) < 0.0:
            return  # a clock that jumped
        expected = sum(part * mean for part, (mean, _) in zip(work, _PRIOR, strict=True))
        row = [part * spread for part, (_, spread) in zip(work, _PRIOR, strict=True)]
        beyond = spent_s - expected
        wrong = beyond - sum(x * weight for x, weight in zip(row, self._found, strict=True))
        # Noise grows with the work: a busy neighbour makes all of it slower.
        size = max(spent_s, spent_s - wrong, _LEAST_S)
        self._noise += _LATELY * (min(1.0, (wrong / size) ** 2) - self._noise)
        trust = 1.0 / (max(self._noise, _LEAST_NOISE**2) * size**2)
        for i in _WEIGHTS:
            self._moment[i] = _FADE * self._moment[i] + trust * row[i] * beyond
            for j in range(i + 1):
                self._precision[i][j] = _FADE * self._precision[i][j] + trust * row[i] * row[j]
        self._found, deviation = _solved(self._precision, self._moment)
        mean, spread = _PRIOR[-1]
        factor = mean + spread * (self._found[-1] + deviation)
        self.factor = min(max(factor, BOUNDS[0]), BOUNDS[1])


def _solved(
    precision: Sequence[Sequence[float]], moment: Sequence[float]
) -> tuple[list[float], float]:
    """Return the posterior's mean and the standard deviation of its last direction.

    Args:
        precision: of the data, lower triangle; the prior's, 1 in each direction, is added.
        moment: precision times what the data say.
    """
    lower: list[list[float]] = []
    half: list[float] = []
    for i in _WEIGHTS:
        row: list[float] = []
        for j in range(i):
            rest = precision[i][j] - sum(a * b for a, b in zip(row, lower[j], strict=False))
            row.append(rest / lower[j][j])
        row.append(math.sqrt(max(precision[i][i] + 1.0 - sum(a * a for a in row), 1e-9)))
        lower.append(row)
        half.append((moment[i] - sum(a * b for a, b in zip(row, half, strict=False))) / row[i])
    found = [0.0] * len(half)
    for i in reversed(_WEIGHTS):
        above = sum(lower[k][i] * found[k] for k in range(i + 1, len(half)))
        found[i] = (half[i] - above) / lower[i][i]
    return found, 1.0 / lower[-1][-1]
