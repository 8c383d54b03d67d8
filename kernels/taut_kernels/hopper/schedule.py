"""Which part of the result a program computes, and in which order."""


# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,operator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def place(tile, tiles_m, tiles_n, GROUP_M: gl.constexpr):
    """Return the token tile and the feature tile of the ``tile``-th output tile."""
    in_group = GROUP_M * tiles_n
    first_m = (tile // in_group) * GROUP_M
    group_m = gl.minimum(tiles_m - first_m, GROUP_M)
    inside = tile % in_group
    return first_m + inside % group_m, inside // group_m


@gluon.jit
def first_token(part, M, ROWS: gl.constexpr):
    """Return where the ``part``-th ROWS tokens begin: earlier where M ends within or before them.

    So some are computed twice, to the same bits. TMA takes several times as long to fill a row with
    zeros as to load one.
    """
    return gl.maximum(gl.minimum(part * ROWS, M - ROWS), 0)
