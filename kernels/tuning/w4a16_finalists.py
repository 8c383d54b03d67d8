"""Lets the fastest tiles of a bucket meet at numbers of tokens inside it.

A bucket's largest M is not all: a tile that fills the card there may leave half of it idle at
three quarters (kernels/README.md). Used by `tune_w4a16_wgmma` with ``--between``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from taut_kernels.gemm.w4a16.lookup import Choice
from taut_kernels.tuner import timing

SubjectOf = Callable[[Choice, int], timing.Subject]
"""Makes the subject of a choice at a number of tokens."""
FINALISTS = 4
"""Of a bucket, beside what ships."""
_SHARES = (0.25, 0.5, 0.75, 1.0)
_LEAST_CALLS = 8
_GAIN = 1.02
_LOSS = 0.98
"""What ships ÷ another: two runs of one tile differ by about as much."""


def spread(before: int, most: int) -> list[int]:
    """Return numbers of tokens spread over a bucket, its largest last.

    Args:
        before: largest number of tokens of the bucket before, or 0.
        most: largest of this one.
    """
    found = [before + round(share * (most - before)) for share in _SHARES]
    return list(dict.fromkeys(max(1, tokens) for tokens in found))


def times_at(
    choices: Sequence[Choice], M: int, subject_of: SubjectOf, replays: int
) -> dict[Choice, float]:
    """Time choices one after another.

    Args:
        choices: tiles or regimes.
        M: tokens.
        subject_of: makes what is timed.
        replays: rounds.

    Returns:
        µs a call of each.
    """
    return {
        choice: timing.measure([subject_of(choice, M)], replays, _LEAST_CALLS)[0].median
        for choice in choices
    }


def meet(
    choices: Sequence[Choice], tokens: Sequence[int], subject_of: SubjectOf, replays: int
) -> list[list[float]]:
    """Time choices in turn.

    Args:
        choices: tiles or regimes.
        tokens: numbers of tokens.
        subject_of: makes what is timed.
        replays: rounds.

    Returns:
        µs a call of each choice at each number of tokens.
    """
    times: list[list[float]] = [[] for _ in choices]
    for M in tokens:
        subjects = [subject_of(choice, M) for choice in choices]
        measured = timing.measure(subjects, replays, _LEAST_CALLS)
        for found, own in zip(measured, times, strict=True):
            own.append(found.median)
    return times


def worth_taking(times: Sequence[Sequence[float]]) -> int:
    """Return which choice should serve a bucket: the first, unless another is worth a new row.

    One that gains :data:`_GAIN` by geometric mean and loses :data:`_LOSS` nowhere; of several the
    fastest.

    Args:
        times: of :func:`meet`, of what ships first.
    """
    ships = times[0]

    def gain(own: Sequence[float]) -> float:
        return statistics.geometric_mean(a / b for a, b in zip(ships, own, strict=True))

    worth = [
        i
        for i, own in enumerate(times)
        if gain(own) >= _GAIN and all(a >= _LOSS * b for a, b in zip(ships, own, strict=True))
    ]
    return max(worth, key=lambda i: gain(times[i]), default=0)
