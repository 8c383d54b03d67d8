"""The order in which programs walk through the tiles of a product."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return the row tile and the column tile of the ``tile``-th output tile.

    Tiles go in groups of GROUP_M row tiles, in which the columns of a group stay in L2.
    """
    tiles_in_group = GROUP_M * tiles_n
    first_m = (tile // tiles_in_group) * GROUP_M
    group_m = tl.minimum(tiles_m - first_m, GROUP_M)
    return first_m + (tile % tiles_in_group) % group_m, (tile % tiles_in_group) // group_m
