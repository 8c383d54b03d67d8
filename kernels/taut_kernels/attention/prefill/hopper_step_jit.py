"""What a group of warps does with one block of keys and at a tile's end.

See :mod:`.hopper_kernel`.
"""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from taut_kernels.attention.prefill.tile_jit import store_rows


@gluon.jit
def hide(
    scores, n, position, count_k, CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr, SCORES: gl.constexpr
):
    """Set scores of the keys of block ``n`` that their query does not see to −∞."""
    key = n * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
    seen = gl.expand_dims(key < count_k, 0)
    if CAUSAL:
        seen = seen & (gl.expand_dims(key, 0) <= gl.expand_dims(position, 1))
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def soften(scores, row_max, scale_log2, MASKED: gl.constexpr):
    """Return the weights of scores, the new maximum, and what older sums are to be scaled by."""
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale_log2)
    shift = new_max
    if MASKED:
        # A row that has seen no key yet: ∞ − ∞ would be NaN.
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    weights = gl.exp2(scores * scale_log2 - gl.expand_dims(shift, 1))
    return weights, new_max, gl.exp2(row_max - shift)


@gluon.jit
def scaled(o, factor, SUMS: gl.constexpr):
    """Return the rows of ``o``, each times its factor."""
    return o * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, SUMS)), 1)


@gluon.jit
def step(
    o, p, row_max, row_sum, q, rings, full, empty, at, n, ahead, position, count_k,
    scale_log2, CAUSAL: gl.constexpr, MASKED: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, SCORES: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Multiply keys block ``n``, the ring's ``at``-th, and the values of the block before."""
    slot, before = at % STAGES, (at - 1) % STAGES
    zeros = gl.zeros([64, BLOCK_N], gl.float32, SCORES)
    keys = rings[0].index(slot).permute([1, 0])
    scores = hopper.warpgroup_mma(q, keys, zeros, use_acc=False, is_async=True)
    mbarrier.wait(full[1].index(before), ((at - 1) // STAGES) & 1)
    o = hopper.warpgroup_mma(p, rings[1].index(before), o, is_async=True)
    scores = hopper.warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(empty[0].index(slot), count=1)
    if MASKED:
        scores = hide(scores, n, position, count_k, CAUSAL, BLOCK_N, SCORES)
    weights, row_max, decay = soften(scores, row_max, scale_log2, MASKED)
    row_sum = row_sum * decay + gl.sum(weights, 1)
    next_p = gl.convert_layout(weights.to(rings[1].dtype), gl.DotOperandLayout(0, SUMS, 2))
    # ptxas moves the wait for the products ahead of the softmax, whose numbers it does not name,
    # unless there is a loop between: that of the wait for the next keys.
    mbarrier.wait(full[0].index((at + ahead) % STAGES), ((at + ahead) // STAGES) & 1)
    # Until here the product reads p: next_p needs registers of its own.
    o, p, next_p = hopper.warpgroup_mma_wait(0, deps=[o, p, next_p])
    mbarrier.arrive(empty[1].index(before), count=1)
    return scaled(o, decay, SUMS), next_p, row_max, row_sum


@gluon.jit
def store(
    o, row_max, row_sum, o_ptr, lse_ptr, stride_ot, first_m, count_q, D: gl.constexpr,
    BLOCK_D: gl.constexpr, SCORES: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Store a group's rows of the output and of lse."""
    none = row_sum == 0.0
    o = scaled(o, 1.0 / gl.where(none, 1.0, row_sum), SUMS)
    lse = gl.where(none, float("-inf"), (row_max + gl.log2(row_sum)) * 0.6931471805599453)
    offs_m = first_m + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    gl.store(lse_ptr + offs_m, lse, mask=offs_m < count_q)
    store_rows(o_ptr, o, stride_ot, first_m, count_q, D, BLOCK_D)
