"""GEMM V2, tiled: tiles as large as registers hold, walked in groups, bounds out of the loop.

Three ideas over V1. A 128×128 tile halves the traffic of a 64×64 one and is what a warp group's
`wgmma` is made for. Groups of GROUP_M tile rows are walked column by column, so that the tiles in
flight share both operands in L2: about √programs rows and columns instead of one row. Bounds are
compared once, outside the loop, and not at all where the sizes divide; pointers are advanced
instead of computed again. It should gain a factor of two to three.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from taut_kernels.primitives.tile_order_jit import place


@triton.jit
def gemm_tiled_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Operands as of :func:`.gemm_direct_kernel`; EVEN: M, N, K are multiples of the tile's."""
    pid_m, pid_n = place(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    offs_m = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K).to(tl.int64)
    # Rows beyond the end read row 0 and are not stored: a bound less in the loop.
    rows_m = offs_m if EVEN_M else tl.where(offs_m < M, offs_m, 0)
    rows_n = offs_n if EVEN_N else tl.where(offs_n < N, offs_n, 0)
    a_ptrs = a_ptr + rows_m[:, None] * stride_am + offs_k[None, :] * stride_ak
    b_ptrs = b_ptr + offs_k[:, None] * stride_bk + rows_n[None, :] * stride_bn
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            mask_k = offs_k < K - k
            a = tl.load(a_ptrs, mask=mask_k[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=mask_k[:, None], other=0.0)
        acc = tl.dot(a, b, acc)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    c_ptrs = c_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=mask)
