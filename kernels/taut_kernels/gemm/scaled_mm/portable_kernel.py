"""The Triton kernel of the 8-bit products for few and middling tokens.

The weights are the row operand of the tensor cores (64 rows a `wgmma`), the tokens its columns, so
that one token pads to 16 columns and not to 64 rows. Tiles of both wait in a ring of shared memory
filled by `cp.async`, ``num_stages`` deep: at few tokens the bytes in flight are what counts.

With EARLY the kernel starts before the one in front has ended (programmatic dependent launch): it
asks for its first weights, which nobody writes while serving, and only then waits for the
activations.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def start_early(
    w_ptr, rows, stride_wn, split, K, PREFETCH: tl.constexpr, SPLIT_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Bring the first PREFETCH lines of 128 bytes of each row into L2, then wait for the inputs."""
    if PREFETCH:
        LINES: tl.constexpr = BLOCK_K // 128
        line = tl.arange(0, PREFETCH)
        k = (line // LINES * SPLIT_K + split) * BLOCK_K + line % LINES * 128
        addresses = w_ptr + (rows[:, None] * stride_wn + tl.minimum(k, K - 1)[None, :])
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [addresses.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    gdc_launch_dependents()
    gdc_wait()


@triton.jit
def scaled(
    acc,  # [BLOCK_N, BLOCK_M] int32 or fp32: weights × tokens
    x_scale_ptr,
    w_scale_ptr,
    azp_adj_ptr,
    azp_ptr,
    bias_ptr,
    offs_m,
    offs_n,
    M,
    N,
    stride_xs,
    stride_ws,
    HAS_AZP_ADJ: tl.constexpr,
    HAS_AZP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Apply zero points, both scales and the bias; the result is fp32."""
    mask_m, mask_n = offs_m < M, offs_n < N
    if HAS_AZP_ADJ:
        adjustment = tl.load(azp_adj_ptr + offs_n, mask=mask_n, other=0)[:, None]
        if HAS_AZP:
            adjustment = adjustment * tl.load(azp_ptr + offs_m, mask=mask_m, other=0)[None, :]
        acc = acc - adjustment
    w_scale = tl.load(w_scale_ptr + offs_n * stride_ws, mask=mask_n, other=0.0)
    x_scale = tl.load(x_scale_ptr + offs_m * stride_xs, mask=mask_m, other=0.0)
    y = acc.to(tl.float32) * w_scale[:, None] * x_scale[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
    return y


@triton.jit
def sum_of_splits(
    acc, partial_ptr, arrivals_ptr, program, split, SPLIT_K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Leave this program's part in memory; return (all parts' sum, True) in the last to arrive."""
    place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    first = partial_ptr + program.to(tl.int64) * (SPLIT_K * BLOCK_N * BLOCK_M)
    tl.store(first + split * (BLOCK_N * BLOCK_M) + place, acc)
    # Every thread's part is stored before one of them announces the program.
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr + program, 1, sem="acq_rel", scope="gpu")
    last = arrived == SPLIT_K - 1
    if last:
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=acc.dtype)
        for s in tl.static_range(SPLIT_K):
            # In order of the splits: the same bits from run to run. Past L1, which does not see
            # what other programs store.
            acc += tl.load(first + s * (BLOCK_N * BLOCK_M) + place, cache_modifier=".cg")
        tl.store(arrivals_ptr + program, 0)
    return acc, last


@triton.jit(do_not_specialize=["M", "stride_xs", "stride_ws"])
def scaled_mm_kernel(
    x_ptr,  # [M, K] int8 or e4m3, stride_xk = 1
    w_ptr,  # [N, K] as x, stride_wk = 1
    x_scale_ptr,  # [M] or [1] fp32
    w_scale_ptr,  # [N] or [1] fp32
    azp_adj_ptr,  # [N] int32; unused without HAS_AZP_ADJ
    azp_ptr,  # [M] int32; unused without HAS_AZP
    bias_ptr,  # [N]; unused without HAS_BIAS
    y_ptr,  # [M, N], contiguous
    partial_ptr,  # [programs, SPLIT_K, BLOCK_N, BLOCK_M] int32 or fp32
    arrivals_ptr,  # [programs] int32, 0 before and after; both unused with SPLIT_K = 1
    M,
    stride_xs,  # 1, or 0 for one scale
    stride_ws,
    N,
    K,
    stride_xm,
    stride_wn,
    HAS_AZP_ADJ: tl.constexpr,
    HAS_AZP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,  # K is a multiple of BLOCK_K · SPLIT_K
    EARLY: tl.constexpr,  # programmatic dependent launch, sm_90 only
    PREFETCH: tl.constexpr,  # with EARLY: lines of each row asked for before the inputs are there
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    ACC: tl.constexpr = tl.int32 if w_ptr.dtype.element_ty == tl.int8 else tl.float32
    # Neighbouring programs share their weights, which outweigh the activations, in L2.
    pid_m, pid_n, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = split * BLOCK_K + tl.arange(0, BLOCK_K)
    mask_m = offs_m[:, None] < M
    # Rows beyond N read the last one again, without a mask; they are never stored.
    # int64: M·stride and N·stride pass 2**31 on long prompts and large layers.
    rows = tl.minimum(offs_n, N - 1).to(tl.int64)
    w_ptrs = w_ptr + rows[:, None] * stride_wn + offs_k[None, :]
    x_ptrs = x_ptr + offs_m.to(tl.int64)[:, None] * stride_xm + offs_k[None, :]
    if EARLY:
        start_early(w_ptr, rows, stride_wn, split, K, PREFETCH, SPLIT_K, BLOCK_K)
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=ACC)
    for k in range(0, K - split * BLOCK_K, BLOCK_K * SPLIT_K):
        if EVEN_K:
            w = tl.load(w_ptrs)
            x = tl.load(x_ptrs, mask=mask_m, other=0.0)
        else:
            mask_k = offs_k[None, :] < K - k
            w = tl.load(w_ptrs, mask=mask_k, other=0.0)
            x = tl.load(x_ptrs, mask=mask_m & mask_k, other=0.0)
        acc = tl.dot(w, tl.trans(x), acc, out_dtype=ACC)
        w_ptrs += BLOCK_K * SPLIT_K
        x_ptrs += BLOCK_K * SPLIT_K

    finished = True
    if SPLIT_K > 1:
        program = pid_n * tl.num_programs(0) + pid_m
        acc, finished = sum_of_splits(
            acc, partial_ptr, arrivals_ptr, program, split, SPLIT_K, BLOCK_M, BLOCK_N
        )
    if finished:
        y = scaled(
            acc, x_scale_ptr, w_scale_ptr, azp_adj_ptr, azp_ptr, bias_ptr, offs_m, offs_n, M, N,
            stride_xs, stride_ws, HAS_AZP_ADJ, HAS_AZP, HAS_BIAS,
        )  # fmt: skip
        y_ptrs = y_ptr + offs_m.to(tl.int64)[None, :] * N + offs_n[:, None]
        mask = (offs_m < M)[None, :] & (offs_n < N)[:, None]
        tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask)
