"""The Triton kernel of the 8-bit products for many tokens: persistent, tiles by the copy engine.

One program a multiprocessor walks through output tiles in groups of GROUP_M token tiles, so that
the weights of a group stay in L2. Operands and result move through tensor descriptors made on the
host (TMA). With FLATTEN the loops over tiles and K are one, so that the loads of the next tile
start before the stores of this one; without it products of neighbouring steps overlap.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _place(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return the token tile and the row tile of the ``tile``-th output tile."""
    tiles_in_group = GROUP_M * tiles_n
    first_m = (tile // tiles_in_group) * GROUP_M
    group_m = tl.minimum(tiles_m - first_m, GROUP_M)
    return first_m + (tile % tiles_in_group) % group_m, (tile % tiles_in_group) // group_m


@triton.jit
def _store_part(
    y_desc,
    acc,  # [BLOCK_M, width] int32 or fp32
    x_scale,  # [BLOCK_M]
    w_scale_ptr,
    azp_adj_ptr,
    azp,  # [BLOCK_M]
    bias_ptr,
    first_m,
    first_n,
    N,
    stride_ws,
    HAS_AZP_ADJ: tl.constexpr,
    HAS_AZP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Apply zero points, scales and bias to part of a tile's columns, and store it."""
    offs_n = first_n + tl.arange(0, WIDTH)
    mask_n = offs_n < N
    if HAS_AZP_ADJ:
        adjustment = tl.load(azp_adj_ptr + offs_n, mask=mask_n, other=0)[None, :]
        if HAS_AZP:
            adjustment = adjustment * azp[:, None]
        acc = acc - adjustment
    w_scale = tl.load(w_scale_ptr + offs_n * stride_ws, mask=mask_n, other=0.0)
    y = acc.to(tl.float32) * w_scale[None, :] * x_scale[:, None]
    if HAS_BIAS:
        y += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    y_desc.store([first_m, first_n], y.to(y_desc.dtype))


@triton.jit(do_not_specialize=["M", "stride_xs", "stride_ws"])
def scaled_mm_tma_kernel(
    x_desc,  # [M, K] int8 or e4m3 in blocks [BLOCK_M, BLOCK_K]
    w_desc,  # [N, K] as x in blocks [BLOCK_N, BLOCK_K]
    y_desc,  # [M, N] in blocks [BLOCK_M, BLOCK_N / PARTS]
    x_scale_ptr,  # [M] or [1] fp32
    w_scale_ptr,  # [N] or [1] fp32
    azp_adj_ptr,  # [N] int32; unused without HAS_AZP_ADJ
    azp_ptr,  # [M] int32; unused without HAS_AZP
    bias_ptr,  # [N]; unused without HAS_BIAS
    M,
    N,
    K,
    stride_xs,  # 1, or 0 for one scale
    stride_ws,
    HAS_AZP_ADJ: tl.constexpr,
    HAS_AZP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FLATTEN: tl.constexpr,  # one loop over tiles and K, or one in the other
    GROUP_M: tl.constexpr,
    PARTS: tl.constexpr,  # 1 or 2: columns of a tile stored at once or in halves
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    ACC: tl.constexpr = tl.int32 if w_desc.dtype == tl.int8 else tl.float32
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first, step = tl.program_id(0), tl.num_programs(0)
    for tile in tl.range(first, tiles_m * tiles_n, step, flatten=FLATTEN):
        pid_m, pid_n = _place(tile, tiles_m, tiles_n, GROUP_M)
        first_m, first_n = pid_m * BLOCK_M, pid_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
        for k in range(tl.cdiv(K, BLOCK_K)):
            x = x_desc.load([first_m, k * BLOCK_K])
            w = w_desc.load([first_n, k * BLOCK_K])
            acc = tl.dot(x, w.T, acc, out_dtype=ACC)
        offs_m = first_m + tl.arange(0, BLOCK_M)
        mask_m = offs_m < M
        x_scale = tl.load(x_scale_ptr + offs_m * stride_xs, mask=mask_m, other=0.0)
        azp = offs_m
        if HAS_AZP:
            azp = tl.load(azp_ptr + offs_m, mask=mask_m, other=0)
        if PARTS == 1:
            _store_part(
                y_desc,
                acc,
                x_scale,
                w_scale_ptr,
                azp_adj_ptr,
                azp,
                bias_ptr,
                first_m,
                first_n,
                N,
                stride_ws,
                HAS_AZP_ADJ,
                HAS_AZP,
                HAS_BIAS,
                BLOCK_N,
            )
        else:
            halves = tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
            left, right = tl.split(halves)
            for part in tl.static_range(2):
                _store_part(
                    y_desc,
                    left if part == 0 else right,
                    x_scale,
                    w_scale_ptr,
                    azp_adj_ptr,
                    azp,
                    bias_ptr,
                    first_m,
                    first_n + part * (BLOCK_N // 2),
                    N,
                    stride_ws,
                    HAS_AZP_ADJ,
                    HAS_AZP,
                    HAS_BIAS,
                    BLOCK_N // 2,
                )
