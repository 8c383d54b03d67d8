"""GEMM V4, tuned: V3 with a tile for each shape, K split for small outputs, an epilogue.

Four ideas over V3. Tile, warps, stages and the walk are looked up (table ``gemm``): a
128×256 tile is right for 8192³ and leaves most of the card idle at 64×4096. Where even small tiles
are fewer than multiprocessors, SPLIT_K programs share a tile; each writes its fp32 sums, and
:func:`add_splits_kernel` adds them in a fixed order, so that the bits never change. Bias and
activation are applied to the accumulator: no pass over c of their own.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from taut_kernels.primitives.gemm_tma_kernel import halves, load_step, store_part
from taut_kernels.primitives.tile_order_jit import place


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Apply ``none``, ``relu``, ``silu`` or ``gelu`` (by erf) to fp32."""
    if ACTIVATION == "relu":
        # A NaN stays one: max(NaN, 0) of the hardware is 0.
        x = tl.where(x < 0.0, 0.0, x)
    elif ACTIVATION == "silu":
        x = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return x


@triton.jit
def finish(part, bias_ptr, first_n, N, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr):
    """Add the bias to columns from ``first_n`` on, and activate."""
    if HAS_BIAS:
        offs_n = first_n + tl.arange(0, part.shape[1])
        part += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    return activate(part, ACTIVATION)


@triton.jit
def _unit(
    unit, a_desc, b_desc, c_desc, c_ptr, bias_ptr, M, N, K, tiles_m, tiles_n,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, STORE_TMA: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, SPLIT_K: tl.constexpr, PARTS: tl.constexpr,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one tile, or one of its SPLIT_K shares of K, and store it."""
    pid_m, pid_n = place(unit // SPLIT_K, tiles_m, tiles_n, GROUP_M)
    first_m, first_n = pid_m * BLOCK_M, pid_n * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    steps = tl.cdiv(K, BLOCK_K)
    begin = 0
    if SPLIT_K > 1:
        share = tl.cdiv(steps, SPLIT_K)
        begin = (unit % SPLIT_K) * share
        steps = tl.minimum(steps - begin, share)
    for i in range(steps):
        k = (begin + i) * BLOCK_K
        a, b = load_step(a_desc, b_desc, first_m, first_n, k, A_TRANSPOSED, B_TRANSPOSED)
        acc = tl.dot(a, b, acc)
    if SPLIT_K > 1:
        # c holds the shares below each other: [SPLIT_K, M, N] fp32.
        share_ptr = c_ptr + tl.cast(unit % SPLIT_K, tl.int64) * M * N
        store_part(c_desc, share_ptr, acc, first_m, first_n, M, N, False)
    elif PARTS == 1:
        part = finish(acc, bias_ptr, first_n, N, HAS_BIAS, ACTIVATION)
        store_part(c_desc, c_ptr, part, first_m, first_n, M, N, STORE_TMA)
    else:
        left, right = halves(acc, BLOCK_M, BLOCK_N)
        left = finish(left, bias_ptr, first_n, N, HAS_BIAS, ACTIVATION)
        store_part(c_desc, c_ptr, left, first_m, first_n, M, N, STORE_TMA)
        second_n = first_n + BLOCK_N // 2
        right = finish(right, bias_ptr, second_n, N, HAS_BIAS, ACTIVATION)
        store_part(c_desc, c_ptr, right, first_m, second_n, M, N, STORE_TMA)


@triton.jit
def gemm_tuned_kernel(
    a_desc,  # [M, K] in blocks [BLOCK_M, BLOCK_K], or its transpose in blocks [BLOCK_K, BLOCK_M]
    b_desc,  # [K, N] in blocks [BLOCK_K, BLOCK_N], or its transpose in blocks [BLOCK_N, BLOCK_K]
    c_desc,  # [M, N] in blocks [BLOCK_M, BLOCK_N / PARTS]; None without STORE_TMA
    c_ptr,  # [M, N], or fp32 [SPLIT_K, M, N]; contiguous
    bias_ptr,  # [N]; unused without HAS_BIAS
    M,
    N,
    K,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    STORE_TMA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PERSISTENT: tl.constexpr,
    FLATTEN: tl.constexpr,  # one loop over tiles and K, or one in the other
    PARTS: tl.constexpr,  # 1 or 2: columns of a tile stored at once or in halves
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = tl.program_id(0)
    if PERSISTENT:
        units = tiles_m * tiles_n * SPLIT_K
        for unit in tl.range(first, units, tl.num_programs(0), flatten=FLATTEN):
            _unit(
                unit, a_desc, b_desc, c_desc, c_ptr, bias_ptr, M, N, K, tiles_m, tiles_n,
                A_TRANSPOSED, B_TRANSPOSED, STORE_TMA, HAS_BIAS, ACTIVATION, SPLIT_K, PARTS,
                GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    else:
        _unit(
            first, a_desc, b_desc, c_desc, c_ptr, bias_ptr, M, N, K, tiles_m, tiles_n, A_TRANSPOSED,
            B_TRANSPOSED, STORE_TMA, HAS_BIAS, ACTIVATION, SPLIT_K, PARTS, GROUP_M, BLOCK_M,
            BLOCK_N, BLOCK_K,
        )  # fmt: skip


@triton.jit
def add_splits_kernel(
    partial_ptr,  # [SPLIT_K, size] fp32
    bias_ptr,  # [N]; unused without HAS_BIAS
    c_ptr,  # [size] = [M, N]
    size,
    N,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the shares of a split product in order; bias and activation behind."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < size
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for share in tl.static_range(SPLIT_K):
        acc += tl.load(partial_ptr + share * tl.cast(size, tl.int64) + offs, mask=mask, other=0.0)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + offs % N, mask=mask, other=0.0).to(tl.float32)
    tl.store(c_ptr + offs, activate(acc, ACTIVATION).to(c_ptr.dtype.element_ty), mask=mask)
