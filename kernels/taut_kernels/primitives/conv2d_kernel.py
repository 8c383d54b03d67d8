"""Convolution as a product that is never laid out: pixels × (taps · channels) × output channels.

- :func:`gather_kernel` (V1): every program computes where its pixels' inputs lie and gathers them
  with `cp.async`, 16 bytes a lane where channels are next to each other. Any stride, dilation and
  padding
- :func:`blocks_kernel` (V2): at stride 1 the inputs of a block of pixels [images, rows, columns]
  under one tap are a block of x, shifted: the copy engine fetches it, and fills in zeros where the
  shift leaves the image, so that padding costs nothing. At stride t rows t·i + a of one a are as
  far apart from each other as neighbours were, and so are columns t·j + b: with a an axis of its
  own and b beside the channels, x has five axes, as many as the copy engine knows, and the inputs
  under one tap are again a shifted block, of the a and b of the tap. Pixels are the columns of the
  product and weights its rows: `wgmma` then reads both from shared memory (a block with several
  dimensions may be its second operand, as its first it would go through registers)
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _gather(
    x_ptrs,  # [BLOCK_M, 1]: the first tap of each pixel, channel 0
    w_ptrs,  # [1, BLOCK_N]: each output channel's weights
    offs_k,  # [BLOCK_K]
    h,  # [BLOCK_M]: row of the first tap
    w,
    mask_m,
    mask_n,
    H,
    W,
    C,
    stride_xh,
    stride_xw,
    stride_xc,
    S: tl.constexpr,
    TAPS: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
):
    """Return x [BLOCK_M, BLOCK_K] and w [BLOCK_K, BLOCK_N] of any taps and channels."""
    tap, c = offs_k // C, offs_k % C
    down, right = tap // S * DILATION_H, tap % S * DILATION_W
    rows, columns = h[:, None] + down[None, :], w[:, None] + right[None, :]
    inside = mask_m[:, None] & (tap < TAPS)[None, :]
    inside = inside & (rows >= 0) & (rows < H) & (columns >= 0) & (columns < W)
    shift = down.to(tl.int64) * stride_xh + right.to(tl.int64) * stride_xw + c * stride_xc
    x = tl.load(x_ptrs + shift[None, :], mask=inside, other=0.0)
    mask = (tap < TAPS)[:, None] & mask_n[None, :]
    return x, tl.load(w_ptrs + offs_k[:, None], mask=mask, other=0.0)


@triton.jit
def _gather_tap(
    x_ptrs,
    w_ptrs,
    tap,
    offs_c,  # [BLOCK_K]
    h,
    w,
    mask_m,
    mask_n,
    H,
    W,
    C,
    stride_xh,
    stride_xw,
    stride_xc,
    S: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
):
    """Return x and w of channels of one tap: its place and its bounds are one a pixel."""
    down, right = tap // S * DILATION_H, tap % S * DILATION_W
    rows, columns = h + down, w + right
    inside = mask_m & (rows >= 0) & (rows < H) & (columns >= 0) & (columns < W)
    mask_c = offs_c < C
    shift = tl.cast(down, tl.int64) * stride_xh + tl.cast(right, tl.int64) * stride_xw
    x_ptrs = x_ptrs + (shift + offs_c * stride_xc)[None, :]
    x = tl.load(x_ptrs, mask=inside[:, None] & mask_c[None, :], other=0.0)
    w_ptrs = w_ptrs + (tap * C + offs_c)[:, None]
    return x, tl.load(w_ptrs, mask=mask_c[:, None] & mask_n[None, :], other=0.0)


@triton.jit
def gather_kernel(
    x_ptr,  # [N, H, W, C], any strides
    w_ptr,  # [K, R, S, C], contiguous
    bias_ptr,  # [K]; unused without HAS_BIAS
    y_ptr,  # [N, P, Q, K], contiguous
    size,  # output pixels: N · P · Q
    H,
    W,
    C,
    P,
    Q,
    K,
    stride_xn,
    stride_xh,
    stride_xw,
    stride_xc,
    HAS_BIAS: tl.constexpr,
    TAPWISE: tl.constexpr,  # a step is within one tap; else it may span several (few channels)
    R: tl.constexpr,
    S: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    blocks_n = tl.cdiv(K, BLOCK_N)
    pid = tl.program_id(0)
    offs_m = pid // blocks_n * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid % blocks_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = offs_m < size, offs_n < K
    q, rest = offs_m % Q, offs_m // Q
    h, w = rest % P * STRIDE_H - PAD_H, q * STRIDE_W - PAD_W
    first = (rest // P).to(tl.int64) * stride_xn
    first += h.to(tl.int64) * stride_xh + w.to(tl.int64) * stride_xw
    x_ptrs = x_ptr + first[:, None]
    w_ptrs = w_ptr + (offs_n.to(tl.int64) * (R * S * C))[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    offs_k = tl.arange(0, BLOCK_K)
    if TAPWISE:
        steps = tl.cdiv(C, BLOCK_K)
        for i in range(R * S * steps):
            tap, offs_c = i // steps, i % steps * BLOCK_K + offs_k
            a, b = _gather_tap(
                x_ptrs, w_ptrs, tap, offs_c, h, w, mask_m, mask_n, H, W, C, stride_xh, stride_xw,
                stride_xc, S, DILATION_H, DILATION_W,
            )  # fmt: skip
            acc = tl.dot(a, b, acc)
    else:
        for k in range(0, R * S * C, BLOCK_K):
            a, b = _gather(
                x_ptrs, w_ptrs, k + offs_k, h, w, mask_m, mask_n, H, W, C, stride_xh, stride_xw,
                stride_xc, S, R * S, DILATION_H, DILATION_W,
            )  # fmt: skip
            acc = tl.dot(a, b, acc)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    y_ptrs = y_ptr + offs_m.to(tl.int64)[:, None] * K + offs_n[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


@triton.jit
def blocks_kernel(
    x_desc,  # [N, H, W, C] in blocks [BLOCK_IMAGES, BLOCK_P, BLOCK_Q, BLOCK_C]; at other strides
    # than 1 [N, H / STRIDE_H, STRIDE_H, W / STRIDE_W, STRIDE_W · C], one of the third axis a block
    w_desc,  # [R·S, K, C] in blocks [1, BLOCK_N, BLOCK_C]
    bias_ptr,  # [K]; unused without HAS_BIAS
    y_desc,  # [N, P, Q, K] in blocks [BLOCK_IMAGES, BLOCK_P, BLOCK_Q, BLOCK_N]
    P,
    Q,
    C,
    K,
    HAS_BIAS: tl.constexpr,
    TAPS: tl.constexpr,
    S: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    BLOCK_IMAGES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    PIXELS: tl.constexpr = BLOCK_IMAGES * BLOCK_P * BLOCK_Q
    blocks_n, blocks_q, blocks_p = tl.cdiv(K, BLOCK_N), tl.cdiv(Q, BLOCK_Q), tl.cdiv(P, BLOCK_P)
    # Programs of the same pixels follow each other: they share x in L2.
    pid = tl.program_id(0)
    channel, rest = pid % blocks_n * BLOCK_N, pid // blocks_n
    q, rest = rest % blocks_q * BLOCK_Q, rest // blocks_q
    p, image = rest % blocks_p * BLOCK_P, rest // blocks_p * BLOCK_IMAGES
    acc = tl.zeros((BLOCK_N, PIXELS), dtype=tl.float32)
    steps = tl.cdiv(C, BLOCK_C)
    for i in range(TAPS * steps):
        tap, c = i // steps, i % steps * BLOCK_C
        # The tap's shift and whole windows of padding: never negative, so that // rounds down.
        down = tap // S * DILATION_H + PAD_H * (STRIDE_H - 1)
        right = tap % S * DILATION_W + PAD_W * (STRIDE_W - 1)
        i_h, i_w = p + down // STRIDE_H - PAD_H, q + right // STRIDE_W - PAD_W
        if STRIDE_H == 1 and STRIDE_W == 1:
            x = x_desc.load([image, i_h, i_w, c])
        else:
            x = x_desc.load([image, i_h, down % STRIDE_H, i_w, right % STRIDE_W * C + c])
        w = tl.reshape(w_desc.load([tap, channel, c]), (BLOCK_N, BLOCK_C))
        acc = tl.dot(w, tl.reshape(x, (PIXELS, BLOCK_C)).T, acc)
    if HAS_BIAS:
        offs_n = channel + tl.arange(0, BLOCK_N)
        acc += tl.load(bias_ptr + offs_n, mask=offs_n < K, other=0.0).to(tl.float32)[:, None]
    y = tl.reshape(acc.to(y_desc.dtype).T, (BLOCK_IMAGES, BLOCK_P, BLOCK_Q, BLOCK_N))
    y_desc.store([image, p, q, channel], y)
