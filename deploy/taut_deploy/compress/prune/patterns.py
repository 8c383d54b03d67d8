"""Sparsity patterns: how many weights may stay, and within what they compete.

``n:m`` keeps ``n`` of every ``m`` consecutive input channels, which sparse tensor cores need. A
bare share keeps that part of whatever is compared: a row, a block of columns or a whole layer.
"""

import re
from dataclasses import dataclass

import torch

_N_OF_M = re.compile(r"(\d+):(\d+)")


@dataclass(frozen=True)
class Pattern:
    """What a mask must look like.

    Args:
        density: share of weights kept, in (0, 1).
        run: length ``m`` of the runs of input channels that each keep the same number, or None.
    """

    density: float
    run: int | None = None

    @property
    def kept_of_run(self) -> int:
        """Weights kept in every run (``n`` of ``n:m``); 0 without runs."""
        return 0 if self.run is None else round(self.density * self.run)


def parse_pattern(text: str | float) -> Pattern:
    """Read ``"2:4"`` or the share of weights to *remove*, such as ``0.5``.

    Raises:
        ValueError: it is neither, or keeps nothing or everything.
    """
    match = _N_OF_M.fullmatch(str(text))
    if match:
        kept, run = int(match[1]), int(match[2])
        if not 0 < kept < run:
            raise ValueError(f"pattern {text}: keep at least 1 and fewer than {run} of {run}")
        return Pattern(kept / run, run)
    try:
        removed = float(text)
    except ValueError:
        raise ValueError(
            f"pattern {text!r}: write n:m such as 2:4, or the share to remove such as 0.5"
        ) from None
    if not 0.0 < removed < 1.0:
        raise ValueError(f"pattern {text}: the share to remove lies between 0 and 1")
    return Pattern(1.0 - removed)


def why_not_fit(pattern: Pattern, k: int) -> str | None:
    """Why a width cannot have the pattern, naming both numbers; None if it can."""
    if pattern.run is None or k % pattern.run == 0:
        return None
    return (
        f"pattern {pattern.kept_of_run}:{pattern.run} needs input widths divisible by "
        f"{pattern.run}, this layer has {k}"
    )


def require_fit(pattern: Pattern, k: int) -> None:
    """Refuse a width that the pattern's runs do not divide.

    Raises:
        ValueError: naming both numbers.
    """
    if (reason := why_not_fit(pattern, k)) is not None:
        raise ValueError(reason)


def keep_highest(scores: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    """The mask that keeps the highest scores.

    Args:
        scores: [N, K]; each row (or each run of a row) is compared by itself. Equal scores: the
            lower input channel stays.
        pattern: how many stay.

    Returns:
        [N, K] bool, True where a weight is kept; every row keeps equally many.

    Raises:
        ValueError: the pattern's runs do not divide K.
    """
    n, k = scores.shape
    require_fit(pattern, k)
    run = pattern.run or k
    kept = pattern.kept_of_run or max(1, round(pattern.density * k))
    order = scores.reshape(-1, run).argsort(dim=1, descending=True, stable=True)
    mask = torch.zeros_like(order, dtype=torch.bool)
    return mask.scatter_(1, order[:, :kept], True).view(n, k)
