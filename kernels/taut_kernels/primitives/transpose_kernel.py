"""The transpose's rungs: one idea more each.

- :func:`rows_kernel` (V1): a program reads down a column and writes a piece of a row. Each read of
  2 or 4 bytes moves a sector of 32; what saves it is L2, where the neighbouring programs find the
  rest
- :func:`coalesced_kernel` (V2): a program reads a piece of a row, whole sectors, 16 bytes a lane,
  and scatters it. Reads are perfect now, but each scattered write is a partial sector, which L2
  must merge: twice V1's time on an H200. Of the two, scattered reads are the cheaper evil
- :func:`tiled_kernel` (V3 and V4): a block goes through shared memory, so that both sides see whole
  sectors. V3 takes 16×16: 32 or 64 bytes a row. V4 takes blocks whose rows are 128 bytes and more
  on both sides, 16 bytes a lane both ways, and the compiler's swizzled exchange, which has no bank
  conflicts: it should be near a copy
- :func:`tma_kernel` (V5): the copy engine moves the block in and out of shared memory; what is left
  for the lanes is the exchange
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_kernel(
    x_ptr,  # [B, R, C]
    y_ptr,  # [B, C, R], contiguous
    R,
    C,
    stride_xb,
    stride_xr,
    stride_xc,
    BLOCK: tl.constexpr,
):
    c, batch = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    offs_r = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs_r < R
    x = tl.load(x_ptr + batch * stride_xb + offs_r * stride_xr + c * stride_xc, mask=mask)
    tl.store(y_ptr + (batch * C + c) * R + offs_r, x, mask=mask)


@triton.jit
def coalesced_kernel(
    x_ptr, y_ptr, R, C, stride_xb, stride_xr, stride_xc, BLOCK: tl.constexpr
):  # fmt: skip
    """Arguments as :func:`rows_kernel`; a program reads along a row."""
    r, batch = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    offs_c = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs_c < C
    x = tl.load(x_ptr + batch * stride_xb + r * stride_xr + offs_c * stride_xc, mask=mask)
    tl.store(y_ptr + (batch * C + offs_c) * R + r, x, mask=mask)


@triton.jit
def tiled_kernel(
    x_ptr, y_ptr, R, C, stride_xb, stride_xr, stride_xc, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Arguments as :func:`rows_kernel`; a program turns a tile in shared memory."""
    batch, pid = tl.program_id(2).to(tl.int64), tl.program_id(0)
    blocks_c = tl.cdiv(C, BLOCK_C)
    offs_r = (pid // blocks_c).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_c = (pid % blocks_c).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_r, mask_c = offs_r < R, offs_c < C
    x_ptrs = x_ptr + batch * stride_xb + offs_r[:, None] * stride_xr + offs_c[None, :] * stride_xc
    x = tl.load(x_ptrs, mask=mask_r[:, None] & mask_c[None, :])
    y_ptrs = y_ptr + batch * C * R + offs_c[:, None] * R + offs_r[None, :]
    tl.store(y_ptrs, tl.trans(x), mask=mask_c[:, None] & mask_r[None, :])


@triton.jit
def tma_kernel(
    x_desc,  # [B, R, C] in blocks [1, BLOCK_R, BLOCK_C]
    y_desc,  # [B, C, R] in blocks [1, BLOCK_C, BLOCK_R]
    C,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    batch, pid = tl.program_id(2), tl.program_id(0)
    blocks_c = tl.cdiv(C, BLOCK_C)
    first_r, first_c = pid // blocks_c * BLOCK_R, pid % blocks_c * BLOCK_C
    x = x_desc.load([batch, first_r, first_c])
    y_desc.store([batch, first_c, first_r], tl.permute(x, (0, 2, 1)))
