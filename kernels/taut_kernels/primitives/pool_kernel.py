"""Pooling: one lane an output, outputs in the order of memory, the window read straight from L1.

Neighbouring outputs share most of their windows, and x is far larger than what they compute: the
floor is x read once and y written once. Lanes run along the side that is contiguous (channels for
channels_last, columns otherwise), so that a warp's loads are whole sectors and the overlap of the
windows is found in L1 and L2.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _take(acc, ptrs, inside, AVERAGE: tl.constexpr):
    """Add one element of each window to the sum, or hold it against the maximum."""
    if AVERAGE:
        acc += tl.load(ptrs, mask=inside, other=0.0).to(tl.float32)
    else:
        x = tl.load(ptrs, mask=inside, other=float("-inf")).to(tl.float32)
        acc = tl.maximum(acc, x, propagate_nan=tl.PropagateNan.ALL)
    return acc


@triton.jit
def pool2d_kernel(
    x_ptr,  # [N, C, H, W], any strides
    y_ptr,  # [N, C, P, Q], written in the order of memory
    size,  # outputs
    C,
    H,
    W,
    P,
    Q,
    stride_xn,
    stride_xc,
    stride_xh,
    stride_xw,
    CHANNELS_LAST: tl.constexpr,  # order of y: N, P, Q, C; else N, C, P, Q
    AVERAGE: tl.constexpr,  # else the maximum
    COUNT_PADDING: tl.constexpr,  # an average divides by the whole window
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    UNROLL: tl.constexpr,  # all loads of a window at once
    BLOCK: tl.constexpr,
):
    # Outputs are fewer than 2**31, so that divisions are of 32 bits; addresses in x are of 64.
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < size
    if CHANNELS_LAST:
        c, rest = offs % C, offs // C
        q, rest = rest % Q, rest // Q
        p, n = rest % P, rest // P
    else:
        q, rest = offs % Q, offs // Q
        p, rest = rest % P, rest // P
        c, n = rest % C, rest // C
    first_h, first_w = p * STRIDE_H - PAD_H, q * STRIDE_W - PAD_W
    # One address a lane; the elements of a window are a scalar away from it.
    x_ptrs = x_ptr + n.to(tl.int64) * stride_xn + c.to(tl.int64) * stride_xc
    x_ptrs += first_h.to(tl.int64) * stride_xh + first_w.to(tl.int64) * stride_xw
    acc = tl.full((BLOCK,), 0.0 if AVERAGE else float("-inf"), dtype=tl.float32)
    if UNROLL:
        for i in tl.static_range(KERNEL_H):
            row = mask & (first_h + i >= 0) & (first_h + i < H)
            for j in tl.static_range(KERNEL_W):
                inside = row & (first_w + j >= 0) & (first_w + j < W)
                ptrs = x_ptrs + (tl.cast(stride_xh, tl.int64) * i + stride_xw * j)
                acc = _take(acc, ptrs, inside, AVERAGE)
    else:
        for tap in range(KERNEL_H * KERNEL_W):
            i, j = tap // KERNEL_W, tap % KERNEL_W
            h, w = first_h + i, first_w + j
            inside = mask & (h >= 0) & (h < H) & (w >= 0) & (w < W)
            ptrs = x_ptrs + (tl.cast(stride_xh, tl.int64) * i + stride_xw * j)
            acc = _take(acc, ptrs, inside, AVERAGE)
    if AVERAGE:
        if COUNT_PADDING:
            acc = acc * (1.0 / (KERNEL_H * KERNEL_W))
        else:
            rows = tl.minimum(first_h + KERNEL_H, H) - tl.maximum(first_h, 0)
            columns = tl.minimum(first_w + KERNEL_W, W) - tl.maximum(first_w, 0)
            acc = acc / (rows * columns).to(tl.float32)
    tl.store(y_ptr + offs, acc.to(y_ptr.dtype.element_ty), mask=mask)
