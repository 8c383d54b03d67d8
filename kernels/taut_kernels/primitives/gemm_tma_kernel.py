"""GEMM V3, pipelined: the copy engine fills shared memory while `wgmma` reads it; persistent.

Three ideas over V2. Loads run stages ahead of the products, so that neither waits for the other.
Tensor descriptors (TMA) let one thread ask for a whole block: no addresses, no bounds, no registers
in the loop, and a block arrives in the swizzled order that `wgmma` reads without bank conflicts.
Programs are persistent, one a multiprocessor: the loops over tiles and K are one, so that the
first loads of the next tile run while this one is converted and stored, in two halves that
leave room for one stage more. It should gain a factor of two and more; what it leaves is the tile,
the same for every shape.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from taut_kernels.primitives.tile_order_jit import place


@triton.jit
def load_step(
    a_desc, b_desc, first_m, first_n, k, A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr
):
    """Return a [BLOCK_M, BLOCK_K] and b [BLOCK_K, BLOCK_N] from whichever way they lie."""
    a = a_desc.load([k, first_m]).T if A_TRANSPOSED else a_desc.load([first_m, k])
    b = b_desc.load([first_n, k]).T if B_TRANSPOSED else b_desc.load([k, first_n])
    return a, b


@triton.jit
def product_of_tile(
    a_desc, b_desc, first_m, first_n, K, A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the sums of one tile over all of K, fp32."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(tl.cdiv(K, BLOCK_K)):
        a, b = load_step(a_desc, b_desc, first_m, first_n, k * BLOCK_K, A_TRANSPOSED, B_TRANSPOSED)
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def store_part(c_desc, c_ptr, part, first_m, first_n, M, N, STORE_TMA: tl.constexpr):
    """Store some columns of a tile; by pointers where rows of c are not multiples of 16 bytes."""
    if STORE_TMA:
        c_desc.store([first_m, first_n], part.to(c_desc.dtype))
    else:
        offs_m = first_m.to(tl.int64) + tl.arange(0, part.shape[0])
        offs_n = first_n + tl.arange(0, part.shape[1])
        mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
        c_ptrs = c_ptr + offs_m[:, None] * N + offs_n[None, :]
        tl.store(c_ptrs, part.to(c_ptr.dtype.element_ty), mask=mask)


@triton.jit
def halves(acc, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Split a tile [ROWS, COLUMNS] into its left and its right half."""
    return tl.split(tl.permute(tl.reshape(acc, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def gemm_tma_kernel(
    a_desc,  # [M, K] in blocks [BLOCK_M, BLOCK_K], or its transpose in blocks [BLOCK_K, BLOCK_M]
    b_desc,  # [K, N] in blocks [BLOCK_K, BLOCK_N], or its transpose in blocks [BLOCK_N, BLOCK_K]
    c_desc,  # [M, N] in blocks [BLOCK_M, BLOCK_N / 2]; None without STORE_TMA
    c_ptr,  # [M, N], contiguous
    M,
    N,
    K,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    STORE_TMA: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first, step = tl.program_id(0), tl.num_programs(0)
    for tile in tl.range(first, tiles_m * tiles_n, step, flatten=True):
        pid_m, pid_n = place(tile, tiles_m, tiles_n, GROUP_M)
        first_m, first_n = pid_m * BLOCK_M, pid_n * BLOCK_N
        acc = product_of_tile(
            a_desc, b_desc, first_m, first_n, K, A_TRANSPOSED, B_TRANSPOSED, BLOCK_M, BLOCK_N,
            BLOCK_K,
        )  # fmt: skip
        left, right = halves(acc, BLOCK_M, BLOCK_N)
        store_part(c_desc, c_ptr, left, first_m, first_n, M, N, STORE_TMA)
        store_part(c_desc, c_ptr, right, first_m, first_n + BLOCK_N // 2, M, N, STORE_TMA)
