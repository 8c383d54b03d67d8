"""Barriers between the warps of a program and on shared memory."""


# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,operator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Make barriers, each of so many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def barrier_pairs(COUNT: gl.constexpr, FIRST: gl.constexpr, SECOND: gl.constexpr):
    """Make twice as many barriers, of FIRST and of SECOND arrivals.

    One of each in turn: between two of one allocation Triton 3.6 puts a `bar.sync`, some 30 clocks.
    """
    first = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    second = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(first.index(i), count=FIRST)
        mbarrier.init(second.index(i), count=SECOND)
    return first, second
