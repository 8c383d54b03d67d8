"""The reduction's kernel, and what its rungs do with it.

A program takes BLOCK_I results next to each other and walks along the reduced side BLOCK_R elements
a step, one partial result a lane; lanes are joined once, at the end. The rungs differ in how many
programs share a result:

- V1, single pass: one. Enough where results are many; the sum of a whole tensor is then one program
  on one multiprocessor, at a hundredth of the card's rate
- V2, two stages: each result is cut into shares of a fixed length, a program each, and a second
  launch joins them. The whole card works, but programs are short: each pays its start and its join
- V3, persistent: as many programs as run at once, each walking through (result, share) items whose
  number follows from the card; few shares and long streams, with twice the bytes under way a lane
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _join(acc, MAXIMUM: tl.constexpr):
    """Reduce lanes [BLOCK_R, BLOCK_I] to [BLOCK_I]; a maximum keeps NaN, which `tl.max` drops."""
    if MAXIMUM:
        unordered = tl.max((acc != acc).to(tl.int32), 0)
        joined = tl.where(unordered != 0, float("nan"), tl.max(acc, 0))
    else:
        joined = tl.sum(acc, 0)
    return joined


@triton.jit
def _item(
    item, x_ptr, y_ptr, R, inner, share, splits, results, stride_xo, stride_xr, stride_xi, factor,
    MAXIMUM: tl.constexpr, STAGES: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Reduce one share of BLOCK_I results next to each other."""
    blocks = tl.cdiv(inner, BLOCK_I)
    block, rest = item % blocks, item // blocks
    split, outer = rest % splits, tl.cast(rest // splits, tl.int64)
    offs_i = tl.cast(block, tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)
    mask_i = offs_i < inner
    begin = tl.cast(split, tl.int64) * share
    end = tl.minimum(begin + share, R)
    x_ptrs = x_ptr + outer * stride_xo + offs_i[None, :] * stride_xi
    neutral: tl.constexpr = float("-inf") if MAXIMUM else 0.0
    acc = tl.full((BLOCK_R, BLOCK_I), neutral, dtype=tl.float32)
    for r in tl.range(begin, end, BLOCK_R, num_stages=STAGES):
        offs_r = r + tl.arange(0, BLOCK_R)
        mask = (offs_r < end)[:, None] & mask_i[None, :]
        x = tl.load(x_ptrs + offs_r[:, None] * stride_xr, mask=mask, other=neutral)
        if MAXIMUM:
            acc = tl.maximum(acc, x.to(tl.float32), propagate_nan=tl.PropagateNan.ALL)
        else:
            acc += x.to(tl.float32)
    y = _join(acc, MAXIMUM)
    # Shares of one result are `results` apart: the second stage reduces [splits, results].
    y_ptrs = y_ptr + tl.cast(split, tl.int64) * results + outer * inner + offs_i
    tl.store(y_ptrs, (y * factor).to(y_ptr.dtype.element_ty), mask=mask_i)


@triton.jit
def reduce_kernel(
    x_ptr,  # [outer, R, inner], any strides
    y_ptr,  # [splits, outer, inner], contiguous
    R,
    inner,
    share,  # elements of the reduced side a program takes
    splits,
    results,  # outer · inner
    items,  # programs' work: outer · splits · blocks of inner
    stride_xo,
    stride_xr,
    stride_xi,
    factor,  # fp32: 1, or 1 / R for the last stage of a mean
    MAXIMUM: tl.constexpr,  # else the sum
    PERSISTENT: tl.constexpr,
    STAGES: tl.constexpr,  # steps whose loads are under way
    BLOCK_R: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    if PERSISTENT:
        for item in tl.range(tl.program_id(0), items, tl.num_programs(0)):
            _item(
                item, x_ptr, y_ptr, R, inner, share, splits, results, stride_xo, stride_xr,
                stride_xi, factor, MAXIMUM, STAGES, BLOCK_R, BLOCK_I,
            )  # fmt: skip
    else:
        _item(
            tl.program_id(0), x_ptr, y_ptr, R, inner, share, splits, results, stride_xo, stride_xr,
            stride_xi, factor, MAXIMUM, STAGES, BLOCK_R, BLOCK_I,
        )  # fmt: skip
