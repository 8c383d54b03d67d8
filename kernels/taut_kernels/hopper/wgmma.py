"""Products of a warp group whose operand A is registers, and their sums."""

# ruff: noqa: RUF005 (Triton's front end adds tuples and does not unpack them)
# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,operator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait


@gluon.constexpr_function
def sums_of(tokens, warps):
    """Return the layout of a row tile's sums with so many tokens."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, tokens, 16])


@gluon.jit
def no_sums(TOKENS: gl.constexpr, WARPS: gl.constexpr):
    """Return a row tile's sums before its first product."""
    return gl.full((16 * WARPS, TOKENS), 0.0, gl.float32, sums_of(TOKENS, WARPS))


@gluon.jit
def wait_for_products(sums, RUNNING: gl.constexpr):
    """Wait until no more than RUNNING products are left."""
    after = warpgroup_mma_wait(RUNNING, deps=sums)
    if len(sums) == 1:
        after = (after,)
    return after


@gluon.jit
def multiply(sums, a, xs, r: gl.constexpr, RUNNING: gl.constexpr, WARPS: gl.constexpr):
    """Add a row tile's products with every part of the block, and wait for the ones before.

    Args:
        sums: of every row tile, by part of the block.
        a: the row tile's weights, as operand A of the first part.
        xs: the parts' activations, [K, tokens].
        r: which row tile.
        RUNNING: weights whose products may be left running.
        WARPS: that multiply.
    """
    after = ()
    for i in gl.static_range(len(sums)):
        total = sums[i]
        if i // len(xs) == r:
            # The same registers in every part's layout.
            operand = gl.convert_layout(
                a,
                gl.DotOperandLayout(0, sums_of(xs[i % len(xs)].shape[1], WARPS), 2),
                assert_trivial=True,
            )
            total = warpgroup_mma(operand, xs[i % len(xs)], total, is_async=True)
        after = after + (total,)
    return wait_for_products(after, RUNNING * len(xs))
