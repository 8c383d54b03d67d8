"""What every grid can do, so that rounding algorithms know no element format.

A *spec* is the shape of a grid (element type, group size, types of scales). Fitted to a weight it
becomes a *grid*: scales are fixed, and any values of the weight's shape can be rounded onto it, all
at once or one input channel at a time. What a grid encodes are *codes*, which stand for a weight.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

# (position in the order of visits, values [N] fp32) -> the nearest values on the grid, [N] fp32
ColumnRounding = Callable[[int, torch.Tensor], torch.Tensor]


class Codes(Protocol):
    """A rounded weight, as compact as it is stored."""

    def dequantize(self) -> torch.Tensor:
        """The weight the codes stand for, [N, K] fp32."""


C = TypeVar("C", bound=Codes, covariant=True)


class Grid(Protocol[C]):
    """A weight's grid, its scales fixed. Zero is always on it, so that pruned weights stay zero."""

    def round(self, values: torch.Tensor) -> torch.Tensor:
        """The nearest values on the grid.

        Args:
            values: [N, K] fp32.

        Returns:
            [N, K] fp32.
        """

    def by_column(self, order: torch.Tensor) -> ColumnRounding:
        """Rounding of one input channel at a time.

        Args:
            order: [K] int64 permutation, the order in which channels will be visited.
        """

    def encode(self, values: torch.Tensor) -> C:
        """The codes nearest to ``values`` [N, K]; exact for values on the grid already."""


class Spec(Protocol[C]):
    """The shape of a grid."""

    def fit(self, weight: torch.Tensor, importance: torch.Tensor | None = None) -> Grid[C]:
        """The grid of least error for a weight.

        Args:
            weight: [N, K] any float dtype.
            importance: [K] fp32 non-negative weight of each input channel's error, or None.
        """
