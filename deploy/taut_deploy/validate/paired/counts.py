"""The two by two table of items that two models answered, right or wrong."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class PairedCounts:
    """How often which of two models was right.

    Args:
        both: items that both answered rightly.
        baseline_only: that the baseline alone did (flips from good to bad).
        candidate_only: that the candidate alone did (flips from bad to good).
        neither: that neither did.
    """

    both: int
    baseline_only: int
    candidate_only: int
    neither: int

    @property
    def items(self) -> int:
        """All items."""
        return self.both + self.baseline_only + self.candidate_only + self.neither

    @property
    def baseline_right(self) -> int:
        """Items that the baseline answered rightly."""
        return self.both + self.baseline_only

    @property
    def candidate_right(self) -> int:
        """Items that the candidate answered rightly."""
        return self.both + self.candidate_only

    @property
    def flips(self) -> int:
        """Items that one of the two alone answered rightly."""
        return self.baseline_only + self.candidate_only


def count_pairs(baseline: Bools, candidate: Bools) -> PairedCounts:
    """Count.

    Args:
        baseline: [items] whether the baseline was right.
        candidate: [items] whether the candidate was.
    """
    return PairedCounts(
        both=int(np.sum(baseline & candidate)),
        baseline_only=int(np.sum(baseline & ~candidate)),
        candidate_only=int(np.sum(~baseline & candidate)),
        neither=int(np.sum(~baseline & ~candidate)),
    )
