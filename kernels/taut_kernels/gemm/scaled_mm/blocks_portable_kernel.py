"""The Triton kernel of the FP8 product with one scale a 128×128 block of weights.

Weights as the row operand, as in :mod:`.portable_kernel`. A step of the loop is one
block of 128 K indices: its product starts from zero and enters the sum times both scales, so that
the tensor cores never accumulate over more than 128 products.

The only kernel of these products on cards without TMA, and for N that eight does not divide. It
never starts before the kernel in front has ended: where that pays other kernels are faster.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from taut_kernels.gemm.scaled_mm.portable_kernel import sum_of_splits

# Triton's interpreter has no assembly.
_ASSEMBLY = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def prefetch_row(row_ptr, size):
    """Bring a row of fp32 values into L2: a step's load is in time for that, not for memory."""
    if _ASSEMBLY:
        # A sector holds 8.
        place = tl.minimum(tl.arange(0, 128) * 8, size - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [(row_ptr + place).to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit(do_not_specialize=["M", "stride_xsm", "stride_xsk", "stride_wsn"])
def fp8_block_kernel(
    x_ptr,  # [M, K] e4m3, stride_xk = 1
    w_ptr,  # [N, K] e4m3, stride_wk = 1
    x_scale_ptr,  # [M, ceil(K/128)] fp32, any strides
    w_scale_ptr,  # [ceil(N/128), ceil(K/128)] fp32, contiguous along K
    bias_ptr,  # [N]; unused without HAS_BIAS
    y_ptr,  # [M, N], contiguous
    partial_ptr,  # [programs, SPLIT_K, BLOCK_N, BLOCK_M] fp32
    arrivals_ptr,  # [programs] int32, 0 before and after; both unused with SPLIT_K = 1
    M,
    stride_xsm,
    stride_xsk,
    stride_wsn,
    N,
    K,
    stride_xm,
    stride_wn,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,  # K is a multiple of 128 · SPLIT_K
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # 64 or 128: within one block of weights
):
    GROUP: tl.constexpr = 128
    AHEAD: tl.constexpr = BLOCK_M <= 64  # those of 128 tokens find no registers
    pid_m, pid_n, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = split * GROUP + tl.arange(0, GROUP)
    mask_m = offs_m < M
    # int64 before the multiplications: M·stride and N·stride pass 2**31.
    rows = tl.minimum(offs_n, N - 1).to(tl.int64)
    tokens = offs_m.to(tl.int64)
    w_ptrs = w_ptr + rows[:, None] * stride_wn + offs_k[None, :]
    x_ptrs = x_ptr + tokens[:, None] * stride_xm + offs_k[None, :]
    x_scale_ptrs = x_scale_ptr + tokens * stride_xsm
    w_scale_row = w_scale_ptr + (pid_n * BLOCK_N // GROUP) * stride_wsn
    groups = tl.cdiv(K, GROUP)
    prefetch_row(w_scale_row, groups)
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    first = tl.minimum(split, groups - 1)
    x_scale = tl.load(x_scale_ptrs + first * stride_xsk, mask=mask_m, other=0.0)
    w_scale = tl.load(w_scale_row + first)
    for group in range(split, groups, SPLIT_K):
        if AHEAD:
            scale = x_scale * w_scale
            # The next step's: nothing but a product's operands travels in Triton's ring, and asked
            # for where they are used they are waited for. The last step reads one again.
            following = tl.minimum(group + SPLIT_K, groups - 1)
            x_scale = tl.load(x_scale_ptrs + following * stride_xsk, mask=mask_m, other=0.0)
            w_scale = tl.load(w_scale_row + following)
        else:
            x_scale = tl.load(x_scale_ptrs + group * stride_xsk, mask=mask_m, other=0.0)
            scale = x_scale * tl.load(w_scale_row + group)
        if EVEN_K:
            w = tl.load(w_ptrs)
            x = tl.load(x_ptrs, mask=mask_m[:, None], other=0.0)
        else:
            mask_k = tl.arange(0, GROUP)[None, :] < K - group * GROUP
            w = tl.load(w_ptrs, mask=mask_k, other=0.0)
            x = tl.load(x_ptrs, mask=mask_m[:, None] & mask_k, other=0.0)
        acc += tl.dot(w, tl.trans(x)) * scale[None, :]
        w_ptrs += GROUP * SPLIT_K
        x_ptrs += GROUP * SPLIT_K

    finished = True
    if SPLIT_K > 1:
        program = pid_n * tl.num_programs(0) + pid_m
        acc, finished = sum_of_splits(
            acc, partial_ptr, arrivals_ptr, program, split, SPLIT_K, BLOCK_M, BLOCK_N
        )
    if finished:
        mask = mask_m[None, :] & (offs_n < N)[:, None]
        if HAS_BIAS:
            bias = tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0)
            acc += bias.to(tl.float32)[:, None]
        y_ptrs = y_ptr + tokens[None, :] * N + offs_n[:, None]
        tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask)
