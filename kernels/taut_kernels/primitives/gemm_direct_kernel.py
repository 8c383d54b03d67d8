"""GEMM V1, direct: one program an output tile, plain pointers, nothing overlapped.

The idea is only the tile: an element of ``a`` loaded once serves BLOCK_N columns, so that memory
traffic falls from 2·M·N·K elements to M·N·K · (1/BLOCK_M + 1/BLOCK_N). What it leaves undone: every
step checks every bound, waits for its loads before it multiplies, and neighbours in time are
neighbours in a row of tiles, so that ``b`` streams through L2 once for each row of tiles.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gemm_direct_kernel(
    a_ptr,  # [M, K]
    b_ptr,  # [K, N]
    c_ptr,  # [M, N], contiguous
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    pid = tl.program_id(0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    # A tile's corner times a stride may pass 2**31.
    offs_m = (pid // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = (pid % tiles_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K).to(tl.int64)
        a = tl.load(
            a_ptr + offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak,
            mask=(offs_m < M)[:, None] & (offs_k < K)[None, :],
            other=0.0,
        )
        b = tl.load(
            b_ptr + offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn,
            mask=(offs_k < K)[:, None] & (offs_n < N)[None, :],
            other=0.0,
        )
        acc = tl.dot(a, b, acc)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    c_ptrs = c_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=mask)
