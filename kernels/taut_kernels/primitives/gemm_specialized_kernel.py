"""GEMM V4's warp-specialised form: one group of warps loads, two groups multiply.

In V3 the warps that multiply also wait for and ask for blocks, and both groups of four meet at
every step. Here a warp group of its own asks for blocks as soon as shared memory is free, and each
of the two others keeps its own products going, 64 of the tile's 128 rows each, with most of the
registers. Triton splits the program by itself (``warp_specialize``), but only where the descriptors
are made in the kernel, since it cuts their blocks in two: that is why this form does not take them
from the host. Source: FlashAttention-3 and CUTLASS' cooperative kernels for the idea.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from taut_kernels.primitives.gemm_tma_kernel import product_of_tile, store_part
from taut_kernels.primitives.gemm_tuned_kernel import finish
from taut_kernels.primitives.tile_order_jit import place


@triton.jit(do_not_specialize=["M", "K"])  # a constant 1 breaks the specialisation (3.6)
def gemm_specialized_kernel(
    a_ptr,  # [M, K] with rows at stride_a, or its transpose
    b_ptr,  # [K, N] with rows at stride_b, or its transpose
    c_ptr,  # [M, N], contiguous
    bias_ptr,  # [N]; unused without HAS_BIAS
    M,
    N,
    K,
    stride_a,
    stride_b,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    STORE_TMA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    if A_TRANSPOSED:
        a_desc = tl.make_tensor_descriptor(a_ptr, [K, M], [stride_a, 1], [BLOCK_K, BLOCK_M])
    else:
        a_desc = tl.make_tensor_descriptor(a_ptr, [M, K], [stride_a, 1], [BLOCK_M, BLOCK_K])
    if B_TRANSPOSED:
        b_desc = tl.make_tensor_descriptor(b_ptr, [N, K], [stride_b, 1], [BLOCK_N, BLOCK_K])
    else:
        b_desc = tl.make_tensor_descriptor(b_ptr, [K, N], [stride_b, 1], [BLOCK_K, BLOCK_N])
    c_desc = None
    if STORE_TMA:
        c_desc = tl.make_tensor_descriptor(c_ptr, [M, N], [N, 1], [BLOCK_M, BLOCK_N])
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first, step = tl.program_id(0), tl.num_programs(0)
    for tile in tl.range(first, tiles_m * tiles_n, step, warp_specialize=True):
        pid_m, pid_n = place(tile, tiles_m, tiles_n, GROUP_M)
        first_m, first_n = pid_m * BLOCK_M, pid_n * BLOCK_N
        acc = product_of_tile(
            a_desc, b_desc, first_m, first_n, K, A_TRANSPOSED, B_TRANSPOSED, BLOCK_M, BLOCK_N,
            BLOCK_K,
        )  # fmt: skip
        c = finish(acc, bias_ptr, first_n, N, HAS_BIAS, ACTIVATION)
        store_part(c_desc, c_ptr, c, first_m, first_n, M, N, STORE_TMA)
