"""Axes of layouts."""


# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,operator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _axis_layout(axis, layout, rank):
    """Lay out one axis of a layout: every other one sliced away, the last outermost."""
    for other in reversed(range(rank)):
        if other != axis:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def axis(AXIS: gl.constexpr, SIZE: gl.constexpr, LAYOUT: gl.constexpr, RANK: gl.constexpr):
    """Return 0..SIZE-1 along one axis of a layout, every other axis of length 1."""
    value = gl.arange(0, SIZE, _axis_layout(AXIS, LAYOUT, RANK))
    for other in gl.static_range(RANK):
        if other != AXIS:
            value = gl.expand_dims(value, other)
    return value
